"""Tokens that do not attend to one another: DAPD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.dependency import among, attention_paid, independent_set
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, best, commit_candidates, confidence, ranks
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("dapd")
@dataclass(frozen=True)
class Dapd(Sampler):
    """Commit masked positions no two of which attend to each other, then every confident one.

    "DAPD: Dependency-Aware Parallel Decoding via Attention for Diffusion LLMs", arXiv:2603.12996:
    s_ij = (a_ij + a_ji) / 2 of the late layers' mean attention among masked positions; an edge
    where s_ij > tau. Positions are taken in the order of (weighted degree) x (confidence) unless
    they neighbour one taken before; certain ones (c = 1) always. Once less than a share `switch` of
    the window is masked, every c_i > threshold and the best one are committed. Derived: tau moves
    linearly from `tau` to `tau_end` over the window's decided share, and the certain ones block
    nobody; shares are of the positions masked when the block began.
    """

    paper: ClassVar[str] = "DAPD, arXiv:2603.12996"

    tau: float = option(0.01, "attention above which two positions depend, at the start", low=0.0)
    tau_end: float | None = option(
        None, "the same when the window is nearly decided (none: tau)", low=0.0
    )
    switch: float = option(
        0.5, "masked share below which confidence alone decides", low=0.0, high=1.0
    )
    threshold: float = option(0.9, "confidence to exceed after the switch", low=0.0)
    layers_from: float = option(
        0.7, "depth, as a share of the model, from which layers count", low=0.0, high=1.0
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    @property
    def attention_layers(self) -> tuple[float, float]:
        return (self.layers_from, 1.0)

    def init(self, canvas: Canvas) -> Any:
        return {"masks": canvas.eligible.sum(-1)}

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        masks = state["masks"].clamp(min=1)[:, None]
        masked_share = canvas.eligible.sum(-1, keepdim=True) / masks
        graph = self._graph(canvas, output, masked_share)
        certain = (c >= 1) & canvas.eligible
        edges = graph > 0
        degree = graph.sum(-1)
        rank = ranks(degree * c.double(), canvas.eligible)
        independent = independent_set(edges, rank, canvas.eligible & ~certain) | certain
        confident = (c > self.threshold) | best(c, canvas.eligible)
        late = masked_share < self.switch
        return commit_candidates(
            canvas, output, torch.where(late, confident, independent), c
        ), state

    def _graph(self, canvas: Canvas, output: Output, masked_share: Tensor) -> Tensor:
        """Symmetric weights `(B, W, W)`, 0 where there is no edge."""
        a = among(attention_paid(output.attention, canvas.positions), canvas.eligible)
        s = (a + a.transpose(-1, -2)) / 2
        end = self.tau if self.tau_end is None else self.tau_end
        tau = end + (self.tau - end) * masked_share
        return s.masked_fill(s <= tau[..., None], 0.0)
