"""Positions in ever denser combs over the block: the dilated unmasking schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, best, commit_candidates, confidence
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("dus")
@dataclass(frozen=True)
class Dus(Sampler):
    """Commit every s-th position of the block, with s shrinking by a factor each step down to 1.

    Dilated unmasking schedule (DUS), arXiv:2506.19037: a block of B masks takes R = ceil(log_a B)
    steps; step t commits the k (from 0) with k mod s_t = 0, s_t = max(1, floor(B / a^t)), that are
    left, so that tokens decided together are far apart; the last step commits all. With `skip`,
    positions below that confidence wait for the next step. Derived: k counts the positions that
    were masked when the block began, and a step with `skip` still commits its most confident one.
    """

    paper: ClassVar[str] = "Dilated unmasking schedule, arXiv:2506.19037"

    base: int = option(2, "a, the factor by which the distance shrinks each step", low=2)
    skip: float | None = option(
        None, "confidence below which a position waits for the next step", low=0.0
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def init(self, canvas: Canvas) -> Any:
        masks = canvas.eligible.sum(-1)
        powers = self.base ** torch.arange(self._rounds(canvas), device=masks.device)
        return {
            "masks": masks,
            "place": canvas.eligible.cumsum(-1) - 1,
            "rounds": (powers < masks[:, None]).sum(-1),
        }

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        last = canvas.step >= state["rounds"] - 1
        comb = self._comb(canvas, state)
        if self.skip is not None:
            comb = (comb & (c >= self.skip)) | best(c, comb)
        chosen = (comb & ~last[:, None]) | (canvas.eligible & last[:, None])
        return commit_candidates(canvas, output, chosen, c), state

    def _comb(self, canvas: Canvas, state: Any) -> Tensor:
        """Positions `(B, W)` of this step and what earlier steps left over, before skipping."""
        t = torch.minimum(canvas.step + 1, state["rounds"])
        distance = (state["masks"] // self.base**t).clamp(min=1)
        return canvas.eligible & (state["place"] % distance[:, None] == 0)

    def _rounds(self, canvas: Canvas) -> int:
        """How many of 1, a, a^2, ... are below the width W, at least one."""
        rounds, reach = 1, self.base
        while reach < canvas.tokens.shape[1]:
            rounds, reach = rounds + 1, reach * self.base
        return rounds
