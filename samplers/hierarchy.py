"""The best token of every run of masks: dInfer's hierarchical decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, commit_candidates, confidence, ranks
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("hierarchy")
@dataclass(frozen=True)
class Hierarchy(Sampler):
    """Commit the best token of each contiguous run of masks, and every token that is very sure.

    "dInfer: An Efficient Inference Framework for Diffusion Language Models", arXiv:2510.08666. Of
    each maximal run the most confident i goes if c_i > low_threshold, so that tokens decided
    together are seldom neighbours; every c_i > threshold goes, and always the best of all. Derived:
    of equals only the first goes, where the published code commits a run's ties together.
    """

    paper: ClassVar[str] = "dInfer, arXiv:2510.08666"

    threshold: float = option(0.9, "confidence above which every token is committed", low=0.0)
    low_threshold: float = option(
        0.4, "confidence above which the best token of a run is committed", low=0.0
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        rank = ranks(c, canvas.eligible)
        leads = first_of_runs(rank, canvas.eligible)
        chosen = (c > self.threshold) | (leads & (c > self.low_threshold)) | (rank == 0)
        return commit_candidates(canvas, output, chosen, c), state


def first_of_runs(rank: Tensor, eligible: Tensor, starts: Tensor | None = None) -> Tensor:
    """The position of lowest `rank (B, W)` in each maximal run of eligible ones, `(B, W)` bool.

    `starts (B, W)`, where given, are the first positions of narrower runs.
    """
    if starts is None:
        starts = eligible & ~F.pad(eligible, (1, 0))[:, :-1]
    run = starts.cumsum(-1)
    width = rank.shape[-1]
    least = rank.new_full((rank.shape[0], width + 1), width)
    least = least.scatter_reduce(-1, run, rank.masked_fill(~eligible, width), "amin")
    return eligible & (rank == least.gather(-1, run))
