"""No cache: every forward computes the whole row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dlm_decode.caches import CACHES, CachePolicy, RowPlan, RowView, span_query


@CACHES.register("none")
@dataclass(frozen=True)
class NoCache(CachePolicy):
    """Compute every position in every forward; exact, and the yardstick for all other policies."""

    exactness: ClassVar[Literal["exact", "approximate"]] = "exact"
    stores: ClassVar[bool] = False

    def plan(self, row: RowView) -> RowPlan:
        return RowPlan(span_query(0, row.length), "full")

    def horizon(self, row: RowView) -> int | None:
        return None
