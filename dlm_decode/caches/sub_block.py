"""The dual cache inside a block of Fast-dLLM v2: a sub-block is computed over the block's K/V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.caches import CACHES, Exactness, RowPlan, RowView, span_query
from dlm_decode.caches.block_causal import BlockCausal


@CACHES.register("sub_block")
@dataclass(frozen=True)
class SubBlock(BlockCausal):
    """Finished blocks are stored exactly; in the block at hand only the window is computed.

    Fast-dLLM v2 (arXiv:2509.26328), for windows shorter than a block (`--schedule sub_blocks`). The
    whole block is computed, and its K/V stored, while the window's first token is masked; then the
    window is computed alone and replaces its own K/V, over those that the rest of its block had.
    """

    paper: ClassVar[str] = "Fast-dLLM v2, arXiv:2509.26328"
    exactness: ClassVar[Exactness] = "approximate"

    def plan(self, row: RowView) -> RowPlan:
        whole = super().plan(row)
        if self._is_due(row):
            return whole
        return RowPlan(span_query(row.window.start, row.window.stop), "window", stop=whole.stop)

    def horizon(self, row: RowView) -> int | None:
        return 1 if self._is_due(row) else None

    def _is_due(self, row: RowView) -> bool:
        """Whether the first token is open, or the block's masks were never stored."""
        assert row.stale is not None
        window = np.arange(row.window.start, row.window.stop)
        fresh = row.masked[window] & row.stale[window]
        return bool(row.masked[row.window.start] or fresh.any())
