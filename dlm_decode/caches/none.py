"""No cache: every forward computes the whole row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_decode.caches import CACHES, CachePolicy, Exactness, RowPlan, RowView, span_query
from dlm_decode.models import Regime


@CACHES.register("none")
@dataclass(frozen=True)
class NoCache(CachePolicy):
    """Compute every position in every forward; exact, and the yardstick for all other policies."""

    exactness: ClassVar[Exactness] = "exact"
    stores: ClassVar[bool] = False
    regimes: ClassVar[frozenset[Regime]] = frozenset({"full", "block_causal"})

    def plan(self, row: RowView) -> RowPlan:
        return RowPlan(span_query(0, row.length), "full")

    def horizon(self, row: RowView) -> int | None:
        return None
