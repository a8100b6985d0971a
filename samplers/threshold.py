"""Every token that is confident enough: Fast-dLLM's parallel decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.quotas import block_share, block_steps, window_masks
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, best, commit_candidates, confidence, top
from dlm_decode.types import Canvas, Decision, Output

NEAR_BEST = 1e-5
"""How far below the best confidence dInfer still commits."""


@SAMPLERS.register("threshold")
@dataclass(frozen=True)
class Threshold(Sampler):
    """Commit every token whose confidence reaches the threshold, and always the best one.

    "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel
    Decoding", arXiv:2505.22618: commit c_i >= tau. If each of the n committed tokens
    has c_i > 1 - e with (n + 1) e <= 1, deciding them together equals deciding them greedily from
    their joint distribution (theorem 1).
    """

    paper: ClassVar[str] = "Fast-dLLM, arXiv:2505.22618"

    threshold: float = option(0.9, "tau, the confidence that is enough to commit", low=0.0)
    relative_to_best: bool = option(
        False, "also commit what is within 1e-5 of the best confidence (dInfer)"
    )
    strict: bool = option(False, "commit above the threshold only, not at it (SDAR, LLaDA2)")
    steps: int | None = option(
        None,
        "commit at most an equal share of the tokens a step, plus what earlier steps left over",
        low=1,
    )
    denoising_steps: int | None = option(
        None,
        "commit at least an equal share of the block in each of so many steps (SDAR, LLaDA2)",
        low=1,
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def init(self, canvas: Canvas) -> Any:
        masks = window_masks(canvas)
        return {"masks": masks, "carry": torch.zeros_like(masks)}

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        tau = self._tau(c, canvas.eligible)
        chosen = c > tau if self.strict else c >= tau
        if self.denoising_steps is not None:
            chosen = chosen | top(c, canvas.eligible, block_share(canvas, self.denoising_steps))
        if self.steps is None:
            chosen = chosen | best(c, canvas.eligible)
            return commit_candidates(canvas, output, chosen, c), state
        limit = self._limit(canvas, state, self.steps)
        chosen = (chosen & top(c, canvas.eligible, limit)) | best(c, canvas.eligible)
        carry = (limit - chosen.sum(-1)).clamp(min=0)
        return commit_candidates(canvas, output, chosen, c), state | {"carry": carry}

    def _limit(self, canvas: Canvas, state: Any, most: int) -> Tensor:
        """Most tokens `(B,)` of this step: the budget of Fast-dLLM's loop for Dream."""
        steps = block_steps(canvas, state["masks"], most)
        budget = (state["masks"] // steps) * (canvas.step < steps)
        return torch.minimum(budget + state["carry"], window_masks(canvas))

    def _tau(self, c: Tensor, eligible: Tensor) -> Tensor | float:
        """The threshold; relative to the best it is min(tau, max c - 1e-5), `(B, 1)`."""
        if not self.relative_to_best:
            return self.threshold
        highest = c.masked_fill(~eligible, -torch.inf).amax(dim=-1, keepdim=True)
        return (highest - NEAR_BEST).clamp(max=self.threshold)
