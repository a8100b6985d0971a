"""The commit rules of deferred commitment decoding, for the `sliding` schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import (
    LAWS,
    commit_candidates,
    confidence,
    negative_entropy,
    top,
)
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("dcd")
@dataclass(frozen=True)
class Dcd(Sampler):
    """Commit every score of the window that reaches the threshold or the highest score in it.

    Deferred commitment decoding (DCD), arXiv:2601.02076: {i in window: c_i >= min(tau, max c)}.
    With `--schedule sliding` the window follows the first mask and always holds as many masks, so
    that no block boundary forces a decision. `rule="fixed"` takes a number a step instead;
    `order_by="entropy"` scores by -H_i, whose threshold is `-entropy`.
    """

    paper: ClassVar[str] = "DCD, arXiv:2601.02076"

    rule: str = option("threshold", "how many go", choices=("threshold", "fixed"))
    threshold: float = option(0.9, "tau, the confidence that is enough", low=0.0)
    entropy: float = option(0.1, "entropy in nats that is low enough", low=0.0)
    count: int = option(1, "tokens a step under rule=fixed", low=1)
    order_by: str = option("confidence", "the score", choices=("confidence", "entropy"))
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"} if self.order_by == "entropy" else ())

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        by_entropy = self.order_by == "entropy"
        score = negative_entropy(output) if by_entropy else confidence(output, law=self.law)
        if self.rule == "fixed":
            chosen = top(score, canvas.eligible, self.count)
            return commit_candidates(canvas, output, chosen, score), state
        tau = -self.entropy if by_entropy else self.threshold
        highest = score.masked_fill(~canvas.eligible, -torch.inf).amax(-1, keepdim=True)
        return commit_candidates(canvas, output, score >= highest.clamp(max=tau), score), state
