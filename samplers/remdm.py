"""Ancestral sampling that masks some decided tokens again: ReMDM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.noise import ORDER, REMASK, uniform
from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler, block_steps
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import commit_candidates, confidence
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("remdm")
@dataclass(frozen=True)
class Remdm(QuotaSampler):
    """Each step reveals masks and masks tokens again at random, so that the masked share holds.

    "Remasking Discrete Diffusion Models with Inference-Time Scaling", arXiv:2503.00307. A step from
    time t to s, alpha = 1 - t: a token is masked again with probability sigma, a mask revealed with
    (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t), which leaves a share 1 - alpha_s masked for any
    sigma up to sigma_max = min(1, (1 - alpha_s) / alpha_t). "cap": sigma = min(eta, sigma_max).
    "rescale": eta sigma_max. "conf": sigma_max softmax_i(-p_i at commit), 0 for masks. "loop":
    none until alpha reaches `alpha_on` at time `t_on`, sigma = eta at that alpha until `t_off`,
    none after. eta = 0 is plain ancestral sampling. Times run over each block; a step that changes
    nothing still costs its forward (`Decision.hold`), as in the paper.
    """

    paper: ClassVar[str] = "ReMDM, arXiv:2503.00307"
    traits: ClassVar[frozenset[str]] = frozenset({"history", "revokes", "random"})

    strategy: str = option("cap", "how sigma is chosen", choices=("cap", "rescale", "conf", "loop"))
    eta: float = option(0.02, "strength of remasking; 0 is none", low=0.0, high=1.0)
    t_on: float = option(0.55, "loop: time at which it begins", above=0.0, high=0.99)
    t_off: float = option(0.05, "loop: time at which it ends", above=0.0, high=1.0)
    alpha_on: float = option(0.9, "loop: share decided in it", above=0.0, high=0.99)

    def init(self, canvas: Canvas) -> Any:
        sure = torch.zeros_like(canvas.tokens, dtype=torch.float64)
        return super().init(canvas) | {"sure": sure}

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output).double()
        steps = block_steps(canvas, state["masks"], self.steps)
        step = torch.minimum(canvas.step, steps - 1)
        t, s = (1 - (step + i).double() / steps for i in (0, 1))
        alpha_t, alpha_s = self._alpha(t)[:, None], self._alpha(s)[:, None]
        own = canvas.editable & ~canvas.masked & (canvas.positions >= canvas.start[:, None])
        own = own & (canvas.positions < canvas.stop[:, None])
        sigma = self._sigma(alpha_t, alpha_s, t[:, None], own, state["sure"])
        reveal = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
        # Noise by turn, not by commits alone: a step that commits nothing must draw anew.
        chosen = canvas.eligible & (uniform(canvas, ORDER, canvas.turn) < reveal)
        back = own & (uniform(canvas, REMASK, canvas.turn) < sigma)
        decision = commit_candidates(canvas, output, chosen, c)
        revoked = Decision(
            decision.tokens,
            chosen,
            remask=back,
            hold=torch.ones_like(canvas.eligible[:, 0]),
            scores=decision.scores,
        )
        return revoked, state | {"sure": torch.where(chosen, c, state["sure"])}

    def _alpha(self, t: Tensor) -> Tensor:
        """Share decided at time t, both `(B,)`."""
        if self.strategy != "loop":
            return 1 - t
        before = self.alpha_on * (1 - t) / (1 - self.t_on)
        behind = 1 - (1 - self.alpha_on) * t / self.t_off
        return torch.where(t < self.t_off, behind, before.clamp(max=self.alpha_on))

    def _sigma(
        self, alpha_t: Tensor, alpha_s: Tensor, t: Tensor, own: Tensor, sure: Tensor
    ) -> Tensor:
        """Probability of remasking, `(B, 1)` or `(B, W)`."""
        most = ((1 - alpha_s) / alpha_t.clamp(min=1e-12)).clamp(max=1.0)
        if self.strategy == "cap":
            return most.clamp(max=self.eta)
        if self.strategy == "rescale":
            return self.eta * most
        if self.strategy == "loop":
            inside = (t <= self.t_on) & (t > self.t_off)
            return torch.where(inside, most.clamp(max=self.eta), 0.0)
        share = (-sure).masked_fill(~own, -torch.inf).softmax(-1).nan_to_num(0.0)
        return (most * share).masked_fill(~own, 0.0) * (self.eta > 0)
