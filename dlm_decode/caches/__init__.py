"""Cache policies, one file each: what a forward computes and which stored K/V it sees.

A policy works on one row at a time, on the host. Stored K/V lie at absolute positions, which never
move in a masked diffusion model; a forward's own K/V replace what was stored at its positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from dlm_decode.errors import CapabilityError
from dlm_decode.models import ModelInfo, Regime
from dlm_decode.options import Options
from dlm_decode.registry import Registry
from dlm_decode.schedules import Window

Kind = Literal["full", "refresh", "region", "window"]
Exactness = Literal["exact", "approximate"]


@dataclass(frozen=True)
class RowView:
    """What a policy may look at of a row before a turn.

    `length` N counts all positions, `masked (N,)` marks the undecided ones. `step` counts turns
    since the block began, `since_refresh` turns since the last refresh (-1: never refreshed).
    `shift` is the model's: position i is predicted by the output at i - shift. `committed_last`
    holds the positions decided in the last turn. `blocks (N,)` are the blocks of a block-causal
    model's attention (None: full attention), `stale (N,)` marks positions whose stored K/V come
    from another token than the one that stands there now, or were never stored. `origin` is the
    first position to decode, before which lies the prompt. `age (N,)` counts the turns since each
    position took its token (0: masked; given ones are older than the row), `scores (N,)` are the
    sampler's last ones. `decided_since` counts tokens decided since the last refresh, `last_start`
    is where the last turn's window began, `memory` what this policy's last `LayerHook` left, `turn`
    counts turns since the row began.
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
    origin: int = 0
    age: np.ndarray | None = None
    scores: np.ndarray | None = None
    decided_since: int = 0
    last_start: int | None = None
    memory: Any = None
    turn: int = 0

    def changed(self, stop: int) -> np.ndarray:
        """Positions below `stop` whose stored K/V come from another token, ascending."""
        assert self.stale is not None, "only rows with a place in the store have stale K/V"
        return np.flatnonzero(self.stale[:stop])


@dataclass(frozen=True)
class RowPlan:
    """One row's part of the next forward.

    `query` are the sorted positions to compute. Kind "full" sees only them and stores nothing,
    "refresh" computes every position and stores all K/V, "window" stores its own K/V and sees
    everything stored, below position `stop` where that is given; "region" is a window that counts
    as a refresh of the row. `only`, where given, limits this
    turn's eligible positions to `[a, b)`. What a block-causal model may not see is never seen.
    `lead`, for models whose output at i - 1 predicts i: "keep" keeps the output before the window
    for later turns, "kept" lets the one kept last predict the window's first position.
    """

    query: np.ndarray
    kind: Kind
    only: tuple[int, int] | None = None
    stop: int | None = None
    lead: Literal["keep", "kept"] | None = None


class LayerHook:
    """What a policy does inside the layers of one row's forward; one is made for each.

    A row with a hook is attended by itself. Only the row as it stands calls `see`, no guidance lane
    and no branch. Letters: H and G heads, Q queries, S keys in the order of positions, K head size.
    """

    def keep(self, layer: int) -> Tensor | None:
        """Positions `(k,)`, none of them queried, that the queries see beside their own; None: all
        that the plan lets them see."""
        return None

    def see(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Look at `q (H, Q, K)` over all keys and values `(G, S, K)` seen, after RoPE."""

    def memory(self) -> Any:
        """What the next plan finds in `RowView.memory`; asked for once, after the forward."""
        return None


class PartialHook(LayerHook):
    """A hook that also chooses the tokens each layer computes, and completes what it left out.

    What a layer adds to the hidden states is then the hook's business: D is their size.
    """

    def choose(self, layer: int, new: Tensor, stored: Tensor) -> Tensor | None:
        """Which of the queries `(m,)` this layer computes, None for all, by their `new` values and
        those `stored`, `(Q, G, K)`."""
        return None

    def complete(self, what: str, layer: int, added: Tensor, chosen: Tensor | None) -> Tensor:
        """`added (Q, D)` by "mix" or "feed", zero where not `chosen`, with the rest filled in."""
        raise NotImplementedError


@dataclass(frozen=True)
class CachePolicy(Options):
    """Base of all cache policies.

    `exactness` is "exact" (logits equal a forward over the whole row) or "approximate". `stores`
    says whether rows need a place in the K/V store. `refreshes_blocks`: what a later block sees of
    an earlier one is computed anew when the block begins, never taken from the turns in between.
    `regimes` are the kinds of attention it is meant for. `sees_behind`: what a model with full
    attention sees behind the window is not cut off. `runs_layers`: hooks are `PartialHook`s.

    A position that is masked or changed again is computed in the next turn by every policy here,
    for all of them compute the open positions of the window.
    """

    paper: ClassVar[str] = ""
    exactness: ClassVar[Exactness] = "approximate"
    stores: ClassVar[bool] = True
    regimes: ClassVar[frozenset[Regime]] = frozenset({"full"})
    sees_behind: ClassVar[bool] = True
    runs_layers: ClassVar[bool] = False

    @property
    def refreshes_blocks(self) -> bool:
        """See the class."""
        return True

    def plan(self, row: RowView) -> RowPlan:
        """What to compute for this row now; an eligible i needs i - shift in the query."""
        raise NotImplementedError

    def horizon(self, row: RowView) -> int | None:
        """Turns from this one on in which plans hold, whatever is decided in them; None: no end.

        So many of a sampler's steps can be evaluated in one forward. It ends at a refresh inside
        the block, and is 1 for policies that go by what was decided, which is the default.
        """
        return 1

    def hook(self, row: RowView, plan: RowPlan) -> LayerHook | None:
        """What to do inside the layers of this row's forward; None costs nothing."""
        return None


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
    if cache.stores and info.whole_rows:
        raise CapabilityError(
            f"cache {CACHES.name_of(cache)!r} does not fit {info.family}: {info.whole_rows}; "
            "take cache none"
        )
    if cache.runs_layers and not info.runs_layers:
        raise CapabilityError(
            f"cache {CACHES.name_of(cache)!r} computes part of the tokens of a layer, which "
            f"{info.family} can't: take another cache"
        )


def span_query(start: int, stop: int) -> np.ndarray:
    """The positions `[start, stop)`, never below 0."""
    return np.arange(max(start, 0), stop, dtype=np.int64)


def led(query: np.ndarray, row: RowView) -> np.ndarray:
    """`query` with the positions whose outputs predict the window's masks, for a shifted model."""
    if not row.shift:
        return query
    window = np.arange(row.window.start, row.window.stop, dtype=np.int64)
    before = np.maximum(window[row.masked[window]] - row.shift, 0)
    return np.union1d(query, before)
