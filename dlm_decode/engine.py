"""The loop: plan, query, forward, decide, apply, advance; exactly one forward and one sync a turn.

The engine alone owns the rows, the canvas, the K/V store, the noise keys and the accounting.
Samplers, cache policies, schedules and models are handed in and know nothing of one another.
Rows enter as places become free and leave the moment they are finished.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dlm_decode.attention import Watch
from dlm_decode.caches import CACHES, CachePolicy, LayerHook, RowPlan, RowView, check_fit
from dlm_decode.canvas import build_canvas, window_base, window_width
from dlm_decode.errors import CapabilityError
from dlm_decode.graphs import MOST_TOKENS, Graphs, check_static
from dlm_decode.kv import KVStore
from dlm_decode.models import DiffusionLM, ModelInfo, layer_devices, share_of
from dlm_decode.packing import Packed, Scope, pack, record_writes, watched_parts
from dlm_decode.ragged import takes_flex
from dlm_decode.rows import Row
from dlm_decode.samplers import Sampler
from dlm_decode.schedules import Schedule
from dlm_decode.shadows import with_shadows
from dlm_decode.storage import Residents, Storage
from dlm_decode.tree import select_rows, where_rows
from dlm_decode.turn import DevicePart, Outcome, Turn
from dlm_decode.types import Canvas, Draw, Generation, Query

OFFERED = frozenset(
    {
        "p2",
        "top2",
        "entropy",
        "filtered",
        "logits",
        "hidden",
        "attention",
        "decided",
        "soft_embeddings",
        "shadow",
        "window",
    }
)
"""Needs of a sampler that this engine can meet."""


@dataclass(frozen=True)
class Engine:
    """A model with one sampler, cache policy and schedule; `run` decodes rows with them.

    `cfg_scale` > 0 adds an unconditional lane to every row (logits u + (1 + scale)(c - u)).
    `storage` says how K/V are kept. With `graphs`, turns that come again are replayed. `debug`
    checks each plan and decision against the invariants, at the cost of syncs.
    """

    model: DiffusionLM
    sampler: Sampler
    cache: CachePolicy
    schedule: Schedule
    draw: Draw
    cfg_scale: float = 0.0
    max_batch_size: int = 8
    debug: bool = False
    storage: Storage = field(default_factory=Storage)
    graphs: Graphs | None = None

    def __post_init__(self) -> None:
        check_needs(self.sampler, self.model.info)
        if self.graphs is not None:
            check_static(self.model)
        if self.lanes > 1 and not self.model.info.has_mask:
            raise CapabilityError(
                f"guidance (cfg_scale) masks the prompt, and {self.model.info.family} has no mask"
            )
        check_fit(self.cache, self.model.info)
        check_whole(self.model, self.cache, self.sampler, self.draw)
        self.storage.check(self.cache, self.model, self.lanes)

    @property
    def lanes(self) -> int:
        return 2 if self.cfg_scale > 0 else 1

    def run(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Generation | None]]:
        """Decode `rows`, at most `max_batch_size` at a time.

        After every turn each row in flight is yielded with None, or with its result if that turn
        finished it. Rows are told apart by identity; the order of completion is theirs.
        """
        if not rows:
            return
        state = _Flight(self._residents(rows), window_width(rows, self.sampler, self.schedule))
        waiting = deque(rows)
        try:
            while waiting or state.rows:
                self._admit(state, waiting)
                with torch.inference_mode():
                    self._turn(state)
                yield from self._settle_rows(state)
        finally:
            for row in state.rows:
                state.release(row)
            if self.graphs is not None:
                self.graphs.store = state.store

    @property
    def _replays(self) -> bool:
        """Whether turns are replayed, of which the number of scored positions is padded."""
        fixed = "shadow" not in self.sampler.needs and "eager" not in self.sampler.traits
        return self.graphs is not None and fixed

    def _residents(self, rows: Sequence[Row]) -> Residents | None:
        """A store for what can be in flight at once, or None."""
        if not self.cache.stores:
            return None
        kept = None
        if self.graphs is not None:
            kept, self.graphs.store = self.graphs.store, None
        lanes, batch, share = self.lanes, self.max_batch_size, share_of(self.model)

        def opened() -> Residents:
            return Residents.open(
                rows, self.model, self.storage, lanes=lanes, batch=batch, kept=kept
            )

        return opened() if share is None else share.ranks.agreed(opened)

    def _admit(self, state: _Flight, waiting: deque[Row]) -> None:
        """Let rows in, in their order, while there are places in the batch and in the store."""
        while waiting and len(state.rows) < self.max_batch_size and state.admit(waiting[0]):
            waiting.popleft()

    def _turn(self, state: _Flight) -> None:
        """One forward for all rows in flight, and what follows from it."""
        rows, info = state.rows, self.model.info
        views = [row.view(info.shift) for row in rows]
        plans = [self.cache.plan(view) for view in views]
        ends = [_ends(row, plan) for row, plan in zip(rows, plans, strict=True)]
        reach = [max(stops) for stops in ends]
        widest = [
            self._reaching(view, plan, stop)
            for view, plan, stop in zip(views, plans, reach, strict=True)
        ]
        base = window_base(rows, self.sampler)
        canvas, readable = build_canvas(
            rows,
            widest,
            base,
            state.width,
            self.model,
            wide=self.sampler.scope == "canvas",
            decided="decided" in self.sampler.needs,
            window="window" in self.sampler.needs,
            draw=self.draw,
            horizons=[self._horizon(row, view) for row, view in zip(rows, views, strict=True)],
            reach=reach,
        )
        memory = self._memory(state, canvas)
        query = self.sampler.query(canvas, memory)
        scope = self._scope(rows, views, plans, ends, base, state.width, query)
        if self.debug:
            _check_plans(rows, widest, readable, info.shift, bool(rows[0].slots))
        hooks = self._hooks(views, plans)
        turn = self._prepared(state, plans, hooks, readable, canvas, memory, query, scope)
        outcome, state.memory, leads = self._computed(turn, state.store, hooks)
        record_writes(rows, plans)
        if state.residents is not None:
            state.residents.after_forward(rows)
        for row, hook in zip(rows, hooks, strict=True):
            row.memory = row.memory if hook is None else hook.memory()
        if turn.packed.leads is not None and leads is not None:
            for i, lead in zip(turn.packed.leads.rows, leads, strict=True):
                rows[i].kept = lead
        received = Outcome.received(outcome.cpu(), len(rows), state.width)
        self._apply(state, readable, scope, received)

    def _prepared(
        self,
        state: _Flight,
        plans: Sequence[RowPlan],
        hooks: Sequence[LayerHook | None],
        readable: Sequence[np.ndarray],
        canvas: Canvas,
        memory: Any,
        query: Query | None,
        scope: Scope,
    ) -> Turn:
        """What the device part of this turn is given; nothing is computed yet."""
        rows, info, device = state.rows, self.model.info, self.model.device
        packed, read = pack(
            rows,
            readable,
            scope,
            hooks=hooks,
            lanes=self.lanes,
            shift=info.shift,
            mask_id=info.mask_id,
            device=device,
            padded=self._replays,
            windows=bool(info.whole_rows),
            together=takes_flex(self.model),
            places=0 if state.store is None else state.store.places_of(self.model.dtype),
            winners=self._stores_winners,
        )
        shadows = None
        if "shadow" in self.sampler.needs:
            packed, shadows = self._shadows(packed, read, rows, plans, readable, scope)
        scored = len(packed.scatter)
        kept = [cast("Tensor", rows[i].kept) for i in packed.kept]
        return Turn(
            canvas,
            memory,
            query,
            packed,
            finishing=_sent([r.finishing for r in rows], device),
            ban_end=_end_mask(rows, readable, scope, _bans_end, scored, device),
            demote_end=_end_mask(rows, readable, scope, _demotes_end, scored, device),
            watch=self._watch(rows, packed, read, scope),
            shadows=shadows,
            kept=torch.cat(kept) if kept else None,
            branches=scope.branches,
        )

    def _computed(
        self, turn: Turn, store: KVStore | None, hooks: Sequence[LayerHook | None]
    ) -> tuple[Tensor, Any, Tensor | None]:
        """What the turn decided, still on the device, the sampler's new memory and what is kept."""
        device_part = DevicePart(self.model, self.sampler, self.schedule, self.draw, self.cfg_scale)
        eager = len(turn.packed.ids) > MOST_TOKENS or any(hook is not None for hook in hooks)
        if self.graphs is None or not self._replays or eager:
            return device_part(turn, store)
        where = () if store is None else store.addresses
        outcome, memory, leads = self.graphs.run(lambda held: device_part(held, store), turn, where)
        return outcome, memory, leads

    @property
    def _stores_winners(self) -> bool:
        """Whether it matters which branch's K/V are stored of what lies before the window."""
        return "branches" in self.sampler.traits and self.cache.exactness == "approximate"

    def _reaching(self, view: RowView, plan: RowPlan, stop: int) -> RowPlan:
        """The plan of a version of the row whose window ends at `stop`."""
        if stop == view.window.stop:
            return plan
        return self.cache.plan(replace(view, window=replace(view.window, stop=stop)))

    def _scope(
        self,
        rows: Sequence[Row],
        views: Sequence[RowView],
        plans: Sequence[RowPlan],
        ends: Sequence[tuple[int, ...]],
        base: tuple[int, ...],
        width: int,
        query: Query | None,
    ) -> Scope:
        """Windows and branches of this forward; an adaptive query never branches on a refresh."""
        most = 1 if query is None else query.branches
        stops, versions = [], []
        for row, view, plan, own in zip(rows, views, plans, ends, strict=True):
            count = most
            if query is None or query.adaptive:
                count = min(row.branches if plan.kind in ("full", "window") else 1, most)
            own = (*own, *[row.window.stop] * count)[:count]
            stops.append(own)
            versions.append(tuple(self._reaching(view, plan, stop) for stop in own))
        made = Scope(base, width, tuple(versions), tuple(stops), most)
        if query is None:
            return made
        replaced = query.tokens is not None or query.mix_ids is not None
        return replace(made, replaced=replaced, adaptive=query.adaptive)

    def _horizon(self, row: Row, view: RowView) -> int:
        """Turns that can be foreseen: until the next refresh, or until the row must finish."""
        if not self.schedule.keeps_windows:
            return 1
        turns = self.cache.horizon(view)
        left = row.turn_limit - row.turn
        return left if turns is None else min(turns, left)

    def _memory(self, state: _Flight, canvas: Canvas) -> Any:
        """Sampler state for this turn: kept rows first, fresh ones begun anew."""
        per_block = self.sampler.scope == "block"
        fresh = [r.place < 0 or (per_block and r.fresh) for r in state.rows]
        places = [max(r.place, 0) for r in state.rows]
        moved = places != list(range(len(places))) or len(places) != state.count
        for place, row in enumerate(state.rows):
            row.place, row.fresh = place, False
        memory, state.count = state.memory, len(state.rows)
        device = canvas.tokens.device
        if all(fresh):
            return self.sampler.init(canvas)
        if moved:
            memory = select_rows(memory, _sent(places, device))
        if any(fresh):
            begun = self.sampler.init(canvas)
            memory = where_rows(_sent(fresh, device), begun, memory)
        return memory

    def _hooks(self, views: Sequence[RowView], plans: Sequence[RowPlan]) -> list[LayerHook | None]:
        """What the policy does inside the layers, for each row; nothing with most policies."""
        if type(self.cache).hook is CachePolicy.hook:
            return [None] * len(views)
        return [self.cache.hook(view, plan) for view, plan in zip(views, plans, strict=True)]

    def _shadows(
        self,
        packed: Packed,
        read: np.ndarray,
        rows: Sequence[Row],
        plans: Sequence[RowPlan],
        readable: Sequence[np.ndarray],
        scope: Scope,
    ) -> tuple[Packed, Tensor]:
        """The forward with a shadow of each scored position, for samplers that declare it."""
        if scope.branches > 1 or self.lanes > 1:
            raise CapabilityError("shadows can't be read with branches or guidance")
        _check_computed(packed, "shadows")
        for row, places in zip(rows, readable, strict=True):
            row.computed += len(places)
        info = self.model.info
        return with_shadows(
            packed, read, rows, plans, readable, shift=info.shift, mask_id=info.mask_id
        )

    def _watch(
        self, rows: Sequence[Row], packed: Packed, read: np.ndarray, scope: Scope
    ) -> Watch | None:
        """What to record of the attention, for samplers that declare it."""
        if "attention" not in self.sampler.needs:
            return None
        if scope.branches > 1 or self.lanes > 1:
            raise CapabilityError("attention can't be read with branches or guidance")
        _check_computed(packed, "attention")
        low, high = self.sampler.attention_layers
        depth = self.model.info.layers
        first = min(int(low * depth), depth - 1)
        layers = range(first, max(first + 1, round(high * depth)))
        width = max(row.length for row in rows)
        most = scope.width if self._replays else None
        parts = watched_parts(packed, read, most)
        return Watch(frozenset(layers), parts, len(packed.scatter), width)

    def _apply(
        self,
        state: _Flight,
        readable: Sequence[np.ndarray],
        scope: Scope,
        outcome: Outcome,
    ) -> None:
        """Carry the outcome, now on the host, over to the rows."""
        state.done = [flag > 0 for flag in outcome.done.tolist()]
        drafts = "renoises" in self.sampler.traits
        for i, row in enumerate(state.rows):
            record = outcome.of_row(i)
            row.charge(scope.plans[i], self.lanes)
            row.branches = max(int(outcome.branches[i]), 1)
            row.ahead = tuple(place for place in outcome.ahead[i].tolist() if place >= 0)
            if outcome.winner[i] > 0:
                row.window = replace(row.window, stop=scope.stops[i][outcome.winner[i]])
            row.keep_scores(readable[i], scope.base[i], record.sure)
            if scope.adaptive and outcome.steps[i] >= 0:
                row.speculate(len(scope.plans[i]) - 1, record.steps)
            row.apply(scope.base[i], record)
            row.draft = (scope.base[i], record.tokens) if drafts else None
            stop = int(outcome.stop[i])
            if stop >= 0 and stop != row.window.stop:
                row.window = replace(row.window, stop=stop)
            stay, forget = int(outcome.stay[i]) > 0, self.sampler.scope == "block"
            ends = self.model.info.end_ids
            row.advance(self.schedule, record.steps, stay=stay, forget=forget, end_ids=ends)

    def _settle_rows(self, state: _Flight) -> Iterator[tuple[Row, Generation | None]]:
        """Report every row; finished ones give back their place first."""
        ends, revokes = self.model.info.end_ids, "revokes" in self.sampler.traits
        flying, state.rows = state.rows, []
        reports: list[tuple[Row, Generation | None]] = []
        for row, done in zip(flying, state.done, strict=True):
            if row.filled or (done and ends) or row.ended(ends, revokes):
                state.release(row)
                reports.append((row, row.close(self.model.info)))
            else:
                state.rows.append(row)
                reports.append((row, None))
        yield from reports


