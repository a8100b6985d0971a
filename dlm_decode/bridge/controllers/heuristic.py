"""Two tokens more after a draft that stood whole, one less after any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.bridge.controllers import CONTROLLERS, Controller
from dlm_decode.options import option


@CONTROLLERS.register("heuristic")
@dataclass(frozen=True)
class Heuristic(Controller):
    """k + 2 after full acceptance, else k - 1, at least 1: transformers' "heuristic" schedule.

    Taken from assisted generation in transformers (Joao Gante, 2023).
    """

    paper: ClassVar[str] = "transformers, assisted generation"

    length: int = option(5, "tokens of the first draft", low=1)
    n_max: int = option(30, "most tokens a draft", low=1)

    def init(self) -> Any:
        return self.length

    def first(self, state: Any) -> int:
        return min(int(state), self.n_max)

    def observe(self, state: Any, drafted: int, accepted: int) -> Any:
        return min(state + 2, self.n_max) if accepted == drafted else max(state - 1, 1)
