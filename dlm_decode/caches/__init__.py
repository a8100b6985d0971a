"""Cache policies, one file each: what a forward computes and which stored K/V it sees.

A policy works on one row at a time, on the host. Stored K/V lie at absolute positions, which never
move in a masked diffusion model; a forward's own K/V replace what was stored at its positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from dlm_decode.options import Options
from dlm_decode.registry import Registry
from dlm_decode.schedules import Window

Kind = Literal["full", "refresh", "window"]


@dataclass(frozen=True)
class RowView:
    """What a policy may look at of a row before a turn.

    `length` N counts all positions, `masked (N,)` marks the undecided ones. `step` counts turns
    since the block began, `since_refresh` turns since the last refresh (-1: never refreshed).
    `shift` is the model's: position i is predicted by the output at i - shift. `committed_last`
    holds the positions decided in the last turn.
    """

    length: int
    window: Window
    masked: np.ndarray
    step: int
    since_refresh: int
    shift: int
    committed_last: tuple[int, ...]


@dataclass(frozen=True)
class RowPlan:
    """One row's part of the next forward.

    `query` are the sorted positions to compute. Kind "full" sees only them and stores nothing,
    "refresh" computes every position and stores all K/V, "window" stores its own K/V and sees
    everything stored. `only`, where given, limits this turn's eligible positions to `[a, b)`.
    """

    query: np.ndarray
    kind: Kind
    only: tuple[int, int] | None = None


@dataclass(frozen=True)
class CachePolicy(Options):
    """Base of all cache policies.

    `exactness` is "exact" (logits equal a forward over the whole row) or "approximate". `stores`
    says whether rows need a place in the K/V store. `refreshes_blocks`: what a later block sees of
    an earlier one is computed anew when the block begins, never taken from the turns in between.
    """

    paper: ClassVar[str] = ""
    exactness: ClassVar[Literal["exact", "approximate"]] = "approximate"
    stores: ClassVar[bool] = True
    refreshes_blocks: ClassVar[bool] = True

    def plan(self, row: RowView) -> RowPlan:
        """What to compute for this row now; an eligible i needs i - shift in the query."""
        raise NotImplementedError

    def horizon(self, row: RowView) -> int | None:
        """Turns from this one on in which plans hold, whatever is decided in them; None: no end.

        So many of a sampler's steps can be evaluated in one forward. It ends at a refresh inside
        the block, and is 1 for policies that go by what was decided, which is the default.
        """
        return 1


CACHES: Registry[CachePolicy] = Registry("cache", "dlm_decode.caches", "dlm_decode.caches")


def span_query(start: int, stop: int) -> np.ndarray:
    """The positions `[start, stop)`, never below 0."""
    return np.arange(max(start, 0), stop, dtype=np.int64)
