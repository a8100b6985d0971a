"""Rows in the K/V store: how much of it there is, who is let in, and what prompts share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_decode.caches import CachePolicy
from dlm_decode.errors import CapabilityError, CapacityError
from dlm_decode.kv import PAGE_LENGTH, KVStore, page_bytes, pages_of
from dlm_decode.memory import require_bytes
from dlm_decode.models import DiffusionLM, layer_devices
from dlm_decode.options import Options, option
from dlm_decode.packing import NEAR
from dlm_decode.rows import Row
from dlm_decode.sharing import PrefixIndex, check_sharing

REMEDY = "lower the batch size or the lengths"


@dataclass(frozen=True)
class Storage(Options):
    """How K/V are kept. Attention computes in the model's dtype whatever they are stored in."""

    DTYPES: ClassVar[tuple[str, ...]] = (
        "model",
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int8",
    )

    dtype: str = option(
        "model",
        "what K/V are stored as: the model's dtype or this (int8 has a scale for each head of a "
        "token)",
        choices=DTYPES,
    )
    max_bytes: int | None = option(
        None,
        "most bytes for K/V: rows wait for free pages, shared prompts stay beyond their rows while "
        "there is room (none: what the batch needs)",
        low=1,
        high=2**63 - 1,
    )
    share_prompts: bool = option(False, "rows whose prompts begin alike share those K/V")
    frozen_prompt: bool = option(
        False, "share them under full attention too, where that is an approximation"
    )

    def stored_dtype(self, model: DiffusionLM) -> torch.dtype:
        """The dtype of the store for this model."""
        return model.dtype if self.dtype == "model" else getattr(torch, self.dtype)

    def check(self, cache: CachePolicy, model: DiffusionLM, lanes: int) -> None:
        """Raise `CapabilityError` for sharing that can't be done."""
        if not self.share_prompts:
            return
        if lanes > 1:
            raise CapabilityError(
                "prompts can't be shared under guidance: its second lane has none"
            )
        check_sharing(cache, model.info, frozen_prompt=self.frozen_prompt)


class Residents:
    """The store of one run, and the rows that have a place in it."""

    def __init__(self, store: KVStore, *, lanes: int, shares: bool, room: int = 0) -> None:
        """Each row gets room for `room` positions if it has fewer."""
        self.store = store
        self._lanes, self._room = lanes, room
        self._index = PrefixIndex(store) if shares else None

    @classmethod
    def open(
        cls,
        rows: Sequence[Row],
        model: DiffusionLM,
        storage: Storage,
        *,
        lanes: int,
        batch: int,
        kept: KVStore | None = None,
    ) -> Residents:
        """A store for `batch` rows of these, or for as many as `max_bytes` hold.

        Rows of nearly one length get equal room, so that attention can take them together. It is
        `kept`, the store of an earlier run of the same model and storage, if that has enough pages,
        all of them free.
        Raises `CapacityError` with the numbers for a row that it could never hold, or for more
        bytes than there are.
        """
        info, dtype = model.info, storage.stored_dtype(model)
        needed = sorted((pages_of(r.length, PAGE_LENGTH) for r in rows), reverse=True)
        size = page_bytes(info, PAGE_LENGTH, dtype)
        pages, room = lanes * sum(needed[:batch]), 0
        even = lanes * needed[0] * min(batch, len(needed))
        if storage.max_bytes is None and not storage.share_prompts and even <= NEAR * pages:
            pages, room = even, needed[0] * PAGE_LENGTH
        if storage.max_bytes is not None:
            wanted = sum(needed) if storage.share_prompts else pages
            pages = min(wanted, storage.max_bytes // size)
            _require_pages(lanes * needed[0], pages, size)
        if kept is not None and kept.free_pages == kept.pages >= pages:
            return cls(kept, lanes=lanes, shares=storage.share_prompts, room=room)
        what = f"K/V of {min(len(rows), batch)} rows"
        homes = layer_devices(model)
        for home, layers in Counter(homes).items():
            require_bytes(pages * size * layers // info.layers, home, what, REMEDY)
        store = KVStore(info, pages=pages, page_length=PAGE_LENGTH, dtype=dtype, device=homes)
        return cls(store, lanes=lanes, shares=storage.share_prompts, room=room)

    def admit(self, row: Row) -> bool:
        """Give the row its place; False, and nothing taken, while too few pages are free, or while
        a row let in this turn is about to compute what both begin with."""
        if self._index is not None and self._index.awaits(row):
            return False
        shared = () if self._index is None else self._index.find(row)
        self.store.hold(shared)
        length = max(row.length, self._room)
        needed = self._lanes * pages_of(length, PAGE_LENGTH) - len(shared)
        if self._index is not None:
            self._index.make_room(needed)
        fits = needed <= self.store.free_pages
        if fits:
            row.slots = tuple(
                self.store.allocate(row.length, shared, room=length) for _ in range(self._lanes)
            )
            if self._index is not None:
                self._index.adopt(row, row.slots[0], len(shared))
        self.store.drop(shared)
        return fits

    def after_forward(self, rows: Sequence[Row]) -> None:
        """Keep prompts that are now stored for rows that come later."""
        if self._index is not None:
            self._index.enter(rows)

    def release(self, row: Row) -> None:
        """Give the row's place back."""
        slots, row.slots = row.slots, ()
        for slot in slots:
            self.store.release(slot)


def _require_pages(needed: int, pages: int, size: int) -> None:
    if needed > pages:
        raise CapacityError(
            f"the longest row needs {needed} pages of K/V ({needed * size / 2**20:.1f} MiB), but "
            f"max_bytes leaves {pages} ({pages * size / 2**20:.1f} MiB): raise it or shorten it"
        )
