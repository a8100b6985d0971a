"""The dilated unmasking schedule: its published vector, uneven blocks, skipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_decode.errors import OptionError
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.types import Request
from tests.unit.dependency_cases import (
    RowLaws,
    exact_llada,
    generate,
    make,
    order_of,
)
from tests.unit.sampler_cases import chosen, logits_with_top, make_canvas, random_logits, run

SETTINGS: list[dict[str, Any]] = [{}, {"base": 3}, {"skip": 0.6, "law": "rank"}]


@pytest.fixture(params=SETTINGS, ids=str)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return SAMPLERS.create("dus", request.param)


class TestLaws(RowLaws):
    """Those of `dependency_cases`."""


def combs(width: int, **options: Any) -> list[list[int]]:
    """Positions of each step, counted from 1 as in the paper."""
    canvas = make_canvas(width=width)
    decisions = run(make("dus", **options), canvas, random_logits(canvas))
    return [[p + 1 for p in chosen(d)] for d in decisions]


@pytest.mark.parametrize(
    ("width", "base", "expected"),
    [
        (8, 2, [[1, 5], [3, 7], [2, 4, 6, 8]]),
        (16, 4, [[1, 5, 9, 13], [2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16]]),
        (9, 3, [[1, 4, 7], [2, 3, 5, 6, 8, 9]]),
        (6, 2, [[1, 4], [2, 3, 5, 6]]),
        (10, 3, [[1, 4, 7, 10], [2, 3, 5, 6, 8, 9]]),
        (1, 2, [[1]]),
        (2, 2, [[1, 2]]),
        (5, 100, [[1, 2, 3, 4, 5]]),
    ],
)
def test_combs_are_the_published_ones(width: int, base: int, expected: list[list[int]]) -> None:
    """A block of a power of a takes log_a of it steps; others may be swept up sooner."""
    assert combs(width, base=base) == expected


def test_a_block_of_thirty_two_takes_five_forwards() -> None:
    request = Request([5, 6, 7], gen_length=64, block_length=32, stop_at_eos=False)
    (result,) = generate(exact_llada(), make("dus"), [request])
    assert result.forwards == 10
    assert [len(step) for step in order_of(result)] == 2 * [2, 2, 4, 8, 16]


def test_frozen_positions_do_not_thin_the_comb() -> None:
    """Places count masks: two frozen positions leave the combs of a block of four."""
    request = Request([5], gen_length=6, block_length=6, frozen={1: 9, 2: 9}, stop_at_eos=False)
    (result,) = generate(exact_llada(), make("dus"), [request])
    assert order_of(result) == [(1, 5), (4, 6)]


def test_skipped_positions_wait_and_the_last_step_takes_all() -> None:
    confidences = [0.9, 0.9, 0.4, 0.9, 0.5, 0.9, 0.9, 0.2]
    canvas, sampler = make_canvas(width=8), make("dus", skip=0.6)
    decisions = run(sampler, canvas, logits_with_top(confidences))
    assert [chosen(d) for d in decisions] == [[0], [6], [1, 2, 3, 4, 5, 7]]
    nobody = run(sampler, canvas, logits_with_top([0.3, 0.3, 0.3, 0.3, 0.5, 0.3, 0.4, 0.3]))
    assert [chosen(d) for d in nobody] == [[4], [6], [0, 1, 2, 3, 5, 7]]
    assert torch.equal(canvas.masked, canvas.eligible)


def test_without_skipping_confidence_does_not_matter() -> None:
    model = exact_llada()
    plain, never = (generate(model, make("dus", skip=skip)) for skip in (None, 0.0))
    assert [order_of(r) for r in plain] == [order_of(r) for r in never]


def test_a_base_below_two_is_refused() -> None:
    with pytest.raises(OptionError, match="base must be >= 2"):
        make("dus", base=1)
