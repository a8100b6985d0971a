"""Prompts that begin alike share pages of K/V: computed once, held by every row that has them.

Exact for block-causal models only, where K/V of a block depend on nothing behind it. With full
attention a prompt's K/V depend on the whole canvas; sharing them there is an approximation
(`frozen_prompt`) and needs a cache that leaves the prompt alone after its first forward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from dlm_decode.caches import CACHES, CachePolicy
from dlm_decode.errors import CapabilityError
from dlm_decode.kv import KVStore, Slot
from dlm_decode.models import ModelInfo
from dlm_decode.rows import Row

Key = tuple[int, ...]


def check_sharing(cache: CachePolicy, info: ModelInfo, *, frozen_prompt: bool) -> None:
    """Raise `CapabilityError` where prompts can't be shared, with the reason."""
    name = CACHES.name_of(cache)
    if info.regime == "block_causal":
        if not cache.stores:
            raise CapabilityError(f"cache {name!r} stores no K/V to share: take block_causal")
        return
    if not frozen_prompt:
        raise CapabilityError(
            f"{info.family} attends to the whole row, so that K/V of a prompt depend on what "
            "follows it and two requests can't share them exactly; ask for the approximation with "
            "frozen_prompt=True (--share-prompts frozen), or take a block-causal model"
        )
    if getattr(cache, "refresh_region", "whole") != "generation":
        raise CapabilityError(
            f"cache {name!r} computes the prompt again, which would undo sharing it: take prefix "
            "or dual with refresh_region=generation"
        )


class PrefixIndex:
    """Which page holds the K/V of which beginning of a prompt; it holds the pages itself.

    A page is entered under all ids that its K/V depend on. Pages that only the index still holds
    are given up, the longest unused first, when a row needs them.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._pages: OrderedDict[Key, int] = OrderedDict()
        self._coming: set[Key] = set()

    def awaits(self, row: Row) -> bool:
        """Whether the next forward stores more of the row's beginning than is known now."""
        return not self._coming.isdisjoint(self._keys(row))

    def find(self, row: Row) -> tuple[int, ...]:
        """The pages that hold the beginning of the row's prompt, as many as are known."""
        found = []
        for key in self._keys(row):
            if key not in self._pages:
                break
            self._pages.move_to_end(key)
            found.append(self._pages[key])
        return tuple(found)

    def adopt(self, row: Row, slot: Slot, count: int) -> None:
        """Note in a new slot what its first `count` pages, found here, were computed from."""
        known = slice(0, count * self._store.page_length)
        slot.tokens[known], slot.turns[known] = row.tokens[known], 0
        self._coming.update(self._keys(row)[count:])

    def enter(self, rows: Sequence[Row]) -> None:
        """Keep the pages of these rows' prompts for others, once their K/V are stored."""
        self._coming.clear()
        for row in rows:
            self._enter(row)

    def _enter(self, row: Row) -> None:
        slot = row.slots[0]
        for i, key in enumerate(self._keys(row)):
            if key in self._pages:
                continue
            if (slot.tokens[: len(key) - 1] != row.tokens[: len(key) - 1]).any():
                return
            self._store.hold(slot.pages[i : i + 1])
            self._pages[key] = slot.pages[i]

    def make_room(self, pages: int) -> None:
        """Give up pages, the longest unused first, until `pages` are free or none is left."""
        while self._pages and self._store.free_pages < pages:
            _, page = self._pages.popitem(last=False)
            self._store.drop([page])

    def _keys(self, row: Row) -> list[Key]:
        """For each whole page of the prompt the ids that its K/V depend on, then the block length.

        The prompt's last position is never shared: a shifted model computes it with the window.
        With full attention that is the whole prompt; the canvas behind it is what is neglected.
        """
        size, length = self._store.page_length, len(row.request.prompt_ids)
        ends = np.arange(size, length, size)
        if row.block_ids is None:
            reach = np.full(len(ends), length)
        else:
            reach = np.searchsorted(row.block_ids, row.block_ids[ends - 1], side="right")
        fixed = ~row.editable
        return [
            (*row.tokens[:stop].tolist(), row.span.block_length)
            for stop in reach.tolist()
            if stop <= length and fixed[:stop].all()
        ]
