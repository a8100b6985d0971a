"""FreeCache: finished text is frozen, what follows is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.caches import CACHES, CachePolicy, RowPlan, RowView, span_query


@CACHES.register("free")
@dataclass(frozen=True)
class Free(CachePolicy):
    """Freeze K/V of the clean prefix, block by block, and compute all that follows it.

    FlashDLM's FreeCache (arXiv:2505.21467): K/V of finished tokens hardly drift. No code is public;
    derived: a block is computed once more on its real tokens, with the first forward of the next
    one, and then frozen; the row is never refreshed.
    """

    paper: ClassVar[str] = "FlashDLM, arXiv:2505.21467"

    @property
    def refreshes_blocks(self) -> bool:
        return False

    def plan(self, row: RowView) -> RowPlan:
        if row.since_refresh < 0:
            return RowPlan(span_query(0, row.length), "refresh")
        rest = span_query(row.window.start - row.shift, row.length)
        return RowPlan(np.union1d(row.changed(row.window.start), rest), "window")

    def horizon(self, row: RowView) -> int | None:
        return None if row.step else 1
