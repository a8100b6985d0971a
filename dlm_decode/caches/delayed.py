"""dKV-Cache: a token's K/V are kept only once it was seen as the real token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.caches import CACHES, CachePolicy, RowPlan, RowView, led, span_query
from dlm_decode.options import option


@CACHES.register("delayed")
@dataclass(frozen=True)
class Delayed(CachePolicy):
    """Compute what was decided fewer than `delay` turns ago or not at all; keep the other K/V.

    dKV-Cache (arXiv:2505.15781): at step i > 1 of a block, with i mod R > 0, the query is every
    position not committed at the end of step i - 2. Each token is so computed once more after it
    was decided, and then kept. Steps 0 and 1 of a block, and every R-th, compute the row.

    `greedy` computes the block's masks and what lies near the tokens of the last two turns (its
    random positions are left out: derived); with `local_window` 0 it packs the active queries, the
    masks and new tokens, and nothing else. `prefill` never computes the prompt again.
    """

    paper: ClassVar[str] = "dKV-Cache, arXiv:2505.15781"

    refresh_every: int | None = option(
        8, "R: compute the whole row at every R-th step of a block (none: its first two)", low=1
    )
    delay: int = option(2, "turns after which a decided token's K/V are kept", low=1)
    variant: str = option(
        "decode", "what is kept, see above", choices=("decode", "greedy", "prefill")
    )
    local_window: int = option(4, "greedy: positions on each side of a new token", low=0)

    def plan(self, row: RowView) -> RowPlan:
        if row.since_refresh < 0 or (self._is_due(row) and self.variant != "prefill"):
            return RowPlan(span_query(0, row.length), "refresh")
        if self._is_due(row):
            return RowPlan(span_query(row.origin - row.shift, row.length), "region")
        return RowPlan(led(self._query(row), row), "window")

    def _is_due(self, row: RowView) -> bool:
        every = self.refresh_every
        return row.step < self.delay or (every is not None and row.step % every == 0)

    def _query(self, row: RowView) -> np.ndarray:
        assert row.age is not None
        young = row.masked | (row.age < self.delay)
        if self.variant != "greedy":
            return np.flatnonzero(young)
        near = np.zeros(row.length, dtype=bool)
        for i in np.flatnonzero(~row.masked & (row.age <= 2)):
            near[max(i - self.local_window, 0) : i + self.local_window + 1] = True
        inside = slice(row.window.start, row.window.stop)
        near[inside] |= young[inside]
        return np.flatnonzero(near | (young & ~row.masked))
