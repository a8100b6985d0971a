"""Many tokens are tried and those that their context does not bear out are taken back: WINO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import best, commit_candidates, confidence, top
from dlm_decode.types import Canvas, Decision, Output, Query


@SAMPLERS.register("wino")
@dataclass(frozen=True)
class Wino(Sampler):
    """Commit at a low threshold, and mask tokens again that their shadows find unlikely.

    "Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs" (WINO),
    arXiv:2507.18578. Wide in: every c_i > tau1, at most clamp(floor(share x masks), least, most)
    of them, and always the best. Narrow out: of the block's tokens from earlier turns, those with
    q_i < tau2 are masked again, q_i what the shadow of position i, a mask that sees all but the
    token at i, gives the token that stands there; only if more than one token was committed now,
    and fewer than in the turn before, the least likely first. So every turn gains a token, and a
    block of B ends within B turns. Costs a second query for every scored position of the block.

    Derived: for models that predict the next position, the shadow of i is a mask at i - 1.
    """

    paper: ClassVar[str] = "WINO, arXiv:2507.18578"
    traits: ClassVar[frozenset[str]] = frozenset({"history", "revokes"})

    tau1: float = option(0.6, "confidence above which a token is tried", low=0.0)
    tau2: float = option(0.9, "probability in its shadow that lets a token stay (0: any)", low=0.0)
    share: float = option(0.7, "share of the masks that a turn commits at most", above=0, high=1)
    least: int = option(5, "lower limit of that number", low=1)
    most: int = option(20, "upper limit of that number", low=1)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"decided", "shadow"})

    def init(self, canvas: Canvas) -> Any:
        return {"last": torch.full_like(canvas.step, 30)}

    def query(self, canvas: Canvas, state: Any) -> Query:
        return Query(probe=canvas.tokens[..., None])

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c, masks = confidence(output), canvas.eligible.sum(-1)
        limit = (self.share * masks).long().clamp(min=self.least).clamp(max=self.most)
        wide = (c > self.tau1) & top(c, canvas.eligible, limit)
        chosen = wide | best(c, canvas.eligible)
        accepted = chosen.sum(-1)
        decided = canvas.editable & ~canvas.masked & output.valid
        q = (output.shadow_probed[..., 0] - output.shadow_lse).exp()
        doubtful = decided & (q < self.tau2) & (accepted > 1)[:, None]
        back = top(-q, doubtful, (state["last"] - 1).clamp(min=0))
        decision = commit_candidates(canvas, output, chosen, c)
        revoked = Decision(decision.tokens, chosen, remask=back, scores=decision.scores)
        return revoked, {"last": accepted}
