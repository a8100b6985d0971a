"""Prefix cache of Fast-dLLM: K/V before the block are kept while the block is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.caches import CACHES, CachePolicy, RowPlan, RowView, span_query
from dlm_decode.options import option


@CACHES.register("prefix")
@dataclass(frozen=True)
class Prefix(CachePolicy):
    """Refresh all K/V at each block start, then compute the block and everything after it.

    Fast-dLLM (arXiv:2505.22618), section 3.2. For a shifted model the query begins one position
    earlier, so the block's first token is predicted like the others; `compat="fast-dllm"` instead
    decides that token, and nothing else, from the refresh, as the published Dream code does (as
    long as that token stands: where a sampler puts it off, the query leads as without `compat`).
    """

    paper: ClassVar[str] = "Fast-dLLM, arXiv:2505.22618"

    refresh_every: int | None = option(
        None, "refresh after this many turns of a block too (none: only at its start)", low=1
    )
    compat: str | None = option(
        None, "published loop to follow on shifted models", choices=(None, "fast-dllm")
    )

    def plan(self, row: RowView) -> RowPlan:
        if self._is_due(row):
            only = self._forced(row)
            return RowPlan(span_query(0, row.length), "refresh", only)
        settled = not row.masked[row.window.start]
        lead = 0 if self.compat and settled else row.shift
        return RowPlan(self.query(row, lead), "window")

    def horizon(self, row: RowView) -> int | None:
        due = self._is_due(row)
        if not due and self.compat and row.shift and row.masked[row.window.start]:
            return 1  # the query changes with the first token, which the position before it sees
        if self.refresh_every is None:
            return None
        return self.refresh_every if due else self.refresh_every - row.since_refresh - 1

    def query(self, row: RowView, lead: int) -> np.ndarray:
        """Positions computed between refreshes; `lead` more are wanted before the window."""
        return span_query(row.window.start - lead, row.length)

    def _is_due(self, row: RowView) -> bool:
        never = row.step == 0 or row.since_refresh < 0
        every = self.refresh_every
        return never or (every is not None and row.since_refresh + 1 >= every)

    def _forced(self, row: RowView) -> tuple[int, int] | None:
        start = row.window.start
        forced = self.compat is not None and row.shift > 0 and row.step == 0
        return (start, start + 1) if forced and row.masked[start] else None