def check_needs(sampler: Sampler, info: ModelInfo) -> None:
    """Raise `CapabilityError` for a sampler that asks for what engine or model do not offer."""
    unmet = sampler.needs - OFFERED
    if unmet:
        raise CapabilityError(
            f"the sampler needs {', '.join(sorted(unmet))}, which this engine does not offer "
            f"(offered: {', '.join(sorted(OFFERED))})"
        )
    if not info.has_mask and "renoises" not in sampler.traits:
        raise CapabilityError(
            f"{info.family} has no mask token: it denoises random ones, which only sampler renoise "
            "does"
        )
    inside = sampler.needs & {"attention", "shadow"}
    if inside and info.whole_rows:
        raise CapabilityError(
            f"the sampler needs {', '.join(sorted(inside))}, which {info.family} does not offer: "
            f"{info.whole_rows}"
        )


def _check_computed(packed: Packed, what: str) -> None:
    if packed.kept:
        raise CapabilityError(
            f"{what} can't be read where a cache keeps the output before the window (lead kept): "
            "take lead computed"
        )


def check_whole(model: DiffusionLM, cache: CachePolicy, sampler: Sampler, draw: Draw) -> None:
    """Raise `CapabilityError` for what a model in parts, by layers or by heads, does not allow."""
    parted = share_of(model) is not None
    if type(cache).hook is not CachePolicy.hook and (parted or len(set(layer_devices(model))) > 1):
        where = "several processes" if parted else "several devices"
        raise CapabilityError(
            f"cache {CACHES.name_of(cache)} looks into the layers, which lie on {where}: choose "
            "another cache or load the model on one device"
        )
    if parted and ("logits" in sampler.needs or draw.filters):
        what = "top_k or top_p" if draw.filters else "this sampler"
        raise CapabilityError(
            f"{what} reads whole rows of logits, which tensor_parallel never brings together: "
            "leave one of the two out"
        )


