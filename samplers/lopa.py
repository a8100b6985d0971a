"""Several next steps are tried at once and the surest is kept: lookahead parallel decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.samplers.d2f import confident
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

    Branches share the row's stored K/V; the winner's are kept. Over D2F's pipeline (`--schedule
    pipeline` and `activation`) the token of a branch may open the next block for it alone; the
    published runs do so with `--cache in_flight` and `lead` kept. Derived: a turn in which the
    cache refreshes does not look ahead, nor does a block's first unless several are in flight.
    """

    paper: ClassVar[str] = "LoPA, arXiv:2512.16229"
    traits: ClassVar[frozenset[str]] = frozenset({"history", "branches"})

    lookahead: int = option(4, "k, branches beside the row as it stands", low=0, high=1024)
    threshold: float = option(0.9, "confidence above which tokens are committed", low=0.0)
    activation: float | None = option(
        None,
        "tau_act of D2F: force the best of each block after one decided so far, not the window's",
        low=0,
        high=1,
    )
    lowest: float = option(
        1.0,
        "share of its masks, the least confident ones, that a branch is judged by",
        low=0,
        high=1,
    )
    token_weight: float = option(
        0.0, "alpha, weight of the confidence of the branch's own token beside them", low=0, high=1
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    @property
    def asks(self) -> bool:
        return self.lookahead > 0

    @property
    def scope(self) -> str:
        return "row"

    def init(self, canvas: Canvas) -> Any:
        """`place (B, k)` where each branch is filled, -1 if it isn't used; its `token` and `sure`,
        the confidence."""
        token = canvas.tokens.new_zeros(len(canvas.tokens), self.lookahead)
        return {"place": token - 1, "token": token, "sure": token.double()}

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        if not self.asks:
            return None
        place, row = _marked(canvas, state), canvas.tokens[:, None]
        filled = torch.where(place, state["token"][..., None], row)
        return Query(torch.cat([row, filled], dim=1), adaptive=True)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        branched = output.branched
        place = _marked(canvas, state)
        place = torch.cat([torch.zeros_like(canvas.eligible)[:, None], place], dim=1)
        winner = self._winner(canvas, branched, place, state["sure"])
        rows = torch.arange(len(winner), device=winner.device)
        seen = Output({name: value[rows, winner] for name, value in branched.stats.items()})
        ahead = place[rows, winner]
        c = confidence(seen, law=self.law)
        open_ = canvas.eligible & ~ahead & seen.valid
        chosen = self._chosen(canvas, c, open_, ahead)
        index = (winner - 1).clamp(min=0)[:, None]
        decision = Decision(
            torch.where(ahead, _picked(state["token"], index), seen.candidate),
            ahead | chosen,
            scores=torch.where(ahead, _picked(state["sure"], index).to(c.dtype), c),
        )
        after = self._branches(canvas, c, seen, open_ & ~chosen)
        count = 1 + (after["place"] >= 0).sum(-1)
        return replace(decision, branches=count, winner=winner, ahead=after["place"]), after

    def _chosen(self, canvas: Canvas, c: Tensor, open_: Tensor, ahead: Tensor) -> Tensor:
        """What the winner commits of its `open_` masks, beside its token `ahead`."""
        if self.activation is None:
            return open_ & ((c > self.threshold) | best(c, open_))
        last = (canvas.positions + 1).masked_fill(~open_, 0).amax(-1)
        its = replace(
            canvas,
            masked=canvas.masked & ~ahead,
            eligible=open_,
            stop=torch.maximum(canvas.stop, last),
        )
        return confident(its, c, self.threshold, self.activation)

    def _winner(self, canvas: Canvas, output: Output, place: Tensor, sure: Tensor) -> Tensor:
        """Index `(B,)` of the branch whose masks are the surest on average."""
        open_ = canvas.eligible[:, None] & ~place & output.valid
        c = confidence(output, law=self.law).double()
        count = open_.sum(-1)
        judged = (count.double() * self.lowest).long().clamp(min=1)
        counted = open_ & (ranks(-c, open_) < judged[..., None]) if self.lowest < 1 else open_
        total = c.masked_fill(~counted, 0.0).sum(-1)
        mean = torch.where(count > 0, total / judged, 1.0)
        token = torch.cat([sure.new_ones(len(sure), 1), sure], dim=1)
        score = self.token_weight * token + (1 - self.token_weight) * mean
        used = output.valid.any(-1) & place.any(-1)
        last = score[:, :1]
        ordered = torch.cat([score.masked_fill(~used, -torch.inf)[:, 1:], last], dim=1)
        first = best(ordered, torch.ones_like(ordered, dtype=torch.bool))
        return (first.int().argmax(-1) + 1) % ordered.shape[1]

    def _branches(self, canvas: Canvas, c: Tensor, seen: Output, left: Tensor) -> Any:
        """The branches of the next turn."""
        index = torch.arange(self.lookahead, device=left.device)[:, None]
        marked = left[:, None] & (ranks(c, left)[:, None] == index)
        place = (marked * (canvas.positions + 1)[:, None]).sum(-1) - 1
        token = (marked * seen.candidate[:, None]).sum(-1)
        sure = (marked * c[:, None].double()).sum(-1)
        return {"place": place, "token": token, "sure": sure}


def _marked(canvas: Canvas, state: Any) -> Tensor:
    """The masks that the branches fill, `(B, k, W)` bool."""
    return (canvas.positions[:, None] == state["place"][..., None]) & canvas.masked[:, None]


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """One of `values (B, k)` for each row, `(B, 1)`; 0 if k = 0."""
    return values.gather(-1, index) if values.shape[-1] else values.new_zeros(index.shape)
