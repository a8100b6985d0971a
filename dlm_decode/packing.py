"""One forward of many rows: which tokens go in, which keys they see, which outputs are read.

Host side and NumPy only, from the rows' plans; the result is sent to the device in a few copies.
A row's copies (guidance lanes times branches) are entries of their own. Entries of equal shape lie
side by side, so that attention needs no mask and no padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dlm_decode.attention import Choice, Group, Watched
from dlm_decode.caches import LayerHook, RowPlan
from dlm_decode.kv import PAGE_LENGTH, Slot
from dlm_decode.ragged import Ragged, ragged
from dlm_decode.rows import Row

NEAR = 1.25
"""Rows are attended in one call if their keys then number at most this many times their own."""


@dataclass(frozen=True)
class Entry:
    """One copy of a row in a forward: `query` positions of `tokens (N,)`, in lane and branch.

    Its row has `branches` copies in a lane, `siblings` of them with as many queries as this one.
    """

    row: int
    lane: int
    branch: int
    plan: RowPlan
    tokens: np.ndarray
    editable: np.ndarray
    slot: Slot | None
    branches: int
    siblings: int
    blocks: np.ndarray | None = None
    hook: LayerHook | None = None

    @property
    def stores(self) -> bool:
        return self.plan.kind != "full" and self.branch == 0

    @property
    def shape(self) -> tuple[str, int, int, int]:
        """Entries of equal shape are attended in one call: kind, queries, stored keys, and for a
        row with a hook which entry it is. Of windows over consecutive slots the room counts."""
        query, length = len(self.plan.query), self.reach
        alone = (
            -1 if self.hook is None else (self.row * 2 + self.lane) * self.branches + self.branch
        )
        if self.plan.kind in ("full", "refresh"):
            return "own", query, 0, alone
        if self.branches > 1:
            return "branch", query, length - query, alone
        if self.hook is not None or self.slot is None or self.slot.base is None:
            return "window", query, length, alone
        return "window", query, -self.slot.room, alone

    @property
    def keys(self) -> int:
        """How many keys each query sees or could see."""
        return len(self.plan.query) if self.plan.kind in ("full", "refresh") else self.reach

    @property
    def order(self) -> tuple[tuple[str, int, int, int], int]:
        """Where the entry stands in a forward: by its shape, then by its place in the store."""
        base = None if self.slot is None else self.slot.base
        return self.shape, 0 if base is None or self.branches > 1 else base

    @property
    def reach(self) -> int:
        """First position after all those seen."""
        return len(self.tokens) if self.plan.stop is None else self.plan.stop

    def outside(self) -> np.ndarray:
        """Stored positions seen that the entry does not compute itself."""
        return np.delete(np.arange(self.reach, dtype=np.int64), self.plan.query)

    def mask(self) -> np.ndarray | None:
        """Which of its keys each query sees, `(query, keys)`; None if all of them."""
        if self.blocks is None:
            return None
        kind, query = self.shape[0], self.plan.query
        keys = {"own": lambda: query, "window": lambda: np.arange(self.reach)}.get(
            kind, lambda: np.concatenate([self.outside(), query])
        )()
        seen: np.ndarray = self.blocks[keys][None, :] <= self.blocks[query][:, None]
        return None if seen.all() else seen


@dataclass(frozen=True)
class Scope:
    """Where each row's window begins (`base`, B entries), how wide windows are, and branches.

    `plans` and `stops` (B entries each): the plan of each version of a row, itself the first, and
    where its window ends; so many of the `branches` the row uses. `replaced`: the sampler gives
    its own window contents. `adaptive`: the branches are drafts of the row's own future.
    """

    base: tuple[int, ...]
    width: int
    plans: tuple[tuple[RowPlan, ...], ...]
    stops: tuple[tuple[int, ...], ...]
    branches: int = 1
    replaced: bool = False
    adaptive: bool = False

    def wanted(self, row: int, branch: int, scored: np.ndarray) -> np.ndarray:
        """Those of a row's `scored` positions that lie in the branch's own window."""
        stops = self.stops[row]
        return scored if len(set(stops)) == 1 else scored[scored < stops[branch]]


@dataclass(frozen=True)
class Leads:
    """Outputs before the window that are kept: of `rows`, n of them, also as `row (n,)`, at packed
    `tokens (n, lanes, R)`."""

    rows: tuple[int, ...]
    row: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Packed:
    """Everything about one forward, as device tensors (T packed tokens, n scored positions).

    `ids`, `positions` `(T,)`; `read` per lane the packed rows `(n,)` whose hidden state predicts
    the scored positions; `scatter (n,)` their places in a flat `(B, R, W)`;
    `window_from`/`window_to` put a query's tokens (flat `(B, R, W)`) into the packed ids. `windows`
    are where those of the entries begin and end, for models that ask. Padded scored positions read
    the first packed row and are scattered to the place behind the last. Outputs kept from earlier
    turns are read behind the T tokens, those of each row of `kept` in its lanes; `leads` are to be
    kept now. `choice`, where a row has branches: what lies before its window.
    """

    ids: Tensor
    positions: Tensor
    groups: tuple[Group, ...]
    write_from: Tensor | None
    write_to: Tensor | None
    write_all: bool
    read: tuple[Tensor, ...]
    scatter: Tensor
    window_from: Tensor | None
    window_to: Tensor | None
    windows: tuple[tuple[int, int], ...] | None
    ragged: tuple[Ragged, ...] = ()
    kept: tuple[int, ...] = ()
    leads: Leads | None = None
    choice: Choice | None = None


def pack(
    rows: Sequence[Row],
    scored: Sequence[np.ndarray],
    scope: Scope,
    *,
    lanes: int,
    shift: int,
    mask_id: int,
    device: torch.device,
    hooks: Sequence[LayerHook | None] | None = None,
    padded: bool = False,
    windows: bool = False,
    together: bool = False,
    places: int = 0,
    winners: bool = False,
) -> tuple[Packed, np.ndarray]:
    """Pack the plans of `scope`; `scored` are the absolute positions of each row to read out.

    Also the first of `Packed.read` on the host, without padding. `padded` keeps shapes to few: that
    of scored positions to two for all turns of the same forward, see `_bucket`, and that of masked
    keys to whole pages. `together` takes groups of several shapes into one call, with stored keys
    if the pool's `places` are given. With `winners` a branch may be stored in place of its row.
    """
    hooks = [None] * len(rows) if hooks is None else hooks
    made = _entries(rows, scope.plans, hooks, lanes, mask_id)
    entries = sorted(made, key=lambda e: e.order)
    starts = np.cumsum([0, *(len(e.plan.query) for e in entries)])
    send = _sender(device)
    ids = np.concatenate([e.tokens[e.plan.query] for e in entries])
    positions = np.concatenate([e.plan.query for e in entries])
    write_from, write_to = _writes(entries, starts)
    kept = tuple(i for i, versions in enumerate(scope.plans) if versions[0].lead == "kept")
    read, scatter = _reads(entries, starts, scored, scope, lanes, shift, kept)
    window_from, window_to = _branch_windows(entries, starts, scope)
    size = _bucket(len(scatter), len(ids) // lanes, scope) if padded else len(scatter)
    nowhere = len(rows) * scope.branches * scope.width
    groups = tuple(_groups(entries, starts, PAGE_LENGTH if padded else 1, send))
    packed = Packed(
        send(ids),
        send(positions),
        groups,
        send(write_from) if len(write_from) else None,
        send(write_to) if len(write_to) else None,
        len(write_from) == len(ids),
        tuple(send(_filled(r, size, 0)) for r in read),
        send(_filled(scatter, size, nowhere)),
        send(window_from) if scope.replaced else None,
        send(window_to) if scope.replaced else None,
        _windows(entries, scope) if windows else None,
        tuple(_ragged(entries, starts, groups, places, send)) if together else (),
        kept,
        _leads(rows, entries, starts, scope, lanes, send),
        _choice(rows, entries, starts, scope, send) if winners else None,
    )
    return packed, read[0]


def _windows(entries: Sequence[Entry], scope: Scope) -> tuple[tuple[int, int], ...]:
    """Where the windows of the entries begin and end."""
    return tuple((scope.base[e.row], scope.stops[e.row][e.branch]) for e in entries)


def _bucket(count: int, tokens: int, scope: Scope) -> int:
    """All positions that `tokens` tokens can predict, or half of them: at least `count`.

    So a block's turns, which have ever fewer masks, have two numbers of scored positions.
    """
    most = min(sum(map(len, scope.plans)) * scope.width, tokens)
    return next((size for size in (most // 2, most) if size >= count), count)


def _filled(values: np.ndarray, size: int, value: int) -> np.ndarray:
    """`values` `(n,)` with `value` behind them, `size` in all."""
    return np.concatenate([values, np.full(size - len(values), value, dtype=np.int64)])


def watched_parts(
    packed: Packed, read: np.ndarray, width: int | None
) -> tuple[Watched | None, ...]:
    """For each group, where the packed rows `read (n,)` on the host lie in it (None: it has none).

    `width`, where given, is what each row's watched tokens are filled up to.
    """
    send, nobody = _sender(packed.ids.device), len(packed.scatter)
    return tuple(_watched(group, read, width, nobody, send) for group in packed.groups)


def _watched(
    group: Group,
    read: np.ndarray,
    width: int | None,
    nobody: int,
    send: Callable[[np.ndarray], Tensor],
) -> Watched | None:
    target = np.flatnonzero((read >= group.start) & (read < group.stop))
    if not len(target):
        return None
    row = (read[target] - group.start) // group.query
    order = np.argsort(row, kind="stable")
    row, target = row[order], target[order]
    counts = np.bincount(row, minlength=group.rows)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    size = max(int(counts.max()), 0 if width is None else min(width, group.query))
    first = group.start + group.query * np.arange(group.rows)
    queries = np.repeat(first[:, None], size, axis=1)
    queries[row, place] = read[target]
    targets = np.full((group.rows, size), nobody, dtype=np.int64)
    targets[row, place] = target
    return Watched(send(queries), send(targets.reshape(-1)))


def record_writes(rows: Sequence[Row], plans: Sequence[RowPlan]) -> None:
    """Note in each slot which ids its K/V now come from, and in which turn."""
    for row, plan in zip(rows, plans, strict=True):
        for slot in row.slots if plan.kind != "full" else ():
            slot.tokens[plan.query] = row.tokens[plan.query]
            slot.turns[plan.query] = row.turn


def _sender(device: torch.device) -> Callable[[np.ndarray], Tensor]:
    def send(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return send


def _entries(
    rows: Sequence[Row],
    plans: Sequence[Sequence[RowPlan]],
    hooks: Sequence[LayerHook | None],
    lanes: int,
    mask_id: int,
) -> Iterator[Entry]:
    for index, (row, versions) in enumerate(zip(rows, plans, strict=True)):
        lengths = Counter(len(plan.query) for plan in versions)
        for lane in range(lanes):
            tokens = row.tokens if lane == 0 else np.where(row.editable, row.tokens, mask_id)
            slot = row.slots[lane] if row.slots else None
            for branch, plan in enumerate(versions):
                yield Entry(
                    index,
                    lane,
                    branch,
                    plan,
                    tokens,
                    row.editable,
                    slot,
                    len(versions),
                    lengths[len(plan.query)],
                    row.block_ids,
                    hooks[index],
                )


def _groups(
    entries: Sequence[Entry],
    starts: np.ndarray,
    multiple: int,
    send: Callable[[np.ndarray], Tensor],
) -> Iterator[Group]:
    first = 0
    for (kind, query, keys, _), members in groupby(entries, key=lambda e: e.shape):
        run = list(members)
        start = int(starts[first])
        first += len(run)
        if run[0].hook is not None:
            yield _hooked_group(run[0], start, _mask(run, send), send)
        elif kind == "own":
            yield Group(start, len(run), query, own=True, mask=_mask(run, send))
        elif kind == "branch":
            yield from _branch_groups(run, start, query, keys, send)
        else:
            yield from _window_groups(run, start, query, multiple, send)


def _ragged(
    entries: Sequence[Entry],
    starts: np.ndarray,
    groups: Sequence[Group],
    places: int,
    send: Callable[[np.ndarray], Tensor],
) -> Iterator[Ragged]:
    """Groups side by side that see runs of packed, or of stored keys: several, or masked ones."""
    for stored in (False, True):
        found = [g for g in groups if _sees_runs(g, stored)]
        even = len(found) < 2 and all(group.mask is None for group in found)
        if even or (stored and not places):
            continue
        start, stop = found[0].start, found[-1].stop
        inside = [g for g in groups if start <= g.start < stop]
        if len(inside) != len(found):
            continue
        members = [(e, int(s)) for e, s in zip(entries, starts, strict=False) if start <= s < stop]
        rows = [_run(entry, at - start, stored) for entry, at in members]
        keys = places if stored else stop - start
        yield ragged(rows, start=start, stored=stored, keys=keys, send=send)


def _sees_runs(group: Group, stored: bool) -> bool:
    if group.hook is not None or group.sources is not None or group.own is stored:
        return False
    return group.base is not None if stored else group.length == 0


def _run(entry: Entry, at: int, stored: bool) -> tuple[int, np.ndarray]:
    """Where an entry's keys begin, and end for each of its tokens, `at` being its first of these.

    A mask hides what lies behind, for blocks ascend with positions.
    """
    base = at if entry.slot is None or not stored else entry.slot.base
    assert base is not None
    mask, query = entry.mask(), len(entry.plan.query)
    count = entry.reach if stored else query
    return base, base + (np.full(query, count) if mask is None else mask.sum(1))


def _hooked_group(
    entry: Entry, start: int, mask: Tensor | None, send: Callable[[np.ndarray], Tensor]
) -> Group:
    """A row by itself: its keys are gathered, in the order of positions if it is no branch."""
    kind, query, keys, _ = entry.shape
    assert entry.hook is not None
    first = entry.lane == 0 and entry.branch == 0
    own = kind != "window"
    if entry.slot is None or kind == "own":
        return Group(start, 1, query, own, mask=mask, hook=entry.hook, is_first=first)
    seen = entry.outside() if own else np.arange(entry.reach)
    return Group(
        start,
        1,
        query,
        own,
        keys,
        context=send(entry.slot.places[seen][None]),
        mask=mask,
        hook=entry.hook,
        is_first=first,
        places=send(entry.slot.places),
        positions=send(entry.plan.query),
        order=send(np.argsort(np.concatenate([seen, entry.plan.query]))) if own else None,
    )


def _branch_groups(
    run: Sequence[Entry],
    start: int,
    query: int,
    keys: int,
    send: Callable[[np.ndarray], Tensor],
) -> Iterator[Group]:
    """The branches of a row as one row of queries, so that its stored context is read once.

    Each branch sees that context and itself, which a mask says. Rows of as many branches are
    attended together, branches of another length apart.
    """
    for branches, members in groupby(run, key=lambda e: e.siblings):
        entries = list(members)
        rows = entries[::branches]
        places = np.stack([e.slot.places[e.outside()] for e in rows if e.slot is not None])
        masks = np.stack([_branch_mask(e, keys) for e in rows])[:, None]
        count = branches * query
        yield Group(start, len(rows), count, True, keys, context=send(places), mask=send(masks))
        start += len(entries) * query


def _branch_mask(entry: Entry, keys: int) -> np.ndarray:
    """Which of `keys` stored keys, then of the branches' own, each query sees, all R branches'."""
    query, branches = len(entry.plan.query), entry.siblings
    seen = entry.mask()
    seen = np.ones((query, keys + query), dtype=bool) if seen is None else seen
    own = np.kron(np.eye(branches, dtype=bool), seen[:, keys:])
    return np.concatenate([np.tile(seen[:, :keys], (branches, 1)), own], axis=1)


def _mask(
    run: Sequence[Entry], send: Callable[[np.ndarray], Tensor], multiple: int = 1
) -> Tensor | None:
    """The masks of a group `(rows, 1, query, keys)`; None where every query sees every key.

    They have a `multiple` of keys.
    """
    masks, counts = [e.mask() for e in run], [e.keys for e in run]
    if all(mask is None for mask in masks) and len(set(counts)) == 1:
        return None
    width = -(-max(counts) // multiple) * multiple
    whole = np.zeros((len(run), 1, len(run[0].plan.query), width), dtype=bool)
    for row, count, mask in zip(whole, counts, masks, strict=True):
        row[..., :count] = True if mask is None else mask
    return send(whole)


def _window_groups(
    run: Sequence[Entry],
    start: int,
    query: int,
    multiple: int,
    send: Callable[[np.ndarray], Tensor],
) -> Iterator[Group]:
    """Windows over stored K/V: views where the slots are consecutive, else gathered.

    Slots at regular distances are one group. The keys of its shorter rows read on into the rest of
    their own slots, which a mask hides; with a mask there is a `multiple` of keys.
    """
    slots = [e.slot for e in run if e.slot is not None]
    bases = [s.base for s in slots if s.base is not None]
    if len(bases) < len(run):
        keys = run[0].reach
        places = np.stack([s.places[:keys] for s in slots])
        mask = _mask(run, send)
        yield Group(start, len(run), query, False, keys, context=send(places), mask=mask)
        return
    for first, stop in regular_runs(bases, [e.reach for e in run]):
        part, base = run[first:stop], bases[first]
        stride = bases[first + 1] - base if len(part) > 1 else 0
        mask = _mask(part, send, multiple)
        keys = part[0].reach if mask is None else mask.shape[-1]
        at = start + first * query
        yield Group(at, len(part), query, False, keys, base=base, stride=stride, mask=mask)


def regular_runs(bases: Sequence[int], reaches: Sequence[int]) -> Iterator[tuple[int, int]]:
    """`[first, stop)` of slots of one size, by ascending `bases`, that one call attends.

    Their distances are equal, and as many keys for each as the one with most `reaches` are not many
    more than they have.
    """
    first = 0
    for stop in range(1, len(bases) + 1):
        longer = slice(first, stop + 1)
        keys = reaches[longer]
        regular = len(set(np.diff(bases[longer]).tolist())) == 1
        if stop == len(bases) or not regular or max(keys) * len(keys) > NEAR * sum(keys):
            yield first, stop
            first = stop


def _writes(entries: Sequence[Entry], starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from_, to = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for entry, start in zip(entries, starts[:-1], strict=True):
        if entry.stores and entry.slot is not None:
            from_.append(np.arange(start, start + len(entry.plan.query)))
            to.append(entry.slot.places[entry.plan.query])
    return np.concatenate(from_), np.concatenate(to)


def _reads(
    entries: Sequence[Entry],
    starts: np.ndarray,
    scored: Sequence[np.ndarray],
    scope: Scope,
    lanes: int,
    shift: int,
    kept: Sequence[int],
) -> tuple[list[np.ndarray], np.ndarray]:
    read: list[list[np.ndarray]] = [[] for _ in range(lanes)]
    scatter = []
    order = sorted(range(len(entries)), key=lambda i: (entries[i].row, entries[i].branch))
    for i in order:
        entry = entries[i]
        wanted = scope.wanted(entry.row, entry.branch, scored[entry.row])
        at = np.maximum(wanted - shift, 0)
        found = starts[i] + np.searchsorted(entry.plan.query, at)
        if entry.row in kept:
            place = int(starts[-1]) + kept.index(entry.row) * lanes + entry.lane
            found[at < entry.plan.query[0]] = place
        read[entry.lane].append(found)
        if entry.lane == 0:
            flat = (entry.row * scope.branches + entry.branch) * scope.width
            scatter.append(flat + wanted - scope.base[entry.row])
    return [np.concatenate(r) for r in read], np.concatenate(scatter)


def _leads(
    rows: Sequence[Row],
    entries: Sequence[Entry],
    starts: np.ndarray,
    scope: Scope,
    lanes: int,
    send: Callable[[np.ndarray], Tensor],
) -> Leads | None:
    """Where the outputs before the windows of rows that keep them are, in each of R versions."""
    keeping = [i for i, versions in enumerate(scope.plans) if versions[0].lead == "keep"]
    if not keeping:
        return None
    tokens = np.zeros((len(keeping), lanes, scope.branches), dtype=np.int64)
    for entry, start in zip(entries, starts[:-1], strict=True):
        if entry.row in keeping:
            before = rows[entry.row].window.start - 1
            found = start + np.searchsorted(entry.plan.query, before)
            tokens[keeping.index(entry.row), entry.lane, entry.branch] = found
    return Leads(tuple(keeping), send(np.array(keeping)), send(tokens))


def _choice(
    rows: Sequence[Row],
    entries: Sequence[Entry],
    starts: np.ndarray,
    scope: Scope,
    send: Callable[[np.ndarray], Tensor],
) -> Choice | None:
    """What the branches of rows compute before their windows; None where that is nothing."""
    found: dict[tuple[int, int], tuple[np.ndarray, list[np.ndarray]]] = {}
    for i in sorted(range(len(entries)), key=lambda i: entries[i].branch):
        entry = entries[i]
        before = int(np.searchsorted(entry.plan.query, rows[entry.row].window.start))
        if entry.branches == 1 or entry.slot is None or not before:
            continue
        places = entry.slot.places[entry.plan.query[:before]]
        _, tokens = found.setdefault((entry.row, entry.lane), (places, []))
        tokens.append(starts[i] + np.arange(before))
    if not found:
        return None
    row = [np.full(len(places), key[0]) for key, (places, _) in found.items()]
    spare = [parts[:1] * (scope.branches - len(parts)) for _, parts in found.values()]
    tokens = [
        np.stack([*parts, *more], axis=1)
        for (_, parts), more in zip(found.values(), spare, strict=True)
    ]
    places = [places for places, _ in found.values()]
    return Choice(*(send(np.concatenate(parts)) for parts in (row, places, tokens)))


def _branch_windows(
    entries: Sequence[Entry], starts: np.ndarray, scope: Scope
) -> tuple[np.ndarray, np.ndarray]:
    """Flat `(B, R, W)` places of a sampler's own window tokens, and where in the packed ids."""
    from_, to = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    if not scope.replaced:
        return from_[0], to[0]
    for entry, start in zip(entries, starts[:-1], strict=True):
        offsets = entry.plan.query - scope.base[entry.row]
        inside = np.flatnonzero(
            (offsets >= 0) & (offsets < scope.width) & entry.editable[entry.plan.query]
        )
        flat = (entry.row * scope.branches + entry.branch) * scope.width
        from_.append(flat + offsets[inside])
        to.append(start + inside)
    return np.concatenate(from_), np.concatenate(to)
