"""Logits raised where the model has kept its mind: CreditDecoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.errors import CapabilityError
from dlm_decode.fusing import fuse_few, fuse_whole
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Wrapper, in_window
from dlm_decode.types import Canvas, Decision, Output, Query

WHOLE = frozenset({"p2", "entropy", "filtered", "logits"})
"""What an inner can read that does not follow from the logits of the credited ids alone."""
LEAST_IDS, MOST_IDS = 8, 64
"""Bounds of how many ids with credit a position keeps: as many as it has turns, so the block's."""


@SAMPLERS.register("credit")
@dataclass(frozen=True)
class Credit(Wrapper):
    """Let the inner decide on logits raised for tokens that were most probable in earlier turns.

    "CreditDecoding: Accelerating Parallel Decoding in Diffusion Large Language Models with Trace
    Credit", arXiv:2510.06133. In each turn that computes a masked position, with v its best token,
    C <- beta C, then C[v] <- C[v] + p(v)^gamma; the inner sees softmax(l + alpha ln(1 + C)). Credit
    begins anew with each block. `tuning_free`: alpha = beta = 1 - share of the block still masked,
    gamma = 1.

    Derived: C is kept as a list of ids. Only tokens that were once the best have any, one more a
    turn at most, so a list as long as the block is exact while every turn decides something; it has
    8 to 64 ids, and a new one beyond its end takes the place of the smallest. The fused best token
    and its probability follow from those ids' logits and the log-sum-exp, since this turn's best
    has credit too; at temperature > 0 so does the drawn one, as its perturbed logit is above all
    without credit. An end id that eos="no_confidence" holds back gets no credit.
    """

    paper: ClassVar[str] = "CreditDecoding, arXiv:2510.06133"
    traits: ClassVar[frozenset[str]] = frozenset({"history"})
    alters: ClassVar[bool] = True

    alpha: float = option(0.65, "weight of the credit", low=0.0)
    beta: float = option(0.7, "share of the credit that is left after a turn", low=0.0, high=1.0)
    gamma: float = option(0.2, "power of the probability that is added", low=0.0)
    tuning_free: bool = option(False, "alpha, beta and gamma from the block's progress")
    dense: bool = option(
        False,
        "fuse whole logits, as inners that read more of them need anyway; top_p, top_k do too",
    )

    @property
    def own_needs(self) -> frozenset[str]:
        return frozenset({"logits"}) if self._whole else frozenset()

    @property
    def asks(self) -> bool:
        return not self._whole or self.inner.asks

    @property
    def _whole(self) -> bool:
        return self.dense or bool(self.inner.needs & WHOLE)

    def begin(self, canvas: Canvas) -> Any:
        rows, width = canvas.tokens.shape
        shape, device = (rows, width, min(max(width, LEAST_IDS), MOST_IDS)), canvas.tokens.device
        return {
            "ids": torch.zeros(shape, dtype=torch.long, device=device),
            "credit": torch.zeros(shape, dtype=torch.float64, device=device),
            "masks": _open_masks(canvas),
        }

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        if super().query(canvas, state) is not None:
            name = SAMPLERS.name_of(self.inner)
            raise CapabilityError(f"credit cannot wrap {name}, which has a query of its own")
        return None if self._whole else Query(probe=self.own_state(canvas, state)["ids"])

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        alpha, own = self._credited(canvas, output, self.own_state(canvas, state))
        boost = alpha[:, None, None] * own["credit"].log1p()
        boost = boost.masked_fill(~_computed(canvas, output)[..., None], 0.0)
        if self._whole:
            fused = fuse_whole(canvas, output, own["ids"], boost, self.inner.needs)
        else:
            fused = fuse_few(canvas, output, own["ids"], boost)
        decision, inner = self.inner_decide(canvas, fused, state)
        return decision, {"own": own, "inner": inner}

    def _credited(self, canvas: Canvas, output: Output, own: Any) -> tuple[Tensor, Any]:
        """alpha `(B,)`, and the state with this turn's credit."""
        alpha, beta, gamma = self._parameters(canvas, own["masks"])
        ids, decayed = own["ids"], beta[:, None, None] * own["credit"]
        is_best = (ids == output.top1[..., None]) & (decayed > 0)
        known = is_best.any(-1)
        slot = torch.where(known, is_best.int().argmax(-1), decayed.argmin(-1))[..., None]
        before = decayed.gather(-1, slot) * known[..., None]
        gained = before + output.p1.double().pow(gamma)[..., None]
        where = _computed(canvas, output)[..., None]
        named = ids.scatter(-1, slot, output.top1[..., None])
        credit = decayed.scatter(-1, slot, gained)
        return alpha, {
            "ids": torch.where(where, named, ids),
            "credit": torch.where(where, credit, own["credit"]),
            "masks": own["masks"],
        }

    def _parameters(self, canvas: Canvas, masks: Tensor) -> tuple[Tensor, Tensor, float]:
        """alpha and beta `(B,)`, gamma."""
        left = _open_masks(canvas)
        done = 1 - left.double() / masks.clamp(min=1)
        if self.tuning_free:
            return done, done, 1.0
        return torch.full_like(done, self.alpha), torch.full_like(done, self.beta), self.gamma


def _open_masks(canvas: Canvas) -> Tensor:
    """Undecided positions of the block, `(B,)`."""
    return (canvas.masked & in_window(canvas)).sum(-1)


def _computed(canvas: Canvas, output: Output) -> Tensor:
    """Positions that this turn's forward says something of, `(B, W)` bool."""
    return canvas.eligible & output.valid & (output.p1 > 0)
