"""Attention of packed rows: which keys each packed query sees, resolved once per forward.

Rows of all kinds lie side by side in one token axis T; a group is a run of rows that share query
and key lengths, so that each is one call of scaled dot-product attention without a mask. A row can
never see another row's keys, because no tensor holds both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dlm_decode.kv import KVStore


@dataclass(frozen=True)
class Group:
    """`rows` rows of `query` packed tokens each, from token `start`.

    `own`: the rows see their own new K/V. `context` `(rows, C)` pool indices, or `(base, stride)`
    of consecutive ones, are the stored keys seen (`length` C of them), none when `length` is 0.
    """

    start: int
    rows: int
    query: int
    own: bool
    length: int = 0
    context: Tensor | None = None
    base: int | None = None
    stride: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.query


@dataclass(frozen=True)
class Watch:
    """Which attention to record: in `layers`, of the packed tokens `rows (n,)`.

    `width` is the longest row's length N: the record's last axis.
    """

    layers: frozenset[int]
    rows: Tensor
    width: int


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
    ) -> None:
        """Packed tokens `write_from (n,)` (or all) are stored at pool indices `write_to (n,)`."""
        self._groups = groups
        self._store = store
        self._write_from = None if write_all else write_from
        self._write_to = write_to
        self._watch = watch
        self.watched: Tensor | None = None
        """Attention `(T, N)` over absolute positions, averaged over heads and watched layers; only
        the watched rows are filled."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._write_to is not None and self._store is not None:
            picked = self._write_from
            new_k, new_v = (k, v) if picked is None else (k[picked], v[picked])
            self._store.write(layer, self._write_to, new_k, new_v)
        if self._watch is not None and layer in self._watch.layers:
            self._record(layer, q, k, self._watch)
        parts = [self._attend(group, layer, q, k, v) for group in self._groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, group: Group, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        span = slice(group.start, group.stop)
        queries = _rows_first(q[span], group.rows)
        keys, values = self._context(group, layer)
        if group.own:
            own_k, own_v = (_rows_first(x[span], group.rows) for x in (k, v))
            keys = own_k if keys is None else torch.cat([keys, own_k], dim=2)
            values = own_v if values is None else torch.cat([values, own_v], dim=2)
        assert keys is not None and values is not None
        grouped = queries.shape[1] != keys.shape[1]
        out = scaled_dot_product_attention(queries, keys, values, enable_gqa=grouped)
        return rearrange(out, "b h q k -> (b q) h k")

    def _record(self, layer: int, q: Tensor, k: Tensor, watch: Watch) -> None:
        """Add this layer's attention of the watched rows, recomputed beside the fused kernel."""
        if self.watched is None:
            self.watched = q.new_zeros((q.shape[0], watch.width), dtype=torch.float32)
        for group in self._groups:
            keys, _ = self._context(group, layer)
            own = _rows_first(k[group.start : group.stop], group.rows) if group.own else None
            keys = own if keys is None else keys
            assert keys is not None
            queries = _rows_first(q[group.start : group.stop], group.rows)
            share = queries.shape[1] // keys.shape[1]
            keys = keys.repeat_interleave(share, dim=1) if share > 1 else keys
            scores = queries.float() @ keys.float().transpose(-1, -2) * q.shape[-1] ** -0.5
            mean = rearrange(scores.softmax(-1).mean(1), "b q n -> (b q) n")
            into = self.watched[group.start : group.stop, : mean.shape[-1]]
            into.add_(mean, alpha=1 / len(watch.layers))

    def _context(self, group: Group, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Stored K and V `(rows, G, C, K)`: a view when the pages lie regularly, else gathered."""
        if group.length == 0 or self._store is None:
            return None, None
        pools = (self._store.keys[layer], self._store.values[layer])
        if group.base is not None:
            shape = (group.rows, group.length, *pools[0].shape[1:])
            step = pools[0].stride()
            strides = (group.stride * step[0], *step)
            offset = group.base * step[0]
            views = (pool.as_strided(shape, strides, offset) for pool in pools)
        else:
            assert group.context is not None
            flat = group.context.reshape(-1)
            views = (pool.index_select(0, flat).unflatten(0, group.context.shape) for pool in pools)
        keys, values = (rearrange(view, "b n g k -> b g n k") for view in views)
        return keys, values


def _rows_first(x: Tensor, rows: int) -> Tensor:
    return rearrange(x, "(b q) h k -> b h q k", b=rows)
