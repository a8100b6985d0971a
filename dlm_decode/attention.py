"""Attention of packed rows: which keys each packed query sees, resolved once per forward.

Rows of all kinds lie side by side in one token axis T; a group is a run of rows that share query
and key lengths, so that each is one call of scaled dot-product attention without a mask. A row can
never see another row's keys, because no tensor holds both. Only block-causal rows whose queries
lie in several blocks need a mask, and rows with branches, whose queries lie side by side so that
the stored context is read once for all of them (1.3 to 5 times as fast as a copy for each branch on
a CPU, 4 to 8 branches of 8 to 32 tokens). Groups of several shapes may be taken in one call of
another kernel, see `dlm_decode.ragged`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from einops import rearrange, reduce
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dlm_decode.caches import LayerHook, PartialHook
from dlm_decode.kv import KVStore
from dlm_decode.models import LayerParts
from dlm_decode.ragged import Ragged, attend
from dlm_decode.tree import flattened, refilled


@dataclass(frozen=True)
class Group:
    """`rows` rows of `query` packed tokens each, from token `start`.

    `own`: the rows see their own new K/V. `context` `(rows, C)` pool indices, or `(base, stride)`
    of consecutive ones, are the stored keys seen (`length` C of them), none when `length` is 0.
    `mask (rows, 1, query, keys)` bool, where given, tells which of the keys each query sees.
    `sources (rows, C)` are packed tokens of this forward, whose K/V are seen in place of stored
    ones.

    A group with a `hook` is one row: the pool indices of its `places (N,)` and the `positions
    (query,)` of its queries, for a choice of keys per layer. `is_first`: the hook may look on, at
    keys put into the `order (S,)` of positions.
    """

    start: int
    rows: int
    query: int
    own: bool
    length: int = 0
    context: Tensor | None = None
    base: int | None = None
    stride: int = 0
    mask: Tensor | None = None
    sources: Tensor | None = None
    hook: LayerHook | None = None
    is_first: bool = False
    places: Tensor | None = None
    positions: Tensor | None = None
    order: Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.query


@dataclass(frozen=True)
class Watched:
    """The watched tokens of one group.

    `queries (rows, w)` are packed tokens, each row filled up with its first one. The lines of
    their flat attention `(rows * w, N)` belong at `target (rows * w,)` of the record, where the one
    behind the last takes those that are nobody's.
    """

    queries: Tensor
    target: Tensor


@dataclass(frozen=True)
class Watch:
    """Which attention to record: in `layers`, of `count` tokens, told for each group in `parts`.

    `width` is the longest row's length N: the record's last axis.
    """

    layers: frozenset[int]
    parts: tuple[Watched | None, ...]
    count: int
    width: int


@dataclass(frozen=True)
class Choice:
    """Positions whose K/V are stored from one of R versions of their row, once it is known which.

    `row (J,)` and `places (J,)` are the row of each position and its pool index, `tokens (J, R)`
    the packed token that each version computed it as.
    """

    row: Tensor
    places: Tensor
    tokens: Tensor


class PackedAttention:
    """The `Attend` of one forward: stores what is to be stored, then attends group by group."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        store: KVStore | None = None,
        write_from: Tensor | None = None,
        write_to: Tensor | None = None,
        *,
        write_all: bool = False,
        watch: Watch | None = None,
        windows: Sequence[tuple[int, int]] | None = None,
        ragged: tuple[Ragged, ...] = (),
        choice: Choice | None = None,
    ) -> None:
        """Packed tokens `write_from (n,)` (or all) are stored at pool indices `write_to (n,)`.

        Groups within a part of `ragged` are attended together. `windows` are for models that ask
        for them, see `dlm_decode.models.row_windows`. K/V of a `choice` are held until `choose` is
        called.
        """
        self._groups = groups
        self._store = store
        self._write_from = None if write_all else write_from
        self._write_to = write_to
        self._watch = watch
        self._ragged = ragged
        self.windows = windows
        self._versions = choice
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._watched: Tensor | None = None
        self._home = self

    def on(self, device: torch.device) -> PackedAttention:
        """The same attention for layers on another device: its indices there, its record here."""
        moved = copy(self)
        for name in ("_groups", "_write_from", "_write_to", "_watch", "_ragged"):
            tree = getattr(self, name)
            indices, _ = flattened(tree)
            setattr(moved, name, refilled(tree, (index.to(device) for index in indices)))
        return moved

    @property
    def watched(self) -> Tensor | None:
        """Attention `(count, N)` of the watched tokens over absolute positions, averaged over heads
        and watched layers."""
        return None if self._watched is None else self._watched[:-1]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """How many rows lie side by side, and how many tokens of each."""
        return [(g.rows, g.query) for g in self._groups]

    @property
    def row_runs(self) -> list[tuple[int, int]] | None:
        """The runs if all rows are whole, else None."""
        whole = all(g.own and not g.length and g.sources is None for g in self._groups)
        return self.runs if whole else None

    @property
    def run_layer(self) -> Callable[[int, LayerParts, Tensor], Tensor] | None:
        """Runs a whole layer where hooks choose its tokens; None, and no cost, where none does."""
        partial = any(isinstance(group.hook, PartialHook) for group in self._groups)
        return self._run_layer if partial else None

    def _run_layer(self, layer: int, parts: LayerParts, x: Tensor) -> Tensor:
        """A layer over `x (T, D)` of which only the chosen tokens are computed."""
        values = parts.values(x)
        chosen = [self._choice(group, layer, values) for group in self._groups]
        tokens = torch.cat(
            [
                torch.arange(group.start, group.stop, device=x.device)
                if c is None
                else c + group.start
                for group, c in zip(self._groups, chosen, strict=True)
            ]
        )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries = q.new_zeros(len(x), *q.shape[1:]).index_copy_(0, tokens, q)
            keys = self._stored_keys(layer, k, len(x)).index_copy_(0, tokens, k)
            return self(layer, queries, keys, values)[tokens]

        x = x + self._completed("mix", layer, parts.mix(x, tokens, attend), tokens, chosen, x)
        return x + self._completed("feed", layer, parts.feed(x[tokens]), tokens, chosen, x)

    def _choice(self, group: Group, layer: int, values: Tensor) -> Tensor | None:
        """The queries of a group that a layer computes, None for all."""
        if not isinstance(group.hook, PartialHook) or not group.is_first or group.places is None:
            return None
        assert self._store is not None and group.positions is not None
        places = group.places[group.positions]
        stored = self._store.values[layer].read(lambda pool: pool[places], values.dtype)
        return group.hook.choose(layer, values[group.start : group.stop], stored)

    def _stored_keys(self, layer: int, k: Tensor, count: int) -> Tensor:
        """Keys `(T, G, K)` as they are stored now, for tokens that get no new ones."""
        keys = k.new_zeros(count, *k.shape[1:])
        if self._store is None or self._write_to is None:
            return keys
        places = self._write_to
        stored = self._store.keys[layer].read(lambda pool: pool[places], k.dtype)
        return stored if self._write_from is None else keys.index_copy_(0, self._write_from, stored)

    def _completed(
        self,
        what: str,
        layer: int,
        part: Tensor,
        tokens: Tensor,
        chosen: Sequence[Tensor | None],
        x: Tensor,
    ) -> Tensor:
        """What all tokens `(T, D)` are given, of which `part (m, D)` was computed."""
        whole = torch.zeros_like(x).index_copy_(0, tokens, part)
        spans = []
        for group, choice in zip(self._groups, chosen, strict=True):
            span = whole[group.start : group.stop]
            if isinstance(group.hook, PartialHook) and group.is_first:
                span = group.hook.complete(what, layer, span, choice)
            spans.append(span)
        return torch.cat(spans)

    def choose(self, winner: Tensor) -> None:
        """Store K/V of the choice from version `winner (B,)` of each row."""
        choice = self._versions
        if choice is None or self._store is None:
            return
        picked = torch.arange(len(choice.row), device=winner.device), winner[choice.row]
        for layer, (k, v) in self._held.items():
            self._store.write(layer, choice.places, k[picked], v[picked])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._versions is not None:
            tokens = self._versions.tokens
            self._held[layer] = k[tokens], v[tokens]
        if self._write_to is not None and self._store is not None:
            picked = self._write_from
            new_k, new_v = (k, v) if picked is None else (k[picked], v[picked])
            self._store.write(layer, self._write_to, new_k, new_v)
        watched = self._watched_parts(layer)
        if self._ragged and not any(watched):
            return self._attend_ragged(layer, q, k, v)
        parts = [
            self._attend(group, part, layer, q, k, v)
            for group, part in zip(self._groups, watched, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _watched_parts(self, layer: int) -> tuple[Watched | None, ...]:
        """What to record of each group in this layer."""
        if self._watch is None or layer not in self._watch.layers:
            return (None,) * len(self._groups)
        return self._watch.parts

    def _attend_ragged(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All groups, those within a ragged part in one call."""
        found = {part.start: self._attend_together(part, layer, q, k, v) for part in self._ragged}
        for group in self._groups:
            if not any(part.start <= group.start < part.stop for part in self._ragged):
                found[group.start] = self._attend(group, None, layer, q, k, v)
        return torch.cat([found[start] for start in sorted(found)])

    def _attend_together(self, part: Ragged, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Groups of several shapes in one call, over the keys as they lie."""
        span = slice(part.start, part.stop)
        if not part.stored:
            return attend(part, q[span], k[span], v[span])
        assert self._store is not None
        pools = self._store.keys[layer], self._store.values[layer]
        return attend(part, q[span], *(pool.data for pool in pools))

    def _attend(
        self, group: Group, part: Watched | None, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        span = slice(group.start, group.stop)
        queries = _rows_first(q[span], group.rows)
        kept = self._kept(group, layer)
        keys, values = self._context(group, layer, kept, q.dtype)
        if group.sources is not None:
            keys, values = (x[group.sources].transpose(1, 2) for x in (k, v))
        if group.own:
            own_k, own_v = (_rows_first(x[span], group.rows) for x in (k, v))
            keys = own_k if keys is None else torch.cat([keys, own_k], dim=2)
            values = own_v if values is None else torch.cat([values, own_v], dim=2)
        assert keys is not None and values is not None
        if group.hook is not None and group.is_first and kept is None:
            order = slice(None) if group.order is None else group.order
            group.hook.see(layer, queries[0], keys[0][:, order], values[0][:, order])
        if part is not None:
            self._record(group, part, q, keys, kept)
        grouped = queries.shape[1] != keys.shape[1]
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=group.mask, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _kept(self, group: Group, layer: int) -> Tensor | None:
        """The positions `(k,)` that a hook lets the group see in this layer, None: all of them."""
        if group.hook is None or group.places is None or group.positions is None:
            return None
        kept = group.hook.keep(layer)
        return kept if kept is None or group.own else torch.cat([kept, group.positions])

    def _record(
        self, group: Group, part: Watched, q: Tensor, keys: Tensor, kept: Tensor | None
    ) -> None:
        """Add the watched tokens' attention over `keys (rows, G, N, K)`, beside the fused kernel.

        Scores are `(rows, H, w, N)`: of the watched queries alone, never of all N. A query head is
        scored against its group's keys as they lie.
        """
        assert self._watch is not None
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        if self._home._watched is None:
            shape = (self._watch.count + 1, self._watch.width)
            self._home._watched = q.new_zeros(shape, dtype=exact)
        queries = rearrange(q[part.queries], "b w (g s) k -> b g (s w) k", g=keys.shape[1])
        scores = queries.to(exact) @ keys.to(exact).transpose(-1, -2) * q.shape[-1] ** -0.5
        width = part.queries.shape[1]
        if group.mask is not None:
            hidden = ~_watched_lines(group.mask, part.queries - group.start)
            hidden = hidden.repeat(1, 1, scores.shape[2] // width, 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        mean = reduce(scores.softmax(-1), "b g (s w) n -> (b w) n", "mean", w=width)
        lines = mean[:, : self._watch.width] / len(self._watch.layers)
        if kept is not None:
            whole = lines.new_zeros(len(lines), self._watch.width)
            lines = whole.index_copy_(1, kept, lines)
        into = self._home._watched[:, : lines.shape[-1]]
        into.index_add_(0, part.target.to(into.device), lines.to(into.device))

    def _context(
        self,
        group: Group,
        layer: int,
        kept: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Stored K and V `(rows, G, C, K)`: a view when the pages lie regularly, else gathered."""
        if group.length == 0 or self._store is None:
            return None, None
        if group.base is not None:
            first, shape = group.base, (group.rows, group.length)

            def view(pool: Tensor) -> Tensor:
                step = pool.stride()
                strides = (group.stride * step[0], *step)
                return pool.as_strided((*shape, *pool.shape[1:]), strides, first * step[0])
        else:
            assert group.context is not None
            context = (
                group.context
                if kept is None or group.places is None
                else (group.places[kept][None])
            )

            def view(pool: Tensor) -> Tensor:
                return pool.index_select(0, context.reshape(-1)).unflatten(0, context.shape)

        keys, values = (
            pool.read(view, dtype).transpose(1, 2)
            for pool in (self._store.keys[layer], self._store.values[layer])
        )
        return keys, values


def _watched_lines(mask: Tensor, places: Tensor) -> Tensor:
    """Lines `(rows, 1, w, N)` of `mask (rows, 1, query, N)` at a group's `places (rows, w)`."""
    rows = torch.arange(mask.shape[0], device=mask.device)[:, None]
    return mask[rows, 0, places % mask.shape[2]][:, None]


def _rows_first(x: Tensor, rows: int) -> Tensor:
    """`x (rows * query, H, K)` as `(rows, H, query, K)`; einops would take microseconds more."""
    return x.unflatten(0, (rows, -1)).transpose(1, 2)
