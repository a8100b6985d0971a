"""Always the same draft length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.bridge.controllers import CONTROLLERS, Controller
from dlm_decode.options import option


@CONTROLLERS.register("fixed")
@dataclass(frozen=True)
class Fixed(Controller):
    """Draft `length` tokens each round."""

    paper: ClassVar[str] = "Speculative decoding, arXiv:2211.17192"

    length: int = option(8, "tokens a draft", low=1)

    def first(self, state: Any) -> int:
        return self.length
