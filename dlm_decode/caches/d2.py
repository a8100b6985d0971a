"""d2Cache: certain masks and influential tokens are computed, the rest is kept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dlm_decode.caches import CACHES, CachePolicy, LayerHook, RowPlan, RowView, led, span_query
from dlm_decode.caches.elastic import mean_attention
from dlm_decode.options import option


@CACHES.register("d2")
@dataclass(frozen=True)
class D2(CachePolicy):
    """Compute the most certain masks, the new tokens and the nucleus of attention rollout.

    d2Cache (arXiv:2509.23094). The query holds (1) the `current_k` masks of highest c_i * rho_i,
    with rho the density of decided positions (a Gaussian of width sigma); (2) what the last turn
    decided; (3) of the others the fewest whose column sums of the attention rollout make up
    `rollout_p` of all; (4) gaps of at most `inflate` between two of them. The row is computed once.

    The published code writes remembered confidences into a copy, and so keeps those of the first
    step; here they are kept. Derived: masks are searched in the window, which is where they can be
    decided; rows need not be of equal length, so nothing is topped up.
    """

    paper: ClassVar[str] = "d2Cache, arXiv:2509.23094"

    refresh_every: int | None = option(
        None, "compute the row after this many turns too (none: only when it begins)", low=1
    )
    current_k: int = option(32, "how many masks of the window are computed", low=1)
    sigma: float = option(10.0, "width of the density, positions", above=0)
    rollout_p: float = option(0.1, "share of the rollout's column sums", low=0, high=1)
    inflate: int = option(4, "widest gap that is filled, 0 for none", low=0)

    @property
    def refreshes_blocks(self) -> bool:
        return False

    def plan(self, row: RowView) -> RowPlan:
        every = self.refresh_every
        if row.since_refresh < 0 or (every is not None and row.since_refresh + 1 >= every):
            return RowPlan(span_query(0, row.length), "refresh")
        return RowPlan(np.flatnonzero(self._chosen(row)), "window")

    def hook(self, row: RowView, plan: RowPlan) -> LayerHook:
        return Rollout(torch.from_numpy(plan.query), row.length)

    def _chosen(self, row: RowView) -> np.ndarray:
        assert row.age is not None and row.stale is not None
        young = ~row.masked & ((row.age < 2) | row.stale)
        chosen = np.zeros(row.length, dtype=bool)
        chosen[led(np.union1d(self._certain(row), np.flatnonzero(young)), row)] = True
        chosen |= nucleus(row.memory, ~chosen, self.rollout_p)
        return inflated(chosen, self.inflate)

    def _certain(self, row: RowView) -> np.ndarray:
        """The window's masks of highest certainty, with at least one of them."""
        assert row.scores is not None
        window = np.arange(row.window.start, row.window.stop, dtype=np.int64)
        masks = window[row.masked[window]]
        score = certainty(row.scores)[masks] * density(~row.masked, row.origin, self.sigma, masks)
        best = np.argsort(-score, kind="stable")[: self.current_k]
        return np.sort(masks[best])


def certainty(scores: np.ndarray) -> np.ndarray:
    """Scores as positive numbers in the same order; those of entropies are negative."""
    return np.where(scores < 0, np.exp(np.minimum(scores, 0)), scores + 1e-6)


def density(decided: np.ndarray, origin: int, sigma: float, at: np.ndarray) -> np.ndarray:
    """Share `(n,)` of the positions from `origin` on that are decided, by Gaussian weights around
    each of the positions `at (n,)`, which lie there too."""
    places = np.arange(origin, len(decided))
    weights = np.exp(-((at[:, None] - places) ** 2) / (2 * sigma**2))
    return np.asarray(weights @ decided[origin:] / weights.sum(-1))


def nucleus(importance: np.ndarray, allowed: np.ndarray, share: float) -> np.ndarray:
    """The fewest `allowed` positions `(N,)` that hold `share` of their summed importance."""
    chosen = np.zeros(len(allowed), dtype=bool)
    places = np.flatnonzero(allowed)
    order = places[np.argsort(-importance[places], kind="stable")]
    mass = np.cumsum(importance[order])
    if len(order) and share > 0:
        chosen[order[: int(np.searchsorted(mass, share * mass[-1])) + 1]] = True
    return chosen


def inflated(chosen: np.ndarray, width: int) -> np.ndarray:
    """`chosen (N,)` with the gaps between two chosen positions at most `width` apart filled."""
    places = np.flatnonzero(chosen)
    filled = chosen.copy()
    for a, b in pairwise(places.tolist()):
        if b - a <= width:
            filled[a:b] = True
    return filled


class Rollout(LayerHook):
    """Attention rollout over the layers; positions that are not computed attend to themselves."""

    def __init__(self, query: Tensor, length: int) -> None:
        self._query, self._length = query, length
        self._product: Tensor | None = None

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        attention = mean_attention(q, k)
        eye = torch.eye(self._length, dtype=attention.dtype, device=q.device)
        step = eye.index_copy(0, self._query.to(q.device), attention) + eye
        step = step / step.sum(-1, keepdim=True)
        self._product = step if self._product is None else step @ self._product

    def memory(self) -> np.ndarray:
        """Column sums `(N,)`: how much each position reaches the last layer."""
        assert self._product is not None, "a hook that saw no layer"
        return np.asarray(self._product.sum(0).double().cpu().numpy())