class _Flight:
    """What one call of `run` holds between turns."""

    def __init__(self, residents: Residents | None, width: int) -> None:
        self.residents = residents
        self.width = width
        self.rows: list[Row] = []
        self.memory: Any = ()
        self.count = 0
        self.done: list[bool] = []

    @property
    def store(self) -> KVStore | None:
        return None if self.residents is None else self.residents.store

    def admit(self, row: Row) -> bool:
        """Take the row in; False while the store has no room for it."""
        if self.residents is not None and not self.residents.admit(row):
            return False
        row.started_s = time.perf_counter()
        self.rows.append(row)
        return True

    def release(self, row: Row) -> None:
        if self.residents is not None:
            self.residents.release(row)


def _bans_end(row: Row, positions: np.ndarray) -> np.ndarray:
    start_only = row.request.eos == "ban_start"
    early = positions < row.span.start + row.request.eos_ban_length
    return early if start_only else np.full(len(positions), row.request.eos == "banned")


def _demotes_end(row: Row, positions: np.ndarray) -> np.ndarray:
    return np.full(len(positions), row.request.eos == "no_confidence")


def _end_mask(
    rows: Sequence[Row],
    readable: Sequence[np.ndarray],
    scope: Scope,
    rule: Callable[[Row, np.ndarray], np.ndarray],
    scored: int,
    device: torch.device,
) -> Tensor | None:
    """`rule` for every one of the `scored` positions, `(n,)`; None where it holds nowhere."""
    if all(row.request.eos == "none" for row in rows):
        return None
    parts = [
        rule(row, scope.wanted(i, branch, readable[i]))
        for i, row in enumerate(rows)
        for branch in range(len(scope.plans[i]))
    ]
    mask = np.zeros(scored, dtype=bool)
    holds = np.concatenate(parts)
    mask[: len(holds)] = holds
    return _sent(mask, device) if mask.any() else None


