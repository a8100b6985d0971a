"""The exact cache of block-causal models: finished blocks are stored and never computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.caches import CACHES, CachePolicy, Exactness, RowPlan, RowView, span_query
from dlm_decode.models import Regime


@CACHES.register("block_causal")
@dataclass(frozen=True)
class BlockCausal(CachePolicy):
    """Keep the K/V of finished blocks, compute the window's; exact for block-causal models.

    Block diffusion, BD3-LM (arXiv:2503.09573); SDAR (arXiv:2510.06303). Position i sees j iff
    block(j) <= block(i), so that a block's K/V are final once a forward saw all its real tokens.
    Derived: that forward is fused with the next block's first one (2 blocks of queries instead of
    an extra forward), as is the prompt's with the first block's. A window that a shifted model
    predicts from the block before alone needs no forward of its own block.
    """

    paper: ClassVar[str] = "BD3-LM, arXiv:2503.09573; SDAR, arXiv:2510.06303"
    exactness: ClassVar[Exactness] = "exact"
    regimes: ClassVar[frozenset[Regime]] = frozenset({"block_causal"})

    def plan(self, row: RowView) -> RowPlan:
        assert row.blocks is not None and row.stale is not None
        first = row.window.start
        stop = _block_end(row.blocks, max(row.window.stop - 1 - row.shift, 0))
        changed = np.flatnonzero(row.stale[: first + 1])
        begin = _block_start(row.blocks, int(changed[0]) if len(changed) else first)
        return RowPlan(span_query(min(begin, first - row.shift), stop), "window", stop=stop)

    def horizon(self, row: RowView) -> int | None:
        return None


def _block_start(blocks: np.ndarray, position: int) -> int:
    return int(np.searchsorted(blocks, blocks[position], side="left"))


def _block_end(blocks: np.ndarray, position: int) -> int:
    return int(np.searchsorted(blocks, blocks[position], side="right"))
