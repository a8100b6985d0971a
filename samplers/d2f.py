"""The commit rule of discrete diffusion forcing, for several blocks in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler, in_window
from dlm_decode.scores import LAWS, commit_candidates, confidence
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("d2f")
@dataclass(frozen=True)
class D2f(Sampler):
    """Commit every confident token of each open block, and the best of a block that must move on.

    Discrete diffusion forcing (D2F), arXiv:2508.09192: c_i > tau_conf everywhere. A block without
    any such token commits its most confident one, but only if it is fully activated: the share of
    decided positions in the block before it is at least tau_act. The first open block always is.
    With one block in the window it is `threshold` with `strict`; see `--schedule pipeline`.
    """

    paper: ClassVar[str] = "D2F, arXiv:2508.09192"

    threshold: float = option(0.9, "tau_conf, confidence above which tokens are committed", low=0.0)
    activation: float = option(
        0.95, "tau_act, decided share that activates the next block", low=0, high=1
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        return commit_candidates(
            canvas, output, confident(canvas, c, self.threshold, self.activation), c
        ), state


def confident(canvas: Canvas, c: Tensor, threshold: float, activation: float) -> Tensor:
    """The eligible positions of `c (B, W)` above `threshold`, and the best one of each activated
    block that has none, `(B, W)`."""
    block = _blocks(canvas)
    sure = canvas.eligible & (c > threshold)
    waits = ~_activated(canvas, block, activation) | (_count(sure, block) > 0)
    return sure | _best_of_each(c, canvas.eligible & ~waits.gather(-1, block), block)


def _activated(canvas: Canvas, block: Tensor, activation: float) -> Tensor:
    """Which blocks `(B, W)` of the window may be forced, by the one before each."""
    inside = in_window(canvas)
    size = _count(inside, block).clamp(min=1)
    decided = _count(inside & ~canvas.masked, block)
    enough = (decided / size).roll(1, dims=-1) >= activation
    enough[:, 0].fill_(True)
    return enough


def _blocks(canvas: Canvas) -> Tensor:
    """Index `(B, W)` of each position's block, counted from the window's start."""
    offset = canvas.positions - canvas.start[:, None]
    return (offset // canvas.block_length[:, None]).clamp(0, offset.shape[-1] - 1)


def _count(where: Tensor, block: Tensor) -> Tensor:
    """How many positions of each block are marked, `(B, W)`."""
    return torch.zeros_like(block).scatter_add_(-1, block, where.to(block.dtype))


def _best_of_each(c: Tensor, eligible: Tensor, block: Tensor) -> Tensor:
    """The eligible position of highest score, the first among equals, of each block, `(B, W)`."""
    open_ = c.masked_fill(~eligible, -torch.inf)
    highest = torch.full_like(open_, -torch.inf).scatter_reduce(-1, block, open_, "amax")
    equal = eligible & (open_ == highest.gather(-1, block))
    place = torch.arange(c.shape[-1], device=c.device).expand_as(block)
    late = place.masked_fill(~equal, c.shape[-1])
    first = torch.full_like(late, c.shape[-1]).scatter_reduce(-1, block, late, "amin")
    return equal & (place == first.gather(-1, block))
