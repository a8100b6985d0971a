"""Positions ordered by how much they look at decided tokens: DOS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.dependency import mean_received
from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import (
    LAWS,
    best,
    commit_candidates,
    confidence,
    longest_prefix,
    ranks,
    sorted_by_rank,
)
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("dos")
@dataclass(frozen=True)
class Dos(QuotaSampler):
    """Commit the positions first whose attention rests most on tokens already decided.

    DOS, the Dependency-Oriented Sampler, arXiv:2603.15340, of which the formula is derived here:
    score_i = sum over decided j of the late layers' mean attention A_ij, sinks left out, times the
    confidence if `times_confidence`. By `rule`: a fixed quota a step as in `llada`; every c_i >=
    threshold, else the best score; or, in the order of scores, the longest list with sum H - max H
    <= gamma nats (`entropy_bound`). Decided are the positions before the window and those of it
    that are not masked.
    """

    paper: ClassVar[str] = "DOS, arXiv:2603.15340"

    rule: str = option(
        "quota",
        "how many tokens a step commits",
        choices=("quota", "threshold", "entropy_bound"),
    )
    threshold: float = option(
        0.9, "confidence that is enough, for that rule", low=0.0, only={"rule": ("threshold",)}
    )
    gamma: float = option(
        0.1, "bound in nats, for that rule", low=0.0, only={"rule": ("entropy_bound",)}
    )
    times_confidence: bool = option(False, "multiply scores by the confidence")
    tau_sink: float = option(
        0.2, "mean attention above which a position is a sink", low=0.0, high=1.0
    )
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
        return frozenset({"attention", *(("entropy",) if self.rule == "entropy_bound" else ())})

    @property
    def attention_layers(self) -> tuple[float, float]:
        return (self.layers_from, 1.0)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        score = decided_mass(canvas, output, self.tau_sink)
        if self.times_confidence:
            score = score * c
        if self.rule == "quota":
            return self.take(canvas, output, state, score), state
        if self.rule == "threshold":
            sure = (c >= self.threshold) & canvas.eligible
            chosen = torch.where(sure.any(-1, keepdim=True), sure, best(score, canvas.eligible))
        else:
            chosen = self._bounded(canvas, output, score)
        return commit_candidates(canvas, output, chosen, score), state

    def _bounded(self, canvas: Canvas, output: Output, score: Tensor) -> Tensor:
        rank = ranks(score, canvas.eligible)
        h = output.entropy.double().clamp(min=0).masked_fill(~canvas.eligible, 0.0)
        h = sorted_by_rank(h, rank)
        passes = h.cumsum(-1) - h.cummax(-1).values <= self.gamma
        return longest_prefix(passes, rank, canvas.eligible)


def decided_mass(canvas: Canvas, output: Output, tau_sink: float) -> Tensor:
    """Attention `(B, W)` that each position's prediction pays to decided tokens, fp64."""
    attention = output.attention.double()
    places = torch.arange(attention.shape[-1], device=attention.device)
    base = canvas.positions[:, :1]
    at = (places - base).clamp(0, canvas.positions.shape[1] - 1)
    settled = (~canvas.masked).gather(-1, at) & (places < canvas.stop[:, None])
    sink = mean_received(attention, output.valid & canvas.eligible) > tau_sink
    counts = (settled | (places < base)) & ~sink
    return attention.masked_fill(~counts[:, None], 0.0).sum(-1)
