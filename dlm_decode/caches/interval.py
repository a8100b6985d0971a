"""dLLM-Cache: prompt and response are computed at intervals, in between what changed most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_decode.caches import CACHES, CachePolicy, PartialHook, RowPlan, RowView, span_query
from dlm_decode.options import option

Added = dict[tuple[str, int], Tensor]
"""What attention ("mix") and feed-forward ("feed") of each layer last added, `(N, D)`."""


@CACHES.register("interval")
@dataclass(frozen=True)
class Interval(CachePolicy):
    """Compute prompt and response every so many turns, else the tokens whose values moved most.

    dLLM-Cache (arXiv:2506.06295). In a turn in which nothing is due, each layer computes the values
    of all response tokens, compares them with those stored (cosine), and computes queries, keys,
    attention and feed-forward of the share `ratio` that moved most; the others are given what the
    two last added to them. Layer 0 computes all of them. Derived: when the prompt is due the
    response is computed with it; attention of what is not chosen is computed and dropped.
    Positions computed count the response, whatever part of a layer it went through.
    """

    paper: ClassVar[str] = "dLLM-Cache, arXiv:2506.06295"
    runs_layers: ClassVar[bool] = True

    prompt_interval: int = option(100, "K_p: compute the whole row every so many turns", low=1)
    response_interval: int = option(7, "K_r: compute the response every so many turns", low=1)
    ratio: float = option(
        0.25, "rho: share of the response that is computed in between", low=0, high=1
    )

    @property
    def refreshes_blocks(self) -> bool:
        return False

    def plan(self, row: RowView) -> RowPlan:
        if row.since_refresh < 0 or row.turn % self.prompt_interval == 0:
            return RowPlan(span_query(0, row.length), "refresh")
        response = span_query(row.origin - row.shift, row.length)
        return RowPlan(response, "region" if row.turn % self.response_interval == 0 else "window")

    def hook(self, row: RowView, plan: RowPlan) -> PartialHook:
        ratio = self.ratio if plan.kind == "window" else None
        return Moved(torch.from_numpy(plan.query), row.length, ratio, row.memory or {})


class Moved(PartialHook):
    """Chooses what moved most, and remembers for the rest what each layer added to it."""

    def __init__(
        self,
        query: Tensor,
        length: int,
        ratio: float | None,
        last: Mapping[tuple[str, int], Tensor],
    ) -> None:
        self._query, self._length, self._ratio = query, length, ratio
        self._added: Added = dict(last)

    def choose(self, layer: int, new: Tensor, stored: Tensor) -> Tensor | None:
        if self._ratio is None or layer == 0:
            return None
        alike = F.cosine_similarity(new.flatten(1).float(), stored.flatten(1).float(), dim=-1)
        count = int(self._ratio * len(alike))
        return alike.topk(count, largest=False).indices.sort().values

    def complete(self, what: str, layer: int, added: Tensor, chosen: Tensor | None) -> Tensor:
        query = self._query.to(added.device)
        kept = self._added.get((what, layer))
        if kept is None:
            kept = added.new_zeros(self._length, added.shape[-1])
        places, fresh = (query, added) if chosen is None else (query[chosen], added[chosen])
        self._added[what, layer] = kept.index_copy(0, places, fresh)
        return self._added[what, layer][query]

    def memory(self) -> Added:
        return self._added
