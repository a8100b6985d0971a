"""The K/V store: pages, slots and what happens when they run out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlm_decode.errors import CapacityError
from dlm_decode.footprint import Allocations
from dlm_decode.kv import KVStore, Pool, Slot, page_bytes, pages_of, quantised
from dlm_decode.models.toy import random_dream

INFO = random_dream(layers=2, hidden=8, heads=2, kv_heads=1, vocab=16).info


def store_of(pages: int, page_length: int) -> KVStore:
    return KVStore(
        INFO, pages=pages, page_length=page_length, dtype=torch.float32, device=torch.device("cpu")
    )


@dataclass
class Shadow:
    """What a store must agree with: the rows in it, and how many pages those take."""

    store: KVStore
    pages: int
    slots: list[Slot] = field(default_factory=list)

    def check(self) -> None:
        places = np.concatenate([np.empty(0, int), *(slot.places for slot in self.slots)])
        assert len(set(places.tolist())) == len(places), "two rows share a place"
        assert not len(places) or 0 <= places.min() <= places.max() < len(self.store.keys[0].data)
        taken = sum(len(slot.pages) for slot in self.slots)
        assert self.store.free_pages == self.pages - taken


COMMANDS = st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 99)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), COMMANDS)
def test_rows_never_overlap_and_pages_never_leak(
    pages: int, page_length: int, commands: list[tuple[bool, int, int]]
) -> None:
    """Whatever enters and leaves in whatever order; a row that does not fit is refused whole."""
    shadow = Shadow(store_of(pages, page_length), pages)
    for enter, length, which in commands:
        if enter:
            free = shadow.store.free_pages
            if pages_of(length, page_length) > free:
                with pytest.raises(CapacityError, match=f"only {free} are free"):
                    shadow.store.allocate(length)
            else:
                slot = shadow.store.allocate(length)
                assert len(slot.places) == length == len(slot.tokens) == len(slot.turns)
                shadow.slots.append(slot)
        elif shadow.slots:
            shadow.store.release(shadow.slots.pop(which % len(shadow.slots)))
        shadow.check()
    for slot in shadow.slots:
        shadow.store.release(slot)
    assert shadow.store.free_pages == pages


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), COMMANDS)
def test_a_base_is_given_exactly_when_places_are_consecutive(
    page_length: int, commands: list[tuple[bool, int, int]]
) -> None:
    """Attention reads a consecutive row as a view from `base`; a scattered one is gathered."""
    store = store_of(12, page_length)
    slots: list[Slot] = []
    for enter, length, which in commands:
        if enter and pages_of(length, page_length) <= store.free_pages:
            slots.append(store.allocate(length))
            places = slots[-1].places
            run = np.arange(places[0], places[0] + length)
            consecutive = bool(np.array_equal(places, run))
            assert (slots[-1].base is not None) <= consecutive
            if slots[-1].base is None:
                assert (np.diff(slots[-1].pages) != 1).any()
            else:
                assert slots[-1].base == places[0]
        elif slots:
            store.release(slots.pop(which % len(slots)))


def test_consecutive_pages_are_preferred_to_scattered_ones() -> None:
    store = store_of(6, 2)
    first, second, _ = (store.allocate(2) for _ in range(3))
    store.release(first)
    assert store.allocate(4).base == 6
    store.release(second)
    assert store.allocate(4).base == 0


def test_scattered_pages_are_used_when_nothing_else_is_left() -> None:
    store = store_of(3, 2)
    first, _, third = (store.allocate(2) for _ in range(3))
    store.release(first)
    store.release(third)
    slot = store.allocate(3)
    assert slot.base is None
    assert slot.places.tolist() == [0, 1, 4]


def test_writes_land_at_their_places_and_nowhere_else() -> None:
    store = store_of(4, 4)
    slot = store.allocate(10)
    k, v = torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    places = torch.from_numpy(slot.places[[0, 4, 9]])
    store.write(1, places, k, v)
    assert torch.equal(store.keys[1].data[places], k)
    assert torch.equal(store.values[1].data[places], v)
    untouched = torch.ones(16, dtype=torch.bool).index_fill(0, places, False)
    assert not store.keys[1].data[untouched].any() and not store.values[1].data[untouched].any()
    assert not store.keys[0].data.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_room_behind_a_row_holds_nothing_of_those_before(dtype: torch.dtype) -> None:
    """Longer rows' keys are read beside it, and zero times nan would be nan."""
    store = KVStore(INFO, pages=3, page_length=4, dtype=dtype, device=torch.device("cpu"))
    for pool in (*store.keys, *store.values):
        for tensor in (pool.data, pool.scale):
            if tensor is not None:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 7)
    slot = store.allocate(5, room=9)
    assert slot.room == 12 and len(slot.pages) == 3 and len(slot.places) == 5
    for pool in (*store.keys, *store.values):
        assert (pool.data[5:] == 0).all()
        assert pool.scale is None or (pool.scale[5:] == 0).all()
        assert not (pool.data[:5] == 0).any()


