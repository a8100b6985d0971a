"""Dual cache of Fast-dLLM: K/V on both sides of the block are kept while the block is decoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlm_decode.caches import CACHES, RowView, span_query
from dlm_decode.caches.prefix import Prefix


@CACHES.register("dual")
@dataclass(frozen=True)
class Dual(Prefix):
    """Refresh all K/V at each block start, then compute only the block.

    Fast-dLLM (arXiv:2505.22618), section 3.2. The block's own K/V are fresh in every forward, those
    outside are from the last refresh. Shifted models: see `prefix`.
    """

    def query(self, row: RowView, lead: int) -> np.ndarray:
        return span_query(row.window.start - lead, row.window.stop)
