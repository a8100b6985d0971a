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

    `refresh_tokens` and `vicinity` are those of deferred commitment decoding (DCD,
    arXiv:2601.02076), `vicinity` also dInfer's. `refresh_region` and `refresh_blocks` are derived:
    where a block begins without a refresh of the row's K/V, what changed since is computed again.
    """

    paper: ClassVar[str] = "Fast-dLLM, arXiv:2505.22618"

    refresh_every: int | None = option(
        None, "refresh after this many turns of a block too (none: only at its start)", low=1
    )
    compat: str | None = option(
        None, "published loop to follow on shifted models", choices=(None, "fast-dllm")
    )
    refresh_tokens: int | None = option(
        None, "refresh once so many tokens were decided since the last time, not at blocks", low=1
    )
    refresh_blocks: int = option(1, "refresh at every m-th block only", low=1)
    refresh_region: str = option(
        "whole",
        "what later refreshes compute: the row, all but the prompt, or the window and its vicinity",
        choices=("whole", "generation", "window"),
    )
    vicinity: int = option(0, "also compute so many positions around the window", low=0)

    @property
    def refreshes_blocks(self) -> bool:
        whole = self.refresh_region == "whole" and self.refresh_blocks == 1
        return whole and self.refresh_tokens is None

    def plan(self, row: RowView) -> RowPlan:
        if self._is_due(row):
            return self._refresh(row)
        settled = not row.masked[row.window.start]
        lead = 0 if self.compat and settled else row.shift
        query = self.query(row, lead)
        if row.step == 0 and self.refresh_tokens is None:
            query = np.union1d(query, row.changed(row.window.start))
        return RowPlan(query, "window")

    def horizon(self, row: RowView) -> int | None:
        if self.refresh_tokens is not None or (row.step == 0 and self.refresh_blocks > 1):
            return 1
        due = self._is_due(row)
        if not due and self.compat and row.shift and row.masked[row.window.start]:
            return 1  # the query changes with the first token, which the position before it sees
        if self.refresh_every is None:
            return None
        return self.refresh_every if due else self.refresh_every - row.since_refresh - 1

    def query(self, row: RowView, lead: int) -> np.ndarray:
        """Positions computed between refreshes; `lead` more are wanted before the window."""
        return span_query(self.begin(row, lead), row.length)

    def begin(self, row: RowView, lead: int) -> int:
        """Where the query begins; the vicinity is counted from the window of the turn before."""
        first = row.window.start if row.last_start is None else row.last_start
        near = max(first - self.vicinity, row.origin) if self.vicinity else row.window.start
        return min(near, row.window.start) - lead

    def _refresh(self, row: RowView) -> RowPlan:
        if self.refresh_region == "whole" or self._lacks_prompt(row):
            return RowPlan(span_query(0, row.length), "refresh", self._forced(row))
        if self.refresh_region == "generation":
            query = span_query(row.origin - row.shift, row.length)
        else:
            low, high = row.window.start - self.vicinity, row.window.stop + self.vicinity
            query = span_query(low - row.shift, min(high, row.length))
        return RowPlan(np.union1d(query, row.changed(row.window.start)), "region")

    def _lacks_prompt(self, row: RowView) -> bool:
        """Whether the row is new and shares no stored prompt with another one."""
        return row.since_refresh < 0 and (row.stale is None or bool(row.stale[0]))

    def _is_due(self, row: RowView) -> bool:
        if row.since_refresh < 0:
            return True
        if self.refresh_tokens is not None:
            return row.decided_since >= self.refresh_tokens
        begins = row.step == 0 and row.window.index % self.refresh_blocks == 0
        every = self.refresh_every
        return begins or (every is not None and row.since_refresh + 1 >= every)

    def _forced(self, row: RowView) -> tuple[int, int] | None:
        start = row.window.start
        forced = self.compat is not None and row.shift > 0 and row.step == 0
        return (start, start + 1) if forced and row.masked[start] else None