def test_a_slot_released_twice_is_noticed() -> None:
    store = store_of(2, 4)
    slot = store.allocate(3)
    store.release(slot)
    with pytest.raises(AssertionError, match="twice"):
        store.release(slot)


def test_a_fresh_slot_says_that_nothing_was_computed() -> None:
    """Also one whose pages another row has used before."""
    store = store_of(1, 4)
    slot = store.allocate(4)
    slot.tokens[:], slot.turns[:] = 7, 3
    store.release(slot)
    again = store.allocate(4)
    assert (again.tokens == -1).all() and (again.turns == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_page_bytes_are_those_allocated(dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    with Allocations() as counted:
        store = KVStore(INFO, pages=5, page_length=8, dtype=dtype, device=device)
    assert counted.live == 5 * page_bytes(INFO, 8, dtype) and store.free_pages == 5


def test_int8_is_within_half_a_step_of_each_head() -> None:
    """Heads of very different size do not share a scale; zeros stay zeros."""
    x = torch.randn(6, 3, 16, generator=torch.Generator().manual_seed(0))
    x = x * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    x[0, 1] = 0
    whole, scale = quantised(x)
    assert scale.shape == (6, 3, 1) and scale.dtype == torch.float32
    assert whole.abs().amax() == 127 and torch.equal(whole, whole.round())
    assert ((whole * scale - x).abs() <= 0.5001 * scale).all()
    assert not whole[0, 1].any()


def test_pages_are_counted() -> None:
    assert [pages_of(n, 8) for n in (1, 8, 9, 16)] == [1, 1, 2, 2]


# --------------------------------------------------------------------- forks and shared prompts


@dataclass
class Contents:
    """What each row must read back, whatever happens to rows beside it: `(N,)` numbers, or NaN."""

    store: KVStore
    rows: list[tuple[Slot, np.ndarray]] = field(default_factory=list)
    written: int = 0

    def admit(self, length: int, other: int) -> None:
        """A new row, which shares the whole first page of another one if that is written."""
        shared: tuple[int, ...] = ()
        size = self.store.page_length
        fresh = np.full(length, np.nan)
        if self.rows and length > size:
            slot, held = self.rows[other % len(self.rows)]
            if len(held) > size and not np.isnan(held[:size]).any():
                shared, fresh[:size] = slot.pages[:1], held[:size]
        needed = pages_of(length, size) - len(shared)
        if needed > self.store.free_pages:
            before = self.store._holders.copy()
            with pytest.raises(CapacityError, match="are free"):
                self.store.allocate(length, shared)
            assert (self.store._holders == before).all(), "a refused row took something"
            return
        self.rows.append((self.store.allocate(length, shared), fresh))

    def fork(self, which: int) -> None:
        slot, held = self.rows[which % len(self.rows)]
        self.rows.append((self.store.fork(slot), held.copy()))

    def write(self, which: int, start: int, count: int) -> None:
        """Store numbers never used before, or be refused whole."""
        place = which % len(self.rows)
        slot, held = self.rows[place]
        positions = np.arange(start % len(held), len(held))[:count]
        before = self.store._holders.copy()
        try:
            slot = self.store.own(slot, positions)
        except CapacityError:
            assert (self.store._holders == before).all(), "a refused write took something"
            return
        numbers = np.arange(self.written + 1, self.written + 1 + len(positions), dtype=np.float64)
        self.written += len(positions)
        new = torch.from_numpy(numbers)[:, None, None].expand(-1, 1, 2)
        self.store.write(0, torch.from_numpy(slot.places[positions]), new, -new)
        held[positions] = numbers
        self.rows[place] = slot, held

    def finish(self, which: int) -> None:
        self.store.release(self.rows.pop(which % len(self.rows))[0])

    def check(self) -> None:
        for slot, held in self.rows:
            known = ~np.isnan(held)
            keys, values = (
                self.read(pool[0], slot) for pool in (self.store.keys, self.store.values)
            )
            assert (keys[known] == held[known]).all() and (values[known] == -held[known]).all()
        in_use = {page for slot, _ in self.rows for page in slot.pages}
        assert self.store.free_pages == len(self.store._holders) - len(in_use)

    def read(self, pool: Pool, slot: Slot) -> np.ndarray:
        """The whole numbers stored, which int8 gives back but for fp32 rounding."""
        places = torch.from_numpy(slot.places)
        return np.asarray(pool.read(lambda x: x[places], torch.float64)[:, 0, 0].round(decimals=2))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "fork", "write", "write", "accept", "revoke", "finish"]),
        st.integers(0, 30),
        st.integers(0, 30),
        st.integers(1, 6),
    ),
    min_size=100,
    max_size=100,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(operations=OPERATIONS)
