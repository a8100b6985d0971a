"""Positions in reading order, or in reverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler
from dlm_decode.samplers import SAMPLERS
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("left_to_right")
@dataclass(frozen=True)
class LeftToRight(QuotaSampler):
    """Commit a fixed number of positions a step in reading order, as an autoregressive model would.

    A baseline of "ParallelBench: Understanding the Trade-offs of Parallel Decoding in Diffusion
    LLMs", arXiv:2510.04767. Score -i, or i from right to left.
    """

    paper: ClassVar[str] = "ParallelBench, arXiv:2510.04767"

    right_to_left: bool = option(False, "begin at the end of the block")

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        i = canvas.positions.double()
        score = i if self.right_to_left else -i
        return self.take(canvas, output, state, score), state
