"""One token at a time from a globally sharpened law: Independent Metropolis-Hastings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.noise import PROPOSALS, token_gumbel, uniform
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import best
from dlm_decode.types import Canvas, Decision, Output, Query

ACCEPT = PROPOSALS + 128
"""First stream of the chain's acceptances."""


@SAMPLERS.register("imh")
@dataclass(frozen=True)
class Imh(Sampler):
    """Draw the most certain position's token by a Metropolis chain towards the power law p^alpha.

    Independent Metropolis-Hastings sampling for diffusion language models, arXiv:2604.00375. Of a
    sequence law pi ~ p(x)^alpha, a position's token has pi(v) ~ p(v)^alpha Z(v), where Z(v) sums
    p(rest | v)^alpha; the mean-field Z is the product over other masks of sum_u p_j(u | v)^alpha.
    The chain draws v' from p^alpha and moves there with probability min(1, Z(v') / Z(v)). All
    proposals are forwarded together as branches; the prediction of the one kept names the next
    position. alpha = 1 draws from p itself; without proposals each token is sharpened by itself.

    Reconstructed: algorithm and order of positions, from the abstract. Z covers the block's masks,
    and is exact with one of them left. A block's first turn, and one in which the cache refreshes,
    decide nothing. Draws do not depend on the temperature.
    """

    paper: ClassVar[str] = "Independent Metropolis-Hastings, arXiv:2604.00375"
    traits: ClassVar[frozenset[str]] = frozenset({"history", "random", "branches"})

    alpha: float = option(2.0, "power of the target law; 1 is the model's own", above=0.0)
    proposals: int = option(4, "moves that the chain tries for each token", low=0, high=64)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logits"})

    def init(self, canvas: Canvas) -> Any:
        tokens = canvas.tokens.new_zeros(len(canvas.tokens), self.proposals + 1)
        return {"place": torch.zeros_like(canvas.eligible), "tokens": tokens}

    def query(self, canvas: Canvas, state: Any) -> Query:
        row = canvas.tokens[:, None]
        filled = torch.where(state["place"][:, None], state["tokens"][..., None], row)
        return Query(torch.cat([row, filled], dim=1), adaptive=True)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        log_p = output.logits.double().log_softmax(-1)
        ran = state["place"].any(-1) & output.valid[:, 1].any(-1)
        place = state["place"] & ran[:, None]
        left = canvas.eligible & ~place
        kept = self._chain(canvas, log_p[:, 1:], left, place)
        token = state["tokens"].gather(-1, kept[:, None])
        rows = torch.arange(len(kept), device=kept.device)
        branch = torch.where(ran, kept + 1, 0)
        p1 = output.p1[rows, branch]
        after = {
            "place": best(p1, left),
            "tokens": self._proposed(canvas, log_p[rows, branch], best(p1, left), ran),
        }
        count = torch.where(left.any(-1), self.proposals + 2, 1)
        decision = Decision(
            torch.where(place, token, canvas.tokens),
            place,
            hold=~ran,
            scores=output.p1[:, 0],
            branches=count,
        )
        return decision, after

    def _chain(self, canvas: Canvas, log_p: Tensor, left: Tensor, place: Tensor) -> Tensor:
        """Which of the proposals the chain ends at, `(B,)`, from `log_p (B, M + 1, W, V)`."""
        sums = (self.alpha * log_p).logsumexp(-1)
        log_z = sums.masked_fill(~left[:, None], 0.0).sum(-1)
        kept = torch.zeros_like(canvas.commits)
        for m in range(1, self.proposals + 1):
            u = (uniform(canvas, ACCEPT + m) * place).sum(-1).double()
            here = log_z.gather(-1, kept[:, None])[:, 0]
            kept = torch.where(u.log() < log_z[:, m] - here, m, kept)
        return kept

    def _proposed(self, canvas: Canvas, log_p: Tensor, place: Tensor, ran: Tensor) -> Tensor:
        """M + 1 draws `(B, M + 1)` from p^alpha at the next position, of `log_p (B, W, V)`."""
        sharp = self.alpha * (log_p.nan_to_num(neginf=-1e30) * place[..., None]).sum(1)
        where = (canvas.positions * place).sum(-1)
        commits = canvas.commits + ran
        vocab = log_p.shape[-1]
        noise = [
            token_gumbel(canvas.keys, where, commits, 0, vocab, PROPOSALS + m)
            for m in range(self.proposals + 1)
        ]
        return (sharp[:, None] + torch.stack(noise, dim=1)).argmax(-1)