def test_ten_thousand_operations_leak_nothing_and_mix_no_rows(
    operations: list[tuple[str, int, int, int]], dtype: torch.dtype
) -> None:
    """100 runs of 100: admit (sharing a page), fork, write, accept a fork, revoke it, finish; what
    does not fit is refused whole."""
    info = replace(INFO, layers=1, kv_heads=1, head_size=2)
    store = KVStore(info, pages=9, page_length=2, dtype=dtype, device=torch.device("cpu"))
    contents = Contents(store)
    for what, which, where, count in operations:
        if what == "admit":
            contents.admit(1 + where % 9, which)
        elif contents.rows and what == "fork":
            contents.fork(which)
        elif contents.rows and what == "write":
            contents.write(which, where, count)
        elif contents.rows and what == "accept":  # the fork takes the place of what it came from
            contents.fork(which)
            contents.write(len(contents.rows) - 1, where, count)
            contents.finish(which % (len(contents.rows) - 1))
        elif contents.rows and what == "revoke":
            contents.fork(which)
            contents.write(len(contents.rows) - 1, where, count)
            contents.finish(len(contents.rows) - 1)
        elif contents.rows:
            contents.finish(which)
        contents.check()
    while contents.rows:
        contents.finish(0)
    assert store.free_pages == 9


def test_writing_without_owning_would_mix_rows() -> None:
    """Negative control: a fork that writes into shared pages changes what the other one reads."""
    store = store_of(2, 4)
    slot = store.allocate(4)
    fork = store.fork(slot)
    new = torch.ones(1, 1, 4)
    store.write(0, torch.from_numpy(fork.places[:1]), new, new)
    assert store.keys[0].data[slot.places[0]].any()
    owned = store.own(fork, np.array([0]))
    assert owned.pages != slot.pages and store.own(slot, np.array([0])) is slot


def test_a_fork_keeps_its_own_record_of_what_was_stored() -> None:
    store = store_of(1, 4)
    slot = store.allocate(4)
    fork = store.fork(slot)
    fork.tokens[0] = 7
    assert slot.tokens[0] == -1
