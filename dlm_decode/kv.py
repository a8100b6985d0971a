"""The K/V store: pages of keys and values at fixed absolute positions, one pool for all rows.

A row takes whole pages, side by side when it can, so that attention reads them as a view; a row
whose pages are scattered is gathered. K are stored after RoPE and written in place: positions
never move in a masked diffusion model, so nothing is ever rotated or copied again.

Pages are counted: a fork of a row and rows that begin alike hold the same pages, and whoever means
to write into one that others hold takes a copy of it first (`own`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dlm_decode.errors import CapacityError
from dlm_decode.models import ModelInfo

PAGE_LENGTH = 32
"""Positions of a page in the stores of decoders."""


@dataclass(frozen=True)
class Slot:
    """A row's place in the store: `places (N,)` are its positions' indices in the pool.

    `base` is the first of them when they are consecutive, else None. `tokens` and `turns` `(N,)`
    tell which id, in which turn, each stored position was computed from (-1: never). `room` is how
    many positions its pages hold.
    """

    pages: tuple[int, ...]
    places: np.ndarray
    base: int | None
    tokens: np.ndarray
    turns: np.ndarray
    room: int


@dataclass(frozen=True)
class Pool:
    """K or V of one layer, `data (P, G, K)` at P places; as int8 they are in units of `scale`,
    `(P, G, 1)` fp32."""

    data: Tensor
    scale: Tensor | None

    @classmethod
    def empty(cls, places: int, info: ModelInfo, dtype: torch.dtype, device: torch.device) -> Pool:
        shape = (places, info.kv_heads)
        data = torch.zeros(*shape, info.head_size, dtype=dtype, device=device)
        if dtype.is_floating_point:
            return cls(data, None)
        return cls(data, torch.zeros(*shape, 1, dtype=torch.float32, device=device))

    def read(self, view: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        """What `view` picks of the places, as numbers of `dtype`."""
        data = view(self.data).to(dtype)
        return data if self.scale is None else data * view(self.scale).to(dtype)

    def write(self, places: Tensor, new: Tensor) -> None:
        """Store `new (n, G, K)` at `places (n,)`."""
        if self.scale is not None:
            new, scale = quantised(new)
            self.scale.index_copy_(0, places, scale)
        self.data.index_copy_(0, places, new.to(self.data.dtype))

    def clear(self, places: Tensor) -> None:
        """Set `places (n,)` to zero."""
        for tensor in (self.data,) if self.scale is None else (self.data, self.scale):
            tensor.index_fill_(0, places, 0)

    def copy(self, start: int, to: int, count: int) -> None:
        """Copy `count` places from `start` on."""
        for tensor in (self.data,) if self.scale is None else (self.data, self.scale):
            tensor[to : to + count] = tensor[start : start + count]


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x (..., K)` as whole numbers within 127 and their scale, `(..., 1)` fp32."""
    exact = x.float()
    scale = exact.abs().amax(-1, keepdim=True) / 127
    return (exact / scale.clamp(min=torch.finfo(torch.float32).tiny)).round(), scale


