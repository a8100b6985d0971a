"""Elastic-Cache: K/V are refreshed when the attention to the most attended tokens drifts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_decode.caches import CACHES, CachePolicy, LayerHook, RowPlan, RowView, led, span_query
from dlm_decode.options import option


@CACHES.register("elastic")
@dataclass(frozen=True)
class Elastic(CachePolicy):
    """Compute the leftmost masks; refresh the row when a layer's attention pattern has drifted.

    Elastic-Cache (arXiv:2510.14973): the window holds the beta leftmost masks, far masks are cached
    as well. In each layer l the decided token T_l that the window attends to most is computed too;
    with S its attention over the row, sigma_l = cos(S_before, S_now), and sigma_l < gamma in any
    layer means that stored K/V are outdated.

    Derived (the code is not public): the paper recomputes the layers above l within the same
    forward, from stored hidden states; here the whole row is refreshed in the next turn, which
    needs no such store. Tokens of the last turn are computed once more, so that no K/V of a mask
    stay behind, and a row is refreshed when it begins.
    """

    paper: ClassVar[str] = "Elastic-Cache, arXiv:2510.14973"

    refresh_every: int | None = option(
        None, "refresh after this many turns whatever the drift (none: by drift alone)", low=1
    )
    gamma: float = option(0.9, "least cosine of two attention patterns without a refresh", high=1)
    beta: int = option(32, "how many of the leftmost masks are computed", low=1)

    @property
    def refreshes_blocks(self) -> bool:
        return False

    def plan(self, row: RowView) -> RowPlan:
        every = self.refresh_every
        again = every is not None and row.since_refresh + 1 >= every
        if row.since_refresh < 0 or again or (row.memory is not None and row.memory.drifted):
            return RowPlan(span_query(0, row.length), "refresh")
        return RowPlan(led(self._query(row), row), "window")

    def _query(self, row: RowView) -> np.ndarray:
        """The leftmost masks from the window's start on, what was just decided, and each T_l."""
        assert row.age is not None
        masks = np.flatnonzero(row.masked[row.window.start :]) + row.window.start
        young = np.flatnonzero(~row.masked & (row.age < 2))
        tracked = [] if row.memory is None else row.memory.tracked
        parts = [masks[: self.beta], row.changed(row.window.stop), young, tracked]
        return np.unique(np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]))

    def hook(self, row: RowView, plan: RowPlan) -> LayerHook:
        last = row.memory
        return Drift(
            torch.from_numpy(plan.query),
            torch.from_numpy(row.masked.copy()),
            self.gamma,
            None if last is None else last.patterns,
            () if last is None else last.tracked,
        )


@dataclass(frozen=True)
class Patterns:
    """Each layer's tracked token, its attention `(N,)` (None: not computed), and the verdict."""

    tracked: tuple[int, ...]
    patterns: tuple[Tensor | None, ...]
    drifted: bool


@dataclass
class Drift(LayerHook):
    """Compares the tracked tokens' attention with the last turn's, and picks the next ones."""

    query: Tensor
    masked: Tensor
    gamma: float
    before: tuple[Tensor | None, ...] | None
    tracked: tuple[int, ...]
    cosines: list[Tensor] = field(default_factory=list)
    lines: list[Tensor] = field(default_factory=list)
    favourites: list[Tensor] = field(default_factory=list)

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        attention = mean_attention(q, k)
        query, masked = self.query.to(q.device), self.masked.to(q.device)
        if self.before is not None and (then := self.before[layer]) is not None:
            now = attention[(query == self.tracked[layer]).to(torch.int8).argmax()]
            self.cosines.append(F.cosine_similarity(then, now, dim=0))
        weight = attention[masked[query]].sum(0).masked_fill(masked, -1.0)
        favourite = weight.argmax()
        self.favourites.append(favourite)
        self.lines.append(attention[(query == favourite).to(torch.int8).argmax()])

    def memory(self) -> Patterns:
        """The one sync that this policy adds to a turn."""
        tracked = tuple(torch.stack(self.favourites).tolist())
        drift = bool(self.cosines) and float(torch.stack(self.cosines).min()) < self.gamma
        computed = set(self.query.tolist())
        found = zip(tracked, self.lines, strict=True)
        patterns = tuple(line if place in computed else None for place, line in found)
        return Patterns(tracked, patterns, drift)


def mean_attention(q: Tensor, k: Tensor) -> Tensor:
    """Attention `(Q, S)` of `q (H, Q, K)` over `k (G, S, K)`, fp32 or wider, mean of the heads."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(exact).unflatten(0, (k.shape[0], -1))
    scores = torch.einsum("gsqk,gnk->gsqn", grouped, k.to(exact)) * q.shape[-1] ** -0.5
    return scores.softmax(-1).mean((0, 1))
