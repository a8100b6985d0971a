"""Fill everything once margins exceed a falling threshold: SchED."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dlm_decode.exits import EarlyExit
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS
from dlm_decode.types import Canvas


@SAMPLERS.register("sched")
@dataclass(frozen=True)
class Sched(EarlyExit):
    """Fill all masks as soon as the mean margin reaches a threshold that falls with progress.

    "Fast-Decoding Diffusion Language Models via Progress-Aware Confidence Schedules",
    arXiv:2512.02892: the region is everything generated, tau falls from tau_high to tau_low with
    progress r; see `EarlyExit` for margin and progress. tau = tau_low + (tau_high - tau_low) w with
    w = 1 - r, (1 + cos(pi r)) / 2 or exp(-k r). Derived: the closed forms, and averaging over masks
    (`average=all` is the paper's mean over the whole region).
    """

    paper: ClassVar[str] = "SchED, arXiv:2512.02892"

    shape: str = option(
        "cosine", "how the threshold falls", choices=("linear", "cosine", "exponential")
    )
    tau_high: float = option(7.5, "threshold in nats at the start", low=0.0)
    tau_low: float = option(0.0, "threshold in nats that it falls towards", low=0.0)
    k: float = option(2.0, "rate of the exponential; published: 2, 4, 8, 16", above=0.0)

    def region(self, canvas: Canvas) -> Tensor:
        return torch.ones_like(canvas.masked)

    def tau(self, progress: Tensor) -> Tensor:
        if self.shape == "linear":
            weight = 1 - progress
        elif self.shape == "cosine":
            weight = (1 + (torch.pi * progress).cos()) / 2
        else:
            weight = (-self.k * progress).exp()
        return weight * self.tau_high + (1 - weight) * self.tau_low
