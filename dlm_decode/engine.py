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

from dlm_decode.attention import PackedAttention, Watch
from dlm_decode.caches import CachePolicy, LayerHook, RowPlan, RowView, check_fit
from dlm_decode.canvas import build_canvas, window_base, window_width
from dlm_decode.errors import CapabilityError
from dlm_decode.head import HeadPlan, Scored, statistics
from dlm_decode.kv import KVStore
from dlm_decode.models import DiffusionLM, ModelInfo, SelfConditioned
from dlm_decode.outcome import Settled, permitted, settle
from dlm_decode.packing import Packed, Scope, pack, record_writes, watched_parts
from dlm_decode.rows import Row, TurnRecord
from dlm_decode.samplers import Sampler
from dlm_decode.schedules import Schedule
from dlm_decode.shadows import with_shadows
from dlm_decode.storage import Residents, Storage
from dlm_decode.tree import select_rows, where_rows
from dlm_decode.types import Canvas, Decision, Draw, Generation, Output, Query

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
    `storage` says how K/V are kept. `debug` checks each plan and decision against the invariants,
    at the cost of syncs.
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

    def __post_init__(self) -> None:
        check_needs(self.sampler, self.model.info)
        if self.lanes > 1 and not self.model.info.has_mask:
            raise CapabilityError(
                f"guidance (cfg_scale) masks the prompt, and {self.model.info.family} has no mask"
            )
        check_fit(self.cache, self.model.info)
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

    def _residents(self, rows: Sequence[Row]) -> Residents | None:
        """A store for what can be in flight at once, or None."""
        if not self.cache.stores:
            return None
        return Residents.open(
            rows, self.model, self.storage, lanes=self.lanes, batch=self.max_batch_size
        )

    def _admit(self, state: _Flight, waiting: deque[Row]) -> None:
        """Let rows in, in their order, while there are places in the batch and in the store."""
        while waiting and len(state.rows) < self.max_batch_size and state.admit(waiting[0]):
            waiting.popleft()

    def _turn(self, state: _Flight) -> None:
        """One forward for all rows in flight, and what follows from it."""
        rows, info = state.rows, self.model.info
        views = [row.view(info.shift) for row in rows]
        plans = [self.cache.plan(view) for view in views]
        base = window_base(rows, self.sampler)
        canvas, readable = build_canvas(
            rows,
            plans,
            base,
            state.width,
            self.model,
            wide=self.sampler.scope == "canvas",
            decided="decided" in self.sampler.needs,
            window="window" in self.sampler.needs,
            draw=self.draw,
            horizons=[self._horizon(row, view) for row, view in zip(rows, views, strict=True)],
        )
        memory = self._memory(state, canvas)
        query = self.sampler.query(canvas, memory)
        scope = _scope(rows, plans, base, state.width, query)
        if self.debug:
            _check_plans(rows, plans, readable, info.shift, bool(rows[0].slots))
        hooks = self._hooks(views, plans)
        output = self._forward(state, plans, hooks, readable, canvas, query, scope)
        focus = self.schedule.focus(canvas, output)
        if focus is not None:
            canvas = _focused(canvas, focus)
        decision, state.memory = self.sampler.decide(canvas, output, memory)
        finishing = _sent([r.finishing for r in rows], canvas.tokens.device)
        first = output if scope.branches == 1 else output.branch(0)
        if "window" in self.sampler.needs and self.sampler.scope == "block":
            first = permitted(canvas, first)
        settled = settle(canvas, first, decision, finishing)
        outcome = _outcome(canvas, settled, first, decision, focus).cpu()
        received = _Outcome.received(outcome, len(rows), state.width)
        self._apply(state, plans, readable, scope, received)

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

    def _forward(
        self,
        state: _Flight,
        plans: Sequence[RowPlan],
        hooks: Sequence[LayerHook | None],
        readable: Sequence[np.ndarray],
        canvas: Canvas,
        query: Query | None,
        scope: Scope,
    ) -> Output:
        info = self.model.info
        packed = pack(
            state.rows,
            plans,
            readable,
            scope,
            hooks=hooks,
            lanes=self.lanes,
            shift=info.shift,
            mask_id=info.mask_id,
            device=self.model.device,
        )
        shadows = None
        if "shadow" in self.sampler.needs:
            packed, shadows = self._shadows(packed, state.rows, plans, readable, scope)
        attend = PackedAttention(
            packed.groups,
            state.store,
            packed.write_from,
            packed.write_to,
            write_all=packed.write_all,
            watch=self._watch(state.rows, packed, scope),
            windows=packed.windows,
        )
        ids, embeds = self._inputs(packed, query)
        hidden = self._hidden(ids, embeds, packed, attend, query)
        record_writes(state.rows, plans)
        if state.residents is not None:
            state.residents.after_forward(state.rows)
        for row, hook in zip(state.rows, hooks, strict=True):
            row.memory = row.memory if hook is None else hook.memory()
        scored = _scored(state.rows, readable, packed, canvas, query, scope)
        stats = self._statistics(hidden, packed, scored)
        if shadows is not None:
            stats |= self._shadow_statistics(hidden[shadows], scored)
        if attend.watched is not None:
            stats["attention"] = attend.watched
        return _laid_out(stats, packed.scatter, canvas.tokens.shape[0], scope)

    def _hooks(self, views: Sequence[RowView], plans: Sequence[RowPlan]) -> list[LayerHook | None]:
        """What the policy does inside the layers, for each row; nothing with most policies."""
        if type(self.cache).hook is CachePolicy.hook:
            return [None] * len(views)
        return [self.cache.hook(view, plan) for view, plan in zip(views, plans, strict=True)]

    def _hidden(
        self,
        ids: Tensor,
        embeds: Tensor | None,
        packed: Packed,
        attend: PackedAttention,
        query: Query | None,
    ) -> Tensor:
        """The forward itself, with what the model believed before where it wants to know."""
        positions, model = packed.positions, self.model
        beliefs = None if query is None else query.beliefs
        places, target = packed.window_from, packed.window_to
        if not model.info.self_conditioned or beliefs is None or places is None or target is None:
            return model.forward(ids, positions, attend, embeds=embeds)
        told = target, beliefs.flatten(0, -2)[places]
        hosted = cast("SelfConditioned", model)
        return hosted.forward(ids, positions, attend, embeds=embeds, beliefs=told)

    def _inputs(self, packed: Packed, query: Query | None) -> tuple[Tensor, Tensor | None]:
        """Packed ids, with the query's own window contents put in, and embeddings if it has any."""
        ids, places, target = packed.ids, packed.window_from, packed.window_to
        if query is None or places is None or target is None:
            return ids, None
        if query.tokens is not None:
            ids = ids.index_copy(0, target, query.tokens.reshape(-1)[places])
        if query.mix_ids is None or query.mix_weights is None:
            return ids, None
        hard = self.model.embedding(ids)
        weights = query.mix_weights.flatten(0, -2)[places].to(hard.dtype)
        parts = self.model.embedding(query.mix_ids.flatten(0, -2)[places])
        mixed = torch.einsum("njd,nj->nd", parts, weights)
        mixed = torch.where((weights > 0).any(-1, keepdim=True), mixed, hard[target])
        return ids, hard.index_copy(0, target, mixed)

    def _shadows(
        self,
        packed: Packed,
        rows: Sequence[Row],
        plans: Sequence[RowPlan],
        readable: Sequence[np.ndarray],
        scope: Scope,
    ) -> tuple[Packed, Tensor]:
        """The forward with a shadow of each scored position, for samplers that declare it."""
        if scope.branches > 1 or self.lanes > 1:
            raise CapabilityError("shadows can't be read with branches or guidance")
        for row, places in zip(rows, readable, strict=True):
            row.computed += len(places)
        info = self.model.info
        return with_shadows(packed, rows, plans, readable, shift=info.shift, mask_id=info.mask_id)

    def _shadow_statistics(self, hidden: Tensor, scored: Scored) -> dict[str, Tensor]:
        """What the shadows predict, under the names of `Output` behind "shadow_"."""
        info = self.model.info
        plan = HeadPlan(info.vocab_size, frozenset(), Draw(), info.mask_id, info.end_ids)
        stats = statistics(self._tile([hidden]), replace(scored, demote_end=None), plan)
        return {f"shadow_{name}": value for name, value in stats.items()}

    def _watch(self, rows: Sequence[Row], packed: Packed, scope: Scope) -> Watch | None:
        """What to record of the attention, for samplers that declare it."""
        if "attention" not in self.sampler.needs:
            return None
        if scope.branches > 1 or self.lanes > 1:
            raise CapabilityError("attention can't be read with branches or guidance")
        low, high = self.sampler.attention_layers
        depth = self.model.info.layers
        first = min(int(low * depth), depth - 1)
        layers = range(first, max(first + 1, round(high * depth)))
        width = max(row.length for row in rows)
        return Watch(frozenset(layers), watched_parts(packed), len(packed.read_host), width)

    def _statistics(self, hidden: Tensor, packed: Packed, scored: Scored) -> dict[str, Tensor]:
        """Statistics of the scored positions, each `(n, ...)`."""
        info, needs = self.model.info, self.sampler.needs
        lanes = [hidden.index_select(0, read) for read in packed.read]
        plan = HeadPlan(info.vocab_size, needs, self.draw, info.mask_id, info.end_ids)
        stats = statistics(self._tile(lanes), scored, plan)
        if "hidden" in needs:
            stats["hidden"] = lanes[0]
        stats["valid"] = torch.ones_like(packed.scatter, dtype=torch.bool)
        return stats

    def _tile(self, lanes: Sequence[Tensor]) -> Callable[[int, int], Tensor]:
        """The LM head on one vocabulary tile, guidance applied."""
        model, scale = self.model, self.cfg_scale
        if len(lanes) == 1:
            return lambda start, stop: model.logits(lanes[0], start, stop)

        def guided(start: int, stop: int) -> Tensor:
            conditional, free = (model.logits(lane, start, stop) for lane in lanes)
            return free + (scale + 1) * (conditional - free)

        return guided

    def _apply(
        self,
        state: _Flight,
        plans: Sequence[RowPlan],
        readable: Sequence[np.ndarray],
        scope: Scope,
        outcome: _Outcome,
    ) -> None:
        """Carry the outcome, now on the host, over to the rows."""
        state.done = [flag > 0 for flag in outcome.done.tolist()]
        drafts = "renoises" in self.sampler.traits
        for i, row in enumerate(state.rows):
            record = outcome.of_row(i)
            row.charge(plans[i], self.lanes * scope.counts[i])
            row.branches = max(int(outcome.branches[i]), 1)
            row.keep_scores(readable[i], scope.base[i], record.sure)
            if scope.adaptive and outcome.steps[i] >= 0:
                row.speculate(scope.counts[i] - 1, record.steps)
            row.apply(scope.base[i], record)
            row.draft = (scope.base[i], record.tokens) if drafts else None
            stop = int(outcome.stop[i])
            if stop >= 0 and stop != row.window.stop:
                row.window = replace(row.window, stop=stop)
            row.advance(self.schedule, record.steps, stay=int(outcome.stay[i]) > 0)

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


