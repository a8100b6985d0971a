"""Tokens that are confident and whose distribution has settled: KLASS."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import best, commit_candidates, confidence, top
from dlm_decode.types import Canvas, Decision, Output

LOG_FLOOR = math.log(1e-12)
"""Log of the published constant added to probabilities; a distribution never seen is all zeros."""


@SAMPLERS.register("klass")
@dataclass(frozen=True)
class Klass(QuotaSampler):
    """Commit tokens that are confident and whose distribution hardly changed in the last n turns.

    "KLASS: KL-Guided Fast Inference in Masked Diffusion Models", arXiv:2511.05664:
    commit every i with c_i > conf_threshold and KL(p_i^t || p_i^{t-1}) < kl_threshold in each of
    the last n = `kl_history_length` turns; if there is none, the step's quota of most confident
    ones. A turn in which a position was not computed changes nothing and never counts as settled.
    """

    paper: ClassVar[str] = "KLASS, arXiv:2511.05664"
    traits: ClassVar[frozenset[str]] = frozenset({"history"})

    conf_threshold: float = option(0.9, "confidence that is enough", low=0.0)
    kl_threshold: float = option(0.01, "divergence in nats that is settled", above=0.0, high=10.0)
    kl_history_length: int = option(2, "turns n that must have been settled", low=1, high=1024)
    unmask_strategy: str = option(
        "all", "which of the settled ones to commit", choices=("all", "max_conf", "min_kl")
    )
    comparison: str = option(
        "gt", "confidence above the threshold, or reaching it (Dream)", choices=("gt", "ge")
    )
    history: str = option(
        "block",
        "follow distributions from the block's start, or everywhere from the request's (published)",
        choices=("block", "canvas"),
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logits"})

    @property
    def scope(self) -> str:
        return self.history

    def init(self, canvas: Canvas) -> Any:
        shape = tuple(canvas.tokens.shape)
        device = canvas.tokens.device
        return super().init(canvas) | {
            "previous": torch.full((*shape, canvas.vocab_size), LOG_FLOOR, device=device),
            "divergences": torch.full((*shape, self.kl_history_length), torch.inf, device=device),
        }

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output)
        state = self._observe(canvas, output, state)
        ready = self._is_settled(canvas, output, state) & self._is_confident(c) & canvas.eligible
        fallback = top(c, canvas.eligible, self.quota(canvas, state))
        chosen = torch.where(ready.any(-1, keepdim=True), self._select(ready, c, state), fallback)
        return commit_candidates(canvas, output, chosen, c), state

    def _observe(self, canvas: Canvas, output: Output, state: Any) -> Any:
        """The state with this turn's divergences, where positions were computed."""
        p = output.logits.float().softmax(-1)
        log_p = (p + 1e-12).log()
        # The first divergence of a position is at least -LOG_FLOOR - ln V, above any threshold.
        kl = (p * (log_p - state["previous"])).sum(-1, keepdim=True)
        valid = output.valid[..., None]
        pushed = torch.cat([state["divergences"][..., 1:], kl], dim=-1)
        fresh = (canvas.step == 0) & (self.history == "canvas")
        return {
            "masks": torch.where(fresh, canvas.eligible.sum(-1), state["masks"]),
            "previous": torch.where(valid, log_p, state["previous"]),
            "divergences": torch.where(valid, pushed, state["divergences"]),
        }

    def _is_settled(self, canvas: Canvas, output: Output, state: Any) -> Tensor:
        settled = (state["divergences"] < self.kl_threshold).all(-1) & output.valid
        # The published code waits anew in each block; with a block's own history that is implied.
        waited = canvas.step >= self.kl_history_length - 1
        return settled & waited[:, None]

    def _is_confident(self, c: Tensor) -> Tensor:
        t = self.conf_threshold
        return c >= t if self.comparison == "ge" else c > t

    def _select(self, ready: Tensor, c: Tensor, state: Any) -> Tensor:
        if self.unmask_strategy == "all":
            return ready
        score = c if self.unmask_strategy == "max_conf" else -state["divergences"][..., -1]
        return best(score, ready)
