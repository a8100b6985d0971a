"""Positions ordered by the entropy of their distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import best, commit_candidates, negative_entropy
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("entropy")
@dataclass(frozen=True)
class Entropy(QuotaSampler):
    """Commit the positions whose distribution has the lowest entropy.

    The order of Dream ("Dream 7B: Diffusion Large Language Models", arXiv:2508.15487) and RND1:
    score -H_i, H_i = -sum_v p_i(v) ln p_i(v). A fixed quota a step as in `llada`, or, with
    `threshold`, every position with H_i <= threshold and always the best one.
    """

    paper: ClassVar[str] = "Dream 7B, arXiv:2508.15487"

    threshold: float | None = option(
        None, "commit every entropy of at most this, in nats (none: a quota a step)", low=0.0
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        score = negative_entropy(output)
        if self.threshold is None:
            return self.take(canvas, output, state, score), state
        chosen = (score >= -self.threshold) | best(score, canvas.eligible)
        return commit_candidates(canvas, output, chosen, score), state
