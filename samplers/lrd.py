"""Masks that carry what the model believes of them: latent refinement decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import commit_candidates, negative_entropy, top
from dlm_decode.types import Canvas, Decision, Output, Query


@SAMPLERS.register("lrd")
@dataclass(frozen=True)
class Lrd(QuotaSampler):
    """Feed beliefs back as embeddings until they settle, then commit by entropy, doing so still.

    "Latent Refinement Decoding" (LRD), arXiv:2510.11052. A mask's input is (1 - a) e_mask + a sum_v
    p(v) E[v] over the top-p nucleus of the last prediction, renormalised, a = r_f (1 - H / ln V)
    (equation 4; appendix D prints H in its place). Stage 1 commits nothing, until the mean
    KL(p_t || p_{t-1}) over masks is below `tau_refine` nats, or `refine_steps` turns. Stage 2
    commits the lowest entropies, and all masks at once when the mean KL is below `tau_decode`.
    r_f = 0, tau = 0 decides as `entropy` does.

    Derived: of the nucleus at most the `support` most probable tokens count; the forward that ends
    stage 1 also decides the first tokens, and no block ends early with it; the stages run anew in
    each block.
    """

    paper: ClassVar[str] = "Latent Refinement Decoding, arXiv:2510.11052"
    traits: ClassVar[frozenset[str]] = frozenset({"history"})

    r_f: float = option(0.15, "most that a mask's input is made of beliefs", low=0.0, high=1.0)
    nucleus: float = option(0.9, "probability mass of the beliefs that count", above=0.0, high=1.0)
    support: int = option(16, "most tokens of a position that count", low=1)
    tau_refine: float = option(0.1, "mean divergence in nats that ends stage 1", low=0.0)
    tau_decode: float = option(0.1, "mean divergence in nats that ends the block", low=0.0)
    refine_steps: int = option(20, "most turns of stage 1 (0: none)", low=0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logits", "entropy", "soft_embeddings"})

    def init(self, canvas: Canvas) -> Any:
        shape, device = tuple(canvas.tokens.shape), canvas.tokens.device
        count = min(self.support, canvas.vocab_size) + 1
        return super().init(canvas) | {
            "log_p": torch.zeros((*shape, canvas.vocab_size), device=device),
            "seen": torch.zeros_like(canvas.masked),
            "ids": torch.full((*shape, count), canvas.mask_id, device=device),
            "weights": torch.zeros((*shape, count), device=device, dtype=torch.float64),
            "refined": torch.zeros_like(canvas.step),
            "committed": torch.zeros_like(canvas.step),
        }

    def query(self, canvas: Canvas, state: Any) -> Query:
        weights = state["weights"].masked_fill(~canvas.masked[..., None], 0.0)
        return Query(mix_ids=state["ids"][:, None], mix_weights=weights[:, None])

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        log_p = output.logits.float().log_softmax(-1)
        kl, compared = self._divergence(canvas, output, log_p, state)
        begun = state["committed"] > 0
        settled = compared & (kl < self.tau_refine)
        refining = ~begun & ~settled & (state["refined"] < self.refine_steps)
        ends = begun & compared & (kl < self.tau_decode)
        score = negative_entropy(output)
        decoding = replace(canvas, step=canvas.step - state["refined"])
        chosen = top(score, canvas.eligible, self.quota(decoding, state))
        chosen = torch.where(ends[:, None], canvas.eligible, chosen) & ~refining[:, None]
        decision = commit_candidates(canvas, output, chosen, score)
        held = Decision(decision.tokens, chosen, hold=refining, scores=decision.scores)
        ids, weights = self._beliefs(canvas, output, log_p)
        now = output.valid[..., None]
        return held, {
            "masks": state["masks"],
            "log_p": torch.where(now, log_p, state["log_p"]),
            "seen": state["seen"] | output.valid,
            "ids": torch.where(now, ids, state["ids"]),
            "weights": torch.where(now, weights, state["weights"]),
            "refined": state["refined"] + refining,
            "committed": state["committed"] + ~refining,
        }

    def _divergence(
        self, canvas: Canvas, output: Output, log_p: Tensor, state: Any
    ) -> tuple[Tensor, Tensor]:
        """Mean KL(p_t || p_{t-1}) over masks in nats, and whether there is any, each `(B,)`."""
        counted = canvas.eligible & output.valid & state["seen"]
        terms = log_p.exp() * (log_p - state["log_p"])
        kl = terms.masked_fill(log_p == -torch.inf, 0.0).sum(-1).clamp(min=0)
        count = counted.sum(-1)
        return kl.masked_fill(~counted, 0.0).sum(-1) / count.clamp(min=1), count > 0

    def _beliefs(self, canvas: Canvas, output: Output, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """What each mask's input is made of: ids and weights, each `(B, W, J)`, the mask last."""
        share = self.r_f * (1 - output.entropy.double() / math.log(canvas.vocab_size))
        share = share.clamp(0, 1)[..., None]
        p, ids = log_p.double().exp().topk(min(self.support, canvas.vocab_size), dim=-1)
        p = p.masked_fill(p.cumsum(-1) - p >= self.nucleus, 0.0)
        weights = torch.cat([share * p / p.sum(-1, keepdim=True), 1 - share], dim=-1)
        mask = torch.full_like(ids[..., :1], canvas.mask_id)
        return torch.cat([ids, mask], dim=-1), weights