class KVStore:
    """K and V of `pages` pages of `page_length` positions for every layer, on the layer's device.

    `device` is that of all layers, or one for each.
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        pages: int,
        page_length: int,
        dtype: torch.dtype,
        device: torch.device | Sequence[torch.device],
    ) -> None:
        self.page_length = page_length
        self._holders = np.zeros(pages, dtype=np.int64)
        homes = [device] * info.layers if isinstance(device, torch.device) else device
        self.keys, self.values = (
            [Pool.empty(pages * page_length, info, dtype, home) for home in homes] for _ in range(2)
        )

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the pools lie, and how large and of what kind they are."""
        pools = (*self.keys, *self.values)
        tensors = [t for p in pools for t in (p.data, p.scale) if t is not None]
        return (*(t.data_ptr() for t in tensors), len(pools[0].data), pools[0].data.itemsize)

    @property
    def pages(self) -> int:
        return len(self._holders)

    def places_of(self, dtype: torch.dtype) -> int:
        """How many places the pools have, 0 if they hold other numbers than those of `dtype`."""
        data = self.keys[0].data
        return len(data) if data.dtype == dtype else 0

    @property
    def free_pages(self) -> int:
        return int((self._holders == 0).sum())

    def allocate(self, length: int, shared: Sequence[int] = (), *, room: int = 0) -> Slot:
        """A slot for `length` positions, whose first pages are the `shared` ones of other rows.

        It has room for `room` positions, if that is more. What lies behind `length` is set to zero:
        it may be read, for nothing, beside longer rows.
        Raises `CapacityError`, and takes nothing, when too few pages are free.
        """
        count = pages_of(max(length, room), self.page_length) - len(shared)
        pages = self._find(count)
        if pages is None:
            raise CapacityError(
                f"a row of {length} positions needs {count} pages of {self.page_length}, but only "
                f"{self.free_pages} are free; lower the batch size or the lengths"
            )
        self.hold(shared)
        self._holders[pages] += 1
        never = np.full(length, -1, dtype=np.int64)
        taken = (*shared, *pages.tolist())
        size = len(taken) * self.page_length
        places, base = self._laid_out(taken, size)
        self._clear(places[length:])
        return Slot(taken, places[:length], base, never, never.copy(), size)

    def fork(self, slot: Slot) -> Slot:
        """Another slot over the same pages; nothing is copied until one of the two is written."""
        self.hold(slot.pages)
        return replace(slot, tokens=slot.tokens.copy(), turns=slot.turns.copy())

    def own(self, slot: Slot, positions: np.ndarray) -> Slot:
        """The slot, with copies of those pages of `positions` that others hold too.

        Raises `CapacityError`, and changes nothing, when too few pages are free for the copies.
        """
        touched = np.unique(positions // self.page_length)
        split = [i for i in touched.tolist() if self._holders[slot.pages[i]] > 1]
        if not split:
            return slot
        fresh = self._find(len(split))
        if fresh is None:
            raise CapacityError(
                f"a write needs copies of {len(split)} shared pages, but only {self.free_pages} "
                "are free; lower the batch size or the lengths"
            )
        pages = list(slot.pages)
        for i, page in zip(split, fresh.tolist(), strict=True):
            self._copy(pages[i], page)
            self._holders[pages[i]] -= 1
            self._holders[page] += 1
            pages[i] = page
        places, base = self._laid_out(tuple(pages), len(slot.places))
        return replace(slot, pages=tuple(pages), places=places, base=base)

    def hold(self, pages: Sequence[int]) -> None:
        """Count one more holder of each page in use."""
        assert (self._holders[list(pages)] > 0).all(), "a free page can't be shared"
        self._holders[list(pages)] += 1

    def release(self, slot: Slot) -> None:
        """Give a slot's pages back; those that others hold stay theirs."""
        self.drop(slot.pages)

    def drop(self, pages: Sequence[int]) -> None:
        """Count one holder less of each page."""
        assert (self._holders[list(pages)] > 0).all(), "a slot was released twice"
        self._holders[list(pages)] -= 1

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys`, `values` `(n, G, K)` at the pool indices `places (n,)`."""
        self.keys[layer].write(places, keys)
        self.values[layer].write(places, values)

    def _clear(self, places: np.ndarray) -> None:
        if len(places):
            for pool in (*self.keys, *self.values):
                pool.clear(torch.from_numpy(places).to(pool.data.device))

    def _copy(self, page: int, to: int) -> None:
        size = self.page_length
        for pool in (*self.keys, *self.values):
            pool.copy(page * size, to * size, size)

    def _laid_out(self, pages: tuple[int, ...], length: int) -> tuple[np.ndarray, int | None]:
        """Pool indices of `length` positions in `pages`, and the first one if they are a run."""
        index = np.asarray(pages, dtype=np.int64)
        offsets = np.arange(self.page_length, dtype=np.int64)
        places = (index[:, None] * self.page_length + offsets).reshape(-1)[:length]
        together = bool((np.diff(index) == 1).all())
        return places, int(places[0]) if together else None

    def _find(self, count: int) -> np.ndarray | None:
        """Free pages, consecutive ones if there are any."""
        free = np.flatnonzero(self._holders == 0)
        if len(free) < count:
            return None
        if count == 0:
            return free[:0]
        ends = free[count - 1 :] - free[: len(free) - count + 1]
        runs = np.flatnonzero(ends == count - 1)
        return free[runs[0] : runs[0] + count] if len(runs) else free[:count]


def pages_of(length: int, page_length: int) -> int:
    """Pages that `length` positions take."""
    return -(-length // page_length)


def page_bytes(info: ModelInfo, page_length: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, K and V, scales included."""
    scale = 0 if dtype.is_floating_point else torch.float32.itemsize
    head = info.head_size * dtype.itemsize + scale
    return 2 * info.layers * page_length * info.kv_heads * head
