"""Fast-dLLM v2's windows inside a block, and the cache that computes only them."""

from __future__ import annotations

import numpy as np
import pytest

from dlm_decode.api import Decoder
from dlm_decode.audit import audit_cache
from dlm_decode.caches import CACHES, RowView
from dlm_decode.errors import CapabilityError
from dlm_decode.schedules import SCHEDULES, Span, Window
from dlm_decode.types import Request
from tests.families import made
from tests.unit.test_cache_policies import model

BLOCKS = np.arange(16) // 8


def windows(span: Span, **options: int) -> list[tuple[int, int]]:
    schedule = SCHEDULES.create("sub_blocks", options)
    found = [schedule.first(span)]
    masked = np.ones(span.stop, dtype=bool)
    while found[-1].stop < span.stop:
        masked[: found[-1].stop] = False
        found.append(schedule.advance(span, found[-1], masked))
    assert schedule.blocks(span) == len(found) == found[-1].index + 1
    assert max(w.stop - w.start for w in found) <= schedule.widest(span)
    return [(w.start, w.stop) for w in found]


def test_windows_are_sub_blocks_and_a_blocks_first_token() -> None:
    behind_prompt = windows(Span(5, 19, 8), sub_length=4)
    assert behind_prompt == [(4, 8), (8, 9), (8, 12), (12, 16), (16, 17), (16, 19)]
    assert windows(Span(8, 16, 8), sub_length=4) == [(8, 9), (8, 12), (12, 16)]
    assert windows(Span(8, 16, 8), sub_length=4, lead=0) == [(8, 12), (12, 16)]
    assert windows(Span(0, 6, 4), sub_length=32, lead=0) == [(0, 4), (4, 6)]
    assert windows(Span(7, 14, 7), sub_length=3) == [(7, 8), (7, 10), (10, 13), (13, 14)]


def view(start: int, stop: int, masked: list[int], never: int = 16, *, shift: int = 1) -> RowView:
    """A row of two blocks of 8; K/V from `never` on were never stored, the others are fresh."""
    open_ = np.isin(np.arange(16), masked)
    stale = np.arange(16) >= never
    return RowView(16, Window(start, stop), open_, 0, 0, shift, (), BLOCKS, stale)


def query(row: RowView) -> tuple[int, int, int | None]:
    """First and last position computed, and the first one that is not seen."""
    plan = CACHES.create("sub_block").plan(row)
    return int(plan.query[0]), int(plan.query[-1]), plan.stop


def test_the_block_is_computed_while_the_windows_first_token_is_open() -> None:
    rest = list(range(12, 16))
    assert query(view(8, 12, [9, 11, *rest], 8)) == (7, 15, 16), "a new block"
    assert query(view(8, 12, [9, 11, *rest])) == (8, 11, 16)
    assert query(view(12, 16, rest)) == (8, 15, 16)
    assert query(view(12, 16, rest[1:])) == (12, 15, 16)


def test_a_blocks_first_token_takes_the_block_before_alone() -> None:
    row = view(8, 9, list(range(8, 16)), 8)
    assert query(row) == (7, 7, 8)
    assert query(view(8, 9, list(range(8, 16)), 8, shift=0)) == (8, 15, 16)


def test_speculation_stays_lossless_over_it() -> None:
    request = Request([3, 5, 7], gen_length=13, block_length=8, stop_at_eos=False)
    results = [
        Decoder(made("fast_dllm_v2"), sampler, "sub_block", "sub_blocks", debug=True).generate(
            request
        )[0]
        for sampler in ("left_to_right", "self_speculative+left_to_right")
    ]
    steps = [[(s.positions, s.tokens) for s in r.trace.steps] for r in results]
    assert steps[0] == steps[1]
    assert results[1].trace.drafted, "states were forwarded ahead of their turn"
    assert results[1].forwards <= results[0].forwards


def test_the_audit_tells_what_it_saves_and_costs() -> None:
    request = Request([3, 5, 7], gen_length=29, block_length=16, stop_at_eos=False)
    reports = {
        cache: audit_cache(
            Decoder(made("fast_dllm_v2"), "llada", cache, "sub_blocks", options={"sub_length": 4}),
            [request],
        )
        for cache in ("block_causal", "sub_block")
    }
    exact, ours = reports["block_causal"], reports["sub_block"]
    assert exact.logit_error < 1e-4 < ours.logit_error
    assert ours.computed < exact.computed < exact.uncached


def test_models_that_look_right_are_refused_with_the_reason() -> None:
    with pytest.raises(CapabilityError, match="looks right, at positions that this cache leaves"):
        Decoder(model("llada"), cache="sub_block")
