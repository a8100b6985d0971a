"""As many tokens as their confidences allow together: Fast-dLLM's factor rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import (
    LAWS,
    commit_candidates,
    confidence,
    longest_prefix,
    ranks,
    sorted_by_rank,
)
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("factor")
@dataclass(frozen=True)
class Factor(Sampler):
    """Commit the n most confident tokens, with the largest n that their lowest confidence allows.

    "Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel
    Decoding", arXiv:2505.22618, algorithm 2: the largest n >= 1 with (n + 1)(1 - c_(n)) < f, for
    confidences c_(1) >= c_(2) >= ... f = 1 is the condition of the paper's theorem 1.
    """

    paper: ClassVar[str] = "Fast-dLLM, arXiv:2505.22618"

    factor: float = option(1.0, "f; a larger one commits more tokens at once", above=0.0)
    last_rank_quirk: bool = option(
        False, "commit the last token too when it alone fails, as the published code does"
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        rank = ranks(c, canvas.eligible)
        chosen = longest_prefix(self._passes(c, rank, canvas.eligible), rank, canvas.eligible)
        if self.last_rank_quirk:
            chosen = chosen | _one_short(chosen, canvas.eligible)
        return commit_candidates(canvas, output, chosen, c), state

    def _passes(self, c: Tensor, rank: Tensor, eligible: Tensor) -> Tensor:
        """Whether the token of each rank may still go, `(B, W)` in rank order."""
        n = torch.arange(1, c.shape[-1] + 1, device=c.device)
        c_n = sorted_by_rank(c.double().masked_fill(~eligible, 0.0), rank)
        return (n == 1) | ((n + 1) * (1 - c_n) < self.factor)


def _one_short(chosen: Tensor, eligible: Tensor) -> Tensor:
    """All eligible positions of the rows in which only one of them is not chosen, `(B, W)`."""
    short = eligible.sum(-1) - chosen.sum(-1) == 1
    return eligible & short[:, None]
