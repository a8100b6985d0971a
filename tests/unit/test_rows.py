"""Requests: what is refused and how a row is laid out; a row's life without a model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dlm_decode.caches import RowPlan
from dlm_decode.errors import CapabilityError, DlmDecodeError, RequestError
from dlm_decode.models import ModelInfo
from dlm_decode.models.toy import random_llada
from dlm_decode.rows import COMMIT, OVERWRITE, REMASK, Row, TurnRecord, check_request, make_row
from dlm_decode.schedules import SCHEDULES
from dlm_decode.types import Request

INFO = random_llada(layers=1, hidden=8, heads=2, vocab=32, max_positions=24).info
MASK, END = INFO.mask_id, INFO.end_ids[0]
FIXED = SCHEDULES.create("fixed")


def row_of(request: Request, info: ModelInfo = INFO, seed: int = 0) -> Row:
    return make_row(request, info, FIXED, seed)


def refusal(request: Request, info: ModelInfo = INFO) -> str:
    with pytest.raises(DlmDecodeError) as caught:
        check_request(request, info)
    with pytest.raises(type(caught.value)):
        make_row(request, info, FIXED, 0)
    return str(caught.value)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": []}, "the prompt is empty"),
    ({"prompt_ids": [1, 32]}, r"prompt_ids\[1\] is 32, but ids of this model run from 0 to 31"),
    ({"prompt_ids": [-1]}, r"prompt_ids\[0\] is -1"),
    ({"prompt_ids": [1.0]}, r"prompt_ids\[0\] must be an integer id, got 1.0"),
    ({"prompt_ids": [True]}, r"prompt_ids\[0\] must be an integer id, got True"),
    ({"prompt_ids": ["a"]}, r"prompt_ids\[0\] must be an integer id, got 'a'"),
    ({"prompt_ids": [1, MASK]}, "is the mask id 28.*set infill=True"),
    ({"suffix_ids": [99]}, r"suffix_ids\[0\] is 99"),
    ({"suffix_ids": [MASK]}, r"suffix_ids\[0\] is the mask id"),
    ({"frozen": {0: MASK}}, r"frozen\[0\] is the mask id"),
    ({"frozen": {0: 40}}, r"frozen\[0\] is 40"),
    ({"frozen": {4: 1}}, r"frozen offset 4 is outside the generated region \[0, 4\)"),
    ({"frozen": {-1: 1}}, "frozen offset -1 is outside"),
    ({"frozen": {"0": 1}}, "frozen offset '0' is outside"),
    ({"frozen": [1]}, r"frozen must be a mapping from offsets to ids, got \[1\]"),
    ({"suffix_ids": None}, "suffix_ids must be a list of ids, got None"),
    ({"stop": "x"}, "stop must be a list of strings, got 'x'"),
    ({"stop": None}, "stop must be a list of strings, got None"),
    ({"stop": [5]}, "stop must hold strings, got 5"),
    ({"infill": "no"}, "infill must be True or False, got 'no'"),
    ({"stop_at_eos": 1}, "stop_at_eos must be True or False, got 1"),
    ({"frozen": {0: 1, 1: 1, 2: 1, 3: 1}}, "nothing to decode"),
    ({"gen_length": 0}, "gen_length must be at least 1, got 0"),
    ({"gen_length": 0, "infill": True}, "nothing to decode"),
    ({"gen_length": -1, "infill": True}, "gen_length must be at least 0, got -1"),
    ({"gen_length": 4.0}, "gen_length must be an integer, got 4.0"),
    ({"gen_length": None}, "gen_length must be an integer, got None"),
    ({"gen_length": 23}, "take 25 positions, but the model has 24"),
    ({"suffix_ids": [1] * 19}, r"suffix \(19\) take 25 positions"),
    ({"block_length": 0}, "block_length must be at least 1, got 0"),
    ({"block_length": True}, "block_length must be an integer, got True"),
    ({"eos_ban_length": -1}, "eos_ban_length must be at least 0"),
    ({"sample": -1}, "sample must be at least 0"),
    ({"sample": None}, "sample must be an integer"),
    ({"seed": 0.5}, "seed must be an integer, got 0.5"),
    ({"seed": 2**63}, "seed must fit 64 bits"),
    ({"eos": "forbid"}, "eos must be one of none, no_confidence, banned, ban_start, got 'forbid'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_requests_that_cannot_be_decoded_are_refused(changes: dict[str, Any], message: str) -> None:
    """Each mistake is told with its place, what is allowed and what was given."""
    base = Request([1, 2], gen_length=4)
    check_request(base, INFO)
    found = refusal(replace(base, **changes))
    assert re.search(message, found), found
    with pytest.raises(RequestError):
        check_request(replace(base, **changes), INFO)


def test_eos_policies_need_an_end_id() -> None:
    info = replace(INFO, end_ids=())
    check_request(Request([1]), replace(info, max_positions=512))
    with pytest.raises(CapabilityError, match="'banned' needs a model with an end-of-text id"):
        check_request(Request([1], gen_length=2, eos="banned"), info)


def test_numpy_integers_are_integers() -> None:
    ids = np.array([1, 2])
    row = row_of(Request(ids.tolist(), gen_length=int(np.int64(3)), seed=np.int64(4)))
    check_request(Request(list(ids), gen_length=np.int64(3)), INFO)
    assert row.tokens.tolist() == [1, 2, MASK, MASK, MASK]


# ------------------------------------------------------------------------------------ the layout


def test_a_row_is_prompt_masks_and_suffix_with_frozen_tokens_in_place() -> None:
    row = row_of(Request([1, 2], gen_length=4, suffix_ids=[7, 8], frozen={0: 5, 2: 6}))
    assert row.tokens.tolist() == [1, 2, 5, MASK, 6, MASK, 7, 8]
    assert row.editable.tolist() == [False, False, False, True, False, True, False, False]
    assert np.array_equal(row.masked, row.editable)
    assert (row.span.start, row.span.stop, row.span.block_length) == (2, 6, 32)


@pytest.mark.parametrize(
    ("prompt", "length", "suffix", "span"),
    [
        ([1, MASK, 2], 0, [], (1, 2)),
        ([1, MASK, 2], 3, [], (1, 6)),
        ([1, 2], 0, [3, MASK, 4, MASK, 5], (3, 6)),
        ([1, 2], 2, [3, MASK, 4], (2, 6)),
        ([MASK, 2], 2, [MASK], (0, 5)),
    ],
)
def test_holes_are_inside_the_span(
    prompt: list[int], length: int, suffix: list[int], span: tuple[int, int]
) -> None:
    """The span holds every editable position, and the generated region if there is one."""
    row = row_of(Request(prompt, gen_length=length, suffix_ids=suffix, infill=True))
    assert (row.span.start, row.span.stop) == span
    outside = np.ones(row.length, dtype=bool)
    outside[span[0] : span[1]] = False
    assert not row.editable[outside].any()


def test_block_lengths_come_from_the_request_then_the_model_then_the_default() -> None:
    own = replace(INFO, block_length=8)
    assert row_of(Request([1], gen_length=4)).span.block_length == 32
    assert row_of(Request([1], gen_length=4), own).span.block_length == 8
    assert row_of(Request([1], gen_length=4, block_length=2), own).span.block_length == 2


def test_the_first_window_has_something_to_decide() -> None:
    row = row_of(Request([1], gen_length=8, block_length=2, frozen={0: 1, 1: 1, 2: 1, 3: 1}))
    assert (row.window.start, row.window.stop, row.window.index) == (5, 7, 2)
    assert row.blocks == 4


def test_the_key_follows_seed_sample_and_content() -> None:
    base = Request([1, 2], gen_length=4)
    keys = [
        row_of(base).key,
        row_of(base, seed=1).key,
        row_of(replace(base, sample=1)).key,
        row_of(replace(base, gen_length=5)).key,
        row_of(replace(base, frozen={1: 3})).key,
        row_of(replace(base, prompt_ids=[2, 1])).key,
    ]
    assert len(set(keys)) == len(keys)
    assert row_of(replace(base, seed=1), seed=9).key == keys[1]
    assert row_of(replace(base, id="named", block_length=2)).key == keys[0]


# --------------------------------------------------------------------------------------- its life


def record(codes: list[int], tokens: list[int]) -> TurnRecord:
    sure = np.full(len(codes), 0.5, dtype=np.float32)
    return TurnRecord(np.array(codes), np.array(tokens), sure, np.zeros(len(codes), np.int64))


def turn(row: Row, codes: list[int], tokens: list[int]) -> None:
    row.charge([RowPlan(np.arange(row.length), "full")])
    row.apply(row.window.start, record(codes, tokens))
    row.advance(FIXED)


def test_commits_never_fall_and_remasked_positions_open_again() -> None:
    row = row_of(Request([1], gen_length=3))
    turn(row, [COMMIT, COMMIT, 0], [4, 5, 0])
    assert (row.commits, row.last, row.masked.tolist()) == (2, (1, 2), [False, False, False, True])
    turn(row, [REMASK, OVERWRITE, 0], [0, 9, 0])
    assert row.commits == 3
    assert row.masked.tolist() == [False, True, False, True]
    assert row.tokens[2] == 9
    assert row.steps[1].positions == (2,) and row.steps[1].remasked == (1,)
    turn(row, [COMMIT, 0, COMMIT], [6, 0, 7])
    assert row.tokens.tolist() == [1, 6, 9, 7] and row.commits == 5


def test_remasked_tokens_are_masks_for_the_model_again() -> None:
    """A forward must see the mask id there, not the token that was taken back."""
    row = row_of(Request([1], gen_length=2))
    turn(row, [COMMIT, 0], [4, 0])
    row.apply(1, record([REMASK, 0], [MASK, 0]))
    assert row.masked[1] and row.tokens[1] == MASK


def test_a_new_block_begins_afresh() -> None:
    row = row_of(Request([1], gen_length=4, block_length=2))
    row.fresh = False
    turn(row, [COMMIT, 0], [4, 0])
    assert (row.step, row.turn, row.fresh, row.window.index) == (1, 1, False, 0)
    turn(row, [0, COMMIT], [0, 4])
    assert (row.step, row.turn, row.fresh, row.window.index) == (0, 2, True, 1)


def test_since_refresh_counts_from_a_refresh_only() -> None:
    """Forwards that store nothing are no refresh: before the first one there is nothing to see."""
    row = row_of(Request([1], gen_length=4))
    query = np.arange(row.length)
    seen = []
    for kind in ("full", "full", "refresh", "window", "full", "refresh"):
        row.charge([RowPlan(query, kind)])
        seen.append(row.since_refresh)
    assert seen == [-1, -1, 0, 1, 2, 0]


def test_costs_count_every_copy() -> None:
    row = row_of(Request([1, 2], gen_length=4))
    row.charge([RowPlan(np.arange(6), "refresh")], 2)
    row.charge([RowPlan(np.arange(3), "window")] * 2, 2)
    assert row.computed == 24 and dict(row.forwards) == {"refresh": 1, "window": 1}


@pytest.mark.parametrize(
    ("tokens", "masked", "ends"),
    [
        ([4, END, 5, MASK], [0, 0, 0, 1], True),
        ([END, MASK, MASK, MASK], [0, 1, 1, 1], True),
        ([4, MASK, END, MASK], [0, 1, 0, 1], False),
        ([4, 5, MASK, MASK], [0, 0, 1, 1], False),
    ],
)
def test_a_row_has_ended_when_all_before_its_first_end_id_is_decided(
    tokens: list[int], masked: list[int], ends: bool
) -> None:
    row = row_of(Request([1, 2], gen_length=4))
    row.tokens[2:], row.masked[2:] = tokens, np.array(masked, bool)
    assert row.ended(INFO.end_ids, revokes=False) is ends
    unasked = row_of(Request([1, 2], gen_length=4, stop_at_eos=False))
    unasked.tokens[2:], unasked.masked[2:] = tokens, np.array(masked, bool)
    assert not unasked.ended(INFO.end_ids, revokes=False)
    revoking = row.ended(INFO.end_ids, revokes=True)
    assert not revoking, "a revoking sampler may take it back while its window has masks"


def test_nothing_ends_before_a_given_suffix() -> None:
    row = row_of(Request([1, 2], gen_length=2, suffix_ids=[5]))
    row.tokens[2], row.masked[2] = END, False
    assert not row.ended(INFO.end_ids, revokes=False)


def test_closing_fills_what_is_open_with_the_end_id_and_counts_up_to_it() -> None:
    row = row_of(Request([1, 2], gen_length=4))
    row.tokens[2:4], row.masked[2:4] = [5, END], False
    result = row.close(INFO)
    assert result.ids == (5, END, END, END)
    assert (result.tokens, result.finish_reason) == (1, "eos")


def test_a_row_that_is_told_to_end_counts_its_tokens_up_to_the_filling() -> None:
    """`tokens` counts those before the first end id, whoever put it there."""
    row = row_of(Request([1, 2], gen_length=4))
    row.tokens[2:4], row.masked[2:4] = [5, 6], False
    result = row.close(INFO)
    assert result.ids == (5, 6, END, END)
    assert (result.tokens, result.finish_reason) == (2, "eos")


def test_end_ids_of_the_prompt_do_not_end_the_text() -> None:
    """An infilled prompt with a closed chat turn in it: only what was decoded can end the row."""
    row = row_of(Request([1, MASK, END, 2], gen_length=3, infill=True))
    row.tokens[row.masked] = [7, 8, 9, 3]
    row.masked[:] = False
    result = row.close(INFO)
    assert (result.tokens, result.finish_reason) == (len(result.ids), "length")


def test_a_frozen_end_id_of_the_generated_region_does_end_it() -> None:
    row = row_of(Request([1], gen_length=3, frozen={2: END}))
    row.tokens[row.masked], row.masked[:] = [7, 8], False
    assert (row.close(INFO).tokens, row.close(INFO).finish_reason) == (2, "eos")
