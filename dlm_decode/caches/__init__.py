"""Cache policies, one file each: what a forward computes and which stored K/V it sees.

A policy works on one row at a time, on the host. Stored K/V lie at absolute positions, which never
move in a masked diffusion model; a forward's own K/V replace what was stored at its positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from dlm_decode.errors import CapabilityError
from dlm_decode.models import ModelInfo, Regime
from dlm_decode.options import Options
from dlm_decode.registry import Registry
from dlm_decode.schedules import Window

Kind = Literal["full", "refresh", "window"]
Exactness = Literal["exact", "approximate"]


@dataclass(frozen=True)
class RowView:
    """What a policy may look at of a row before a turn.

    `length` N counts all positions, `masked (N,)` marks the undecided ones. `step` counts turns
    since the block began, `since_refresh` turns since the last refresh (-1: never refreshed).
    `shift` is the model's: position i is predicted by the output at i - shift. `committed_last`
    holds the positions decided in the last turn. `blocks (N,)` are the blocks of a block-causal
    model's attention (None: full attention), `stale (N,)` marks positions whose stored K/V come
    from another token than the one that stands there now, or were never stored.
    """

    length: int
    window: Window
    masked: np.ndarray
    step: int
    since_refresh: int
    shift: int
    committed_last: tuple[int, ...]
    blocks: np.ndarray | None = None
    stale: np.ndarray | None = None


@dataclass(frozen=True)
class RowPlan:
    """One row's part of the next forward.

    `query` are the sorted positions to compute. Kind "full" sees only them and stores nothing,
    "refresh" computes every position and stores all K/V, "window" stores its own K/V and sees
    everything stored, below position `stop` where that is given. `only`, where given, limits this
    turn's eligible positions to `[a, b)`. What a block-causal model may not see is never seen.
    """

    query: np.ndarray
    kind: Kind
    only: tuple[int, int] | None = None
    stop: int | None = None


@dataclass(frozen=True)
class CachePolicy(Options):
    """Base of all cache policies.

    `exactness` is "exact" (logits equal a forward over the whole row) or "approximate". `stores`
    says whether rows need a place in the K/V store. `refreshes_blocks`: what a later block sees of
    an earlier one is computed anew when the block begins, never taken from the turns in between.
    `regimes` are the kinds of attention it is meant for.
    """

    paper: ClassVar[str] = ""
    exactness: ClassVar[Exactness] = "approximate"
    stores: ClassVar[bool] = True
    refreshes_blocks: ClassVar[bool] = True
    regimes: ClassVar[frozenset[Regime]] = frozenset({"full"})

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

_MISFITS = {
    "block_causal": "its attention never looks right, so that nothing stored has to be refreshed: "
    "take cache block_causal, which is exact",
    "full": "its attention looks right, at positions that this cache leaves out",
}


def check_fit(cache: CachePolicy, info: ModelInfo) -> None:
    """Raise `CapabilityError` when a policy is not meant for the model's kind of attention."""
    if info.regime not in cache.regimes:
        others = (name for name in CACHES.names() if info.regime in CACHES.get(name).regimes)
        raise CapabilityError(
            f"cache {CACHES.name_of(cache)!r} does not fit {info.family}: {_MISFITS[info.regime]} "
            f"(caches for this model: {', '.join(others)})"
        )


def span_query(start: int, stop: int) -> np.ndarray:
    """The positions `[start, stop)`, never below 0."""
    return np.arange(max(start, 0), stop, dtype=np.int64)
