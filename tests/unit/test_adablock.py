"""AdaBlock: scripted predictions give an exact list of blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dlm_decode.api import Decoder
from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.models.toy import copy_task
from dlm_decode.schedules import SCHEDULES, Span, Window
from dlm_decode.types import Output, Request
from tests.unit.sampler_cases import make_canvas
from tests.unit.wrapper_cases import decode, steps_of


def focus(tokens: list[int], p: list[float], *, step: int = 0, **options: Any) -> int:
    """The end of a block that begins at 10, of usual length 3, with delimiters 7 and 8."""
    given = {"delimiters": "7 8", "lookahead": 0.75} | options
    schedule = SCHEDULES.create("adablock", given).bound(None, 10)
    canvas = make_canvas(width=len(tokens), step=step)
    canvas = replace(canvas, block_length=canvas.block_length * 0 + 3)
    ids, sure = torch.tensor([tokens]), torch.tensor([p])
    valid = torch.ones_like(ids, dtype=torch.bool)
    found = schedule.focus(canvas, Output({"top1": ids, "p1": sure, "lse": sure, "valid": valid}))
    assert found is not None
    return int(found[0])


def test_the_surest_delimiter_ends_the_block() -> None:
    sure = [0.9, 0.4, 0.5, 0.6, 0.2, 0.1, 0.1, 0.9]
    assert focus([2, 7, 3, 8, 7, 2, 2, 2], sure) == 14, "the likeliest, not the first"
    assert focus([2, 7, 3, 2, 7, 2, 2, 2], sure) == 12
    assert focus([7, 2, 3, 2, 2, 2, 2, 2], sure) == 11, "a block of one"
    assert focus([2, 2, 3, 2, 7, 2, 2, 2], sure) == 13, "0.2 is not enough"
    assert focus([2, 2, 3, 2, 7, 2, 2, 2], sure, delimiter_threshold=0.2) == 15
    assert focus([2, 2, 3, 2, 2, 2, 2, 7], sure) == 13, "beyond floor(.75 * 8) positions"
    assert focus([2, 7, 3, 8, 7, 2, 2, 2], sure, step=1) == 18, "only when the block begins"


class Spelling:
    """A tokenizer of ten ids."""

    words = ("a", "\n", ".", " \n", "b", "\n", "c", ",", "d", "e")

    def __len__(self) -> int:
        return len(self.words)

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return ["".join(self.words[i] for i in row) for row in rows]


def bound(delimiters: str | None, tokenizer: Any) -> tuple[int, ...] | None:
    made = SCHEDULES.create("adablock", {"delimiters": delimiters}).bound(tokenizer, 10)
    return made.ids  # type: ignore[attr-defined]


def test_delimiters_are_ids_or_what_spells_the_text() -> None:
    assert bound(None, Spelling()) == (1, 5)
    assert bound(".", Spelling()) == (2,)
    assert bound("7, 9", None) == (7, 9)
    assert bound(None, None) == ()
    with pytest.raises(CapabilityError, match="no tokenizer"):
        bound(".", None)
    with pytest.raises(OptionError, match="no token of this model"):
        bound("xyz", Spelling())
    with pytest.raises(OptionError, match="below 10"):
        bound("10", None)


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_blocks_follow_the_text(cache: str) -> None:
    """One sequence, known from the start: blocks end with id 7, or after four tokens."""
    text = (1, 2, 7, 3, 4, 5, 6, 1, 7, 7, 2, 3)
    model = copy_task(text, offset=1)
    options = {"delimiters": "7", "lookahead": 0.5, "delimiter_threshold": 0.0, "threshold": 0.5}
    decoder = Decoder(model, "threshold", cache, "adablock", options=options, debug=True)
    request = Request([0], gen_length=12, block_length=4)
    (result,) = decoder.generate(request)
    assert result.ids == text
    blocks = [step.positions for step in result.trace.steps]
    assert blocks == [(1, 2, 3), (4, 5, 6, 7, 8, 9), (10,), (11, 12)]


def test_without_delimiters_blocks_are_fixed() -> None:
    ours = decode("threshold", schedule="adablock", cache="dual")
    assert steps_of(ours) == steps_of(decode("threshold", cache="dual"))
    off = decode("llada", schedule="adablock", delimiters="3 4 5", delimiter_threshold=9.0)
    assert steps_of(off) == steps_of(decode("llada"))
    on = decode("llada", schedule="adablock", delimiters="3 4 5 6 7 8 9", delimiter_threshold=0.0)
    assert steps_of(on) != steps_of(off)


def test_a_block_begins_with_all_it_may_come_to_hold() -> None:
    schedule, span = SCHEDULES.create("adablock"), Span(5, 45, 8)
    assert schedule.first(span) == Window(5, 15, 0)
    assert schedule.widest(span) == 10 and schedule.widest(Span(5, 25, 8)) == 8
