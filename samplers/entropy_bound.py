"""As many tokens as a bound on their dependence allows: the EB sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import (
    commit_candidates,
    confidence,
    longest_prefix,
    margin,
    negative_entropy,
    ranks,
    sorted_by_rank,
)
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("entropy_bound")
@dataclass(frozen=True)
class EntropyBound(Sampler):
    """Commit the longest list of certain positions whose joint error is bounded by gamma nats.

    "Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking",
    arXiv:2505.24857: with positions ordered by certainty, the largest k with
    sum_{l <= k} H_l - max_{l <= k} H_l <= gamma. The left side is at least the mutual information
    that deciding the k tokens independently ignores; it is 0 for k = 1. RND1's sampler is the same
    with `order_by=confidence`. Positions are ranked before anything is drawn.
    """

    paper: ClassVar[str] = "Entropy Bounded Unmasking, arXiv:2505.24857"

    gamma: float = option(0.1, "bound in nats; 0 commits one token a step", low=0.0)
    order_by: str = option(
        "entropy", "what certainty is", choices=("entropy", "confidence", "margin")
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy", "p2"} if self.order_by == "margin" else {"entropy"})

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        certainty = self._certainty(output)
        rank = ranks(certainty, canvas.eligible)
        h = output.entropy.double().clamp(min=0).masked_fill(~canvas.eligible, 0.0)
        h = sorted_by_rank(h, rank)
        passes = h.cumsum(-1) - h.cummax(-1).values <= self.gamma
        chosen = longest_prefix(passes, rank, canvas.eligible)
        return commit_candidates(canvas, output, chosen, certainty), state

    def _certainty(self, output: Output) -> Tensor:
        if self.order_by == "entropy":
            return negative_entropy(output)
        return confidence(output, law="rank") if self.order_by == "confidence" else margin(output)
