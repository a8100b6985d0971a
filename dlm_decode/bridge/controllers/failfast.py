"""Grow the draft while it is confident; submit it as soon as it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.bridge.controllers import CONTROLLERS, Controller
from dlm_decode.options import option


@CONTROLLERS.register("failfast")
@dataclass(frozen=True)
class FailFast(Controller):
    """Add a chunk of n while every token of the last one has confidence tau or more.

    The chunk with a doubtful token is submitted whole (Fail Fast, Win Big, arXiv:2512.20573).
    """

    paper: ClassVar[str] = "FailFast, arXiv:2512.20573"

    tau: float = option(0.45, "confidence that every token of a chunk must have", low=0.0, high=1.0)
    n: int = option(10, "tokens a chunk", low=1)
    n_max: int = option(30, "most tokens a draft; published: 60", low=1)

    def first(self, state: Any) -> int:
        return min(self.n, self.n_max)

    def more(self, state: Any, confidence: Sequence[float], chunk: int) -> int:
        sure = all(c >= self.tau for c in confidence[-chunk:])
        return min(self.n, self.n_max - len(confidence)) if sure else 0