def _scored(
    rows: Sequence[Row],
    readable: Sequence[np.ndarray],
    packed: Packed,
    canvas: Canvas,
    query: Query | None,
    scope: Scope,
) -> Scored:
    """Noise keys and end-of-text policies of the scored positions."""
    flat, width, branches = packed.scatter, scope.width, scope.branches
    row = flat // (width * branches)
    commits = canvas.commits[row]
    if query is not None and query.tokens is not None:
        filled = (query.tokens != canvas.tokens[:, None]) & (query.tokens != canvas.mask_id)
        filled = filled & canvas.editable[:, None]
        commits = commits + filled.sum(-1).reshape(-1)[flat // width]
    place = flat % width
    return Scored(
        canvas.keys[row],
        canvas.positions[row, place],
        commits,
        _end_mask(rows, readable, scope.counts, _bans_end, flat.device),
        _end_mask(rows, readable, scope.counts, _demotes_end, flat.device),
        None if query is None or query.probe is None else query.probe[row, place],
    )


def _bans_end(row: Row, positions: np.ndarray) -> np.ndarray:
    start_only = row.request.eos == "ban_start"
    early = positions < row.span.start + row.request.eos_ban_length
    return early if start_only else np.full(len(positions), row.request.eos == "banned")


def _demotes_end(row: Row, positions: np.ndarray) -> np.ndarray:
    return np.full(len(positions), row.request.eos == "no_confidence")


def _end_mask(
    rows: Sequence[Row],
    readable: Sequence[np.ndarray],
    counts: Sequence[int],
    rule: Callable[[Row, np.ndarray], np.ndarray],
    device: torch.device,
) -> Tensor | None:
    """`rule` for every scored position, `(n,)`; None where it holds nowhere."""
    if all(row.request.eos == "none" for row in rows):
        return None
    parts = [
        np.tile(rule(row, positions), count)
        for row, positions, count in zip(rows, readable, counts, strict=True)
    ]
    mask = np.concatenate(parts)
    return _sent(mask, device) if mask.any() else None


def _sent(values: Any, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for what it still computes."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def _scope(
    rows: Sequence[Row],
    plans: Sequence[RowPlan],
    base: tuple[int, ...],
    width: int,
    query: Query | None,
) -> Scope:
    """Windows and branches of this forward; an adaptive query never branches on a refresh."""
    if query is None:
        return Scope(base, width, (1,) * len(rows))
    most = query.branches
    counts = tuple(
        min(row.branches if plan.kind in ("full", "window") else 1, most)
        if query.adaptive
        else most
        for row, plan in zip(rows, plans, strict=True)
    )
    replaced = query.tokens is not None or query.mix_ids is not None
    return Scope(base, width, counts, most, replaced, query.adaptive)


def _laid_out(stats: dict[str, Tensor], places: Tensor, rows: int, scope: Scope) -> Output:
    """Statistics `(n, ...)` laid out as `(B, W, ...)`, or `(B, R, W, ...)` with branches."""
    shape = (rows, scope.width) if scope.branches == 1 else (rows, scope.branches, scope.width)
    total = rows * scope.branches * scope.width
    return Output({name: _spread(value, places, total, shape) for name, value in stats.items()})


def _spread(values: Tensor, places: Tensor, total: int, shape: tuple[int, ...]) -> Tensor:
    """`values (n, ...)` put at `places (n,)` of a zero tensor of `total` rows, then shaped."""
    spread = values.new_zeros((total, *values.shape[1:]))
    return spread.index_copy_(0, places, values).reshape(*shape, *values.shape[1:])


def _focused(canvas: Canvas, stop: Tensor) -> Canvas:
    eligible = canvas.eligible & (canvas.positions < stop[:, None])
    return replace(canvas, eligible=eligible, stop=stop)


def _outcome(
    canvas: Canvas, settled: Settled, output: Output, decision: Decision, focus: Tensor | None
) -> Tensor:
    """All that a turn decided, as one flat int64 tensor for a single transfer; see `_Outcome`."""
    scores = output.p1 if decision.scores is None else decision.scores
    sure = scores.float().view(torch.int32).to(torch.int64)
    nothing = torch.zeros_like(settled.codes)
    order = nothing if decision.order is None else decision.order
    unset = torch.full_like(canvas.commits, -1)
    per_row = [
        unset if value is None else value.to(torch.int64)
        for value in (
            decision.done,
            decision.stay,
            focus,
            decision.steps,
            decision.commits,
            decision.branches,
        )
    ]
    planes = (settled.codes, settled.tokens, sure, order)
    return torch.cat([*(plane.reshape(-1) for plane in planes), *per_row])


@dataclass(frozen=True)
class _Outcome:
    """`_outcome` on the host: arrays `(B, W)`, and per row `(B,)`, where -1 means not given."""

    codes: np.ndarray
    tokens: np.ndarray
    sure: np.ndarray
    order: np.ndarray
    done: np.ndarray
    stay: np.ndarray
    stop: np.ndarray
    steps: np.ndarray
    commits: np.ndarray
    branches: np.ndarray

    @classmethod
    def received(cls, flat: Tensor, rows: int, width: int) -> _Outcome:
        """The one host sync of a turn is the transfer that made `flat`."""
        size = 4 * rows * width
        planes = flat[:size].reshape(4, rows, width)
        sure = planes[2].to(torch.int32).view(torch.float32).numpy()
        codes, tokens, _, order = planes.numpy()
        return cls(codes, tokens, sure, order, *flat[size:].reshape(6, rows).numpy())

    def of_row(self, i: int) -> TurnRecord:
        commits = int(self.commits[i])
        return TurnRecord(
            self.codes[i],
            self.tokens[i],
            self.sure[i],
            self.order[i],
            max(int(self.steps[i]), 1),
            None if commits < 0 else commits,
        )


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
        assert np.isin(np.maximum(positions - shift, 0), query).all(), "scored without a logit row"
        whole = plan.kind in ("full", "refresh")
        assert not whole or len(query) == row.length, "a full forward computes all"
        if not whole:
            assert stored, "a window forward needs stored K/V"
            for slot in row.slots:
                seen = np.arange(row.length) < (row.length if plan.stop is None else plan.stop)
                seen[query] = False
                assert (slot.turns[seen] >= 0).all(), "a visible position was never stored"
