"""Sparse-dLLM: outside the block only the most attended K/V are kept, per layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_decode.caches import CACHES, CachePolicy, LayerHook, RowPlan, RowView, span_query
from dlm_decode.options import option


@CACHES.register("sparse")
@dataclass(frozen=True)
class Sparse(CachePolicy):
    """Compute the row in a block's first two turns, then the block over the best outside K/V.

    Sparse-dLLM (arXiv:2508.02558). In step 1 each layer scores the positions outside the block,
    score_j = mean over heads of q_mean . k_j, with q_mean the mean query of the block; scores are
    max-pooled over `kernel` neighbours and the best share `keep` is seen until the block ends, the
    same positions by all heads. Step 0 is left out, for its K/V are unstable.
    """

    paper: ClassVar[str] = "Sparse-dLLM, arXiv:2508.02558"

    refresh_every: int | None = option(
        None, "compute the row after this many turns of a block too (none: its first two)", low=1
    )
    keep: float = option(
        0.5, "share of the positions outside the block that is kept", above=0, high=1
    )
    kernel: int = option(3, "positions that are pooled, an odd number", low=1)

    def plan(self, row: RowView) -> RowPlan:
        if self._is_due(row):
            return RowPlan(span_query(0, row.length), "refresh")
        return RowPlan(self._block(row), "window")

    def hook(self, row: RowView, plan: RowPlan) -> LayerHook:
        if plan.kind == "window":
            return Kept(row.memory)
        return Scoring(self._block(row), row.length, self.keep, self.kernel)

    def _block(self, row: RowView) -> np.ndarray:
        return span_query(row.window.start - row.shift, row.window.stop)

    def _is_due(self, row: RowView) -> bool:
        every = self.refresh_every
        again = every is not None and row.since_refresh + 1 >= every
        moved = row.memory is not None and not _holds(row.memory.block, self._block(row))
        return row.since_refresh < 0 or row.step < 2 or again or moved


def _holds(block: np.ndarray, query: np.ndarray) -> bool:
    """Whether everything queried was left out when the kept positions were chosen."""
    return bool(np.isin(query, block).all())


@dataclass
class Scoring(LayerHook):
    """Chooses the positions to keep, `chosen` per layer, while the row is computed."""

    block: np.ndarray
    length: int
    share: float
    kernel: int
    chosen: list[Tensor] = field(default_factory=list)

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        block = torch.from_numpy(self.block).to(q.device)
        queries = q[:, block].mean(1).unflatten(0, (k.shape[0], -1))
        scores = torch.einsum("gsk,gnk->n", queries, k) / q.shape[0]
        outside = torch.ones(self.length, dtype=torch.bool, device=q.device)
        outside[block] = False
        places = outside.nonzero()[:, 0]
        if not len(places):  # the block is the whole row
            self.chosen.append(places)
            return
        kernel = min(self.kernel, 2 * len(places) + 1)  # wider ones see no more
        pooled = F.max_pool1d(scores[places][None], kernel, stride=1, padding=kernel // 2)
        pooled = pooled[0, : len(places)]
        count = int(self.share * len(places))
        self.chosen.append(places[pooled.topk(count).indices.sort().values])

    def memory(self) -> Any:
        return self


@dataclass
class Kept(LayerHook):
    """Lets the block see what was chosen."""

    scoring: Scoring

    def keep(self, layer: int) -> Tensor | None:
        return self.scoring.chosen[layer]

    def memory(self) -> Any:
        return self.scoring