def _sent(values: Any, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for what it still computes."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def _ends(row: Row, plan: RowPlan) -> tuple[int, ...]:
    """Where the windows of a row's versions end, its own first; a refresh has no branches."""
    branches = plan.kind in ("full", "window")
    return row.stops if row.stops and branches else (row.window.stop,)


def _check_plans(
    rows: Sequence[Row],
    plans: Sequence[RowPlan],
    readable: Sequence[np.ndarray],
    shift: int,
    stored: bool,
) -> None:
    """Debug: queries are sorted and inside the row, and see only K/V that were stored."""
    for row, plan, positions in zip(rows, plans, readable, strict=True):
        query = plan.query
        assert len(query) and (np.diff(query) > 0).all(), "query positions must ascend"
        assert query[0] >= 0 and query[-1] < row.length, "query outside the row"
        read = np.maximum(positions - shift, 0)
        read = read[read >= query[0]] if plan.lead == "kept" else read
        assert np.isin(read, query).all(), "scored without a logit row"
        whole = plan.kind in ("full", "refresh")
        assert not whole or len(query) == row.length, "a full forward computes all"
        if not whole:
            assert stored, "a window forward needs stored K/V"
            for slot in row.slots:
                seen = np.arange(row.length) < (row.length if plan.stop is None else plan.stop)
                seen[query] = False
                assert (slot.turns[seen] >= 0).all(), "a visible position was never stored"
