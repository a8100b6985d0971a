"""The K/V store: pages of keys and values at fixed absolute positions, one pool for all rows.

A row takes whole pages, side by side when it can, so that attention reads them as a view; a row
whose pages are scattered is gathered. K are stored after RoPE and written in place: positions
never move in a masked diffusion model, so nothing is ever rotated or copied again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlm_decode.errors import CapacityError
from dlm_decode.models import ModelInfo


@dataclass(frozen=True)
class Slot:
    """A row's place in the store: `places (N,)` are its positions' indices in the pool.

    `base` is the first of them when they are consecutive, else None. `tokens` and `turns` `(N,)`
    tell which id, in which turn, each stored position was computed from (-1: never).
    """

    pages: tuple[int, ...]
    places: np.ndarray
    base: int | None
    tokens: np.ndarray
    turns: np.ndarray


class KVStore:
    """K and V of `pages` pages of `page_length` positions for every layer."""

    def __init__(
        self,
        info: ModelInfo,
        *,
        pages: int,
        page_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (pages * page_length, info.kv_heads, info.head_size)
        self.page_length = page_length
        self._free = np.ones(pages, dtype=bool)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(info.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(info.layers)]

    @property
    def free_pages(self) -> int:
        return int(self._free.sum())

    def allocate(self, length: int) -> Slot:
        """A slot for `length` positions. Raises `CapacityError` when too few pages are free."""
        count = pages_of(length, self.page_length)
        pages = self._find(count)
        if pages is None:
            raise CapacityError(
                f"a row of {length} positions needs {count} pages of {self.page_length}, but only "
                f"{self.free_pages} are free; lower the batch size or the lengths"
            )
        self._free[pages] = False
        offsets = np.arange(self.page_length, dtype=np.int64)
        places = (pages[:, None] * self.page_length + offsets).reshape(-1)[:length]
        together = bool((np.diff(pages) == 1).all())
        base = int(places[0]) if together else None
        never = np.full(length, -1, dtype=np.int64)
        return Slot(tuple(pages.tolist()), places, base, never, never.copy())

    def release(self, slot: Slot) -> None:
        """Give a slot's pages back."""
        pages = list(slot.pages)
        assert not self._free[pages].any(), "a slot was released twice"
        self._free[pages] = True

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys`, `values` `(n, G, K)` at the pool indices `places (n,)`."""
        self.keys[layer].index_copy_(0, places, keys)
        self.values[layer].index_copy_(0, places, values)

    def _find(self, count: int) -> np.ndarray | None:
        """Free pages, consecutive ones if there are any."""
        free = np.flatnonzero(self._free)
        if len(free) < count:
            return None
        ends = free[count - 1 :] - free[: len(free) - count + 1]
        runs = np.flatnonzero(ends == count - 1)
        return free[runs[0] : runs[0] + count] if len(runs) else free[:count]


def pages_of(length: int, page_length: int) -> int:
    """Pages that `length` positions take."""
    return -(-length // page_length)


def page_bytes(info: ModelInfo, page_length: int, itemsize: int) -> int:
    """Bytes of one page over all layers, K and V."""
    return 2 * info.layers * page_length * info.kv_heads * info.head_size * itemsize
