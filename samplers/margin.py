"""Positions ordered by the lead of the best token over the second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import best, commit_candidates, margin
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("margin")
@dataclass(frozen=True)
class Margin(QuotaSampler):
    """Commit the positions with the largest lead of the best token over the second one.

    "Train for the Worst, Plan for the Best: Understanding Token Ordering in Masked Diffusions",
    arXiv:2502.06768: score m_i = p_i(1st) - p_i(2nd). A fixed quota a step as in
    `llada`, or, with `threshold`, every position with m_i >= threshold and always the best one.
    """

    paper: ClassVar[str] = "Train for the Worst, Plan for the Best, arXiv:2502.06768"

    threshold: float | None = option(
        None, "commit every margin of at least this (none: a quota a step)", low=0.0
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"p2"})

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        m = margin(output)
        if self.threshold is None:
            return self.take(canvas, output, state, m), state
        chosen = (m >= self.threshold) | best(m, canvas.eligible)
        return commit_candidates(canvas, output, chosen, m), state
