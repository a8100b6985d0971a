"""Dual cache of Fast-dLLM: only the block is computed between refreshes."""

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
    outside are from the last refresh. Shifted models and the options: see `prefix`.
    """

    def query(self, row: RowView, lead: int) -> np.ndarray:
        stop = min(row.window.stop + self.vicinity, row.length)
        return span_query(self.begin(row, lead), stop)
