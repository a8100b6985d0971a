"""A lower threshold around confident tokens: LocalLeap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, best, commit_candidates, confidence
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("local_leap")
@dataclass(frozen=True)
class LocalLeap(Sampler):
    """Commit very confident tokens, and fairly confident ones close to them.

    "Accelerating Diffusion LLM Inference via Local Determinism Propagation", arXiv:2510.07081:
    masks with c_i >= threshold are anchors and go; so does every i within `radius` positions of an
    anchor with c_i >= relaxed_threshold. The best always goes. Without an anchor in reach it is
    the plain threshold rule.
    """

    paper: ClassVar[str] = "LocalLeap, arXiv:2510.07081"

    threshold: float = option(0.9, "confidence that makes an anchor", low=0.0)
    relaxed_threshold: float = option(0.75, "confidence that is enough near an anchor", low=0.0)
    radius: int = option(4, "how many positions from an anchor are near", low=0)
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        anchors = (c >= self.threshold) & canvas.eligible
        near = within(anchors, self.radius)
        chosen = anchors | (near & (c >= self.relaxed_threshold)) | best(c, canvas.eligible)
        return commit_candidates(canvas, output, chosen, c), state


def within(places: Tensor, radius: int) -> Tensor:
    """Positions at most `radius` from one of `places (B, W)`, `(B, W)` bool."""
    radius = min(radius, places.shape[-1])
    reach = F.max_pool1d(places[:, None].float(), 2 * radius + 1, stride=1, padding=radius)
    return reach[:, 0] > 0
