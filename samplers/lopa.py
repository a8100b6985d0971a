"""Several next steps are tried at once and the surest is kept: lookahead parallel decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, best, confidence, ranks
from dlm_decode.types import Canvas, Decision, Output, Query


@SAMPLERS.register("lopa")
@dataclass(frozen=True)
class Lopa(Sampler):
    """Commit confident tokens, after the one more token that leaves the rest of the block surest.

    "LoPA: Scaling dLLM Inference via Lookahead Parallel Decoding", arXiv:2512.16229. Beside the row
    as it stands k branches are forwarded, each with one of its k most confident masks filled. The
    branch with the highest mean confidence over its own masks (1 without any) wins, a lookahead one
    before the row itself among equals; its token is committed, and from its own prediction every
    c_i > threshold and the best. k = 0 is `threshold`. A turn is one forward of up to k + 1 rows:
    compare positions computed, not forwards alone.

    Branches share the row's stored K/V and store none. Derived: a turn in which the cache refreshes
    does not look ahead, nor does a block's first.
    """

    paper: ClassVar[str] = "LoPA, arXiv:2512.16229"
    traits: ClassVar[frozenset[str]] = frozenset({"history", "branches"})

    lookahead: int = option(4, "k, branches beside the row as it stands", low=0, high=1024)
    threshold: float = option(0.9, "confidence above which tokens are committed", low=0.0)
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    @property
    def asks(self) -> bool:
        return self.lookahead > 0

    def init(self, canvas: Canvas) -> Any:
        """`place (B, k, W)` where each branch is filled, if used at all; its `token` and `sure`,
        the confidence, are `(B, k)`."""
        rows, width = canvas.tokens.shape
        token = canvas.tokens.new_zeros(rows, self.lookahead)
        place = token.new_zeros(rows, self.lookahead, width).bool()
        return {"place": place, "token": token, "sure": token.double()}

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        if not self.asks:
            return None
        row = canvas.tokens[:, None]
        filled = torch.where(state["place"], state["token"][..., None], row)
        return Query(torch.cat([row, filled], dim=1), adaptive=True)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        branched = output.branched
        place = torch.cat([torch.zeros_like(canvas.eligible)[:, None], state["place"]], dim=1)
        winner = self._winner(canvas, branched, place)
        rows = torch.arange(len(winner), device=winner.device)
        seen = Output({name: value[rows, winner] for name, value in branched.stats.items()})
        ahead = place[rows, winner]
        c = confidence(seen, law=self.law)
        open_ = canvas.eligible & ~ahead
        chosen = open_ & ((c > self.threshold) | best(c, open_))
        index = (winner - 1).clamp(min=0)[:, None]
        decision = Decision(
            torch.where(ahead, _picked(state["token"], index), seen.candidate),
            ahead | chosen,
            scores=torch.where(ahead, _picked(state["sure"], index).to(c.dtype), c),
        )
        after, count = self._branches(c, seen, open_ & ~chosen)
        return replace(decision, branches=1 + count), after

    def _winner(self, canvas: Canvas, output: Output, place: Tensor) -> Tensor:
        """Index `(B,)` of the branch whose masks are the surest on average."""
        open_ = canvas.eligible[:, None] & ~place
        c = confidence(output, law=self.law).double().masked_fill(~open_, 0.0)
        count = open_.sum(-1)
        mean = torch.where(count > 0, c.sum(-1) / count.clamp(min=1), 1.0)
        used = output.valid.any(-1) & place.any(-1)
        last = mean[:, :1]
        ordered = torch.cat([mean.masked_fill(~used, -torch.inf)[:, 1:], last], dim=1)
        first = best(ordered, torch.ones_like(ordered, dtype=torch.bool))
        return (first.int().argmax(-1) + 1) % ordered.shape[1]

    def _branches(self, c: Tensor, seen: Output, left: Tensor) -> tuple[Any, Tensor]:
        """The branches of the next turn, and how many there are, `(B,)`."""
        index = torch.arange(self.lookahead, device=left.device)[:, None]
        place = left[:, None] & (ranks(c, left)[:, None] == index)
        token = (place * seen.candidate[:, None]).sum(-1)
        sure = (place * c[:, None].double()).sum(-1)
        return {"place": place, "token": token, "sure": sure}, place.any(-1).sum(-1)


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """One of `values (B, k)` for each row, `(B, 1)`; 0 if k = 0."""
    return values.gather(-1, index) if values.shape[-1] else values.new_zeros(index.shape)
