"""R2-dLLM's three extra rules, each by itself on scripted predictions, and all of them off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.errors import CapabilityError
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.types import Canvas, Output
from tests.unit.sampler_cases import apply, chosen, make_canvas
from tests.unit.wrapper_cases import decode, steps_of

OFF = {"spatial": False, "repeat": False, "temporal": False}
NEVER = SAMPLERS.create("threshold", {"threshold": 2.0})


def make(*rules: str, **options: Any) -> Sampler:
    """The wrapper with only `rules` on, over one token a turn."""
    made = SAMPLERS.create("r2", OFF | dict.fromkeys(rules, True) | options)
    return replace(made, inner=NEVER)  # type: ignore[type-var]


def output(c: Sequence[float], tokens: Sequence[int] | None = None) -> Output:
    """Tokens 2, 3, ... unless given, with confidences c."""
    ids = torch.tensor([tokens or list(range(2, 2 + len(c)))])
    valid = torch.ones_like(ids, dtype=torch.bool)
    p = torch.tensor([c], dtype=torch.float64)
    return Output({"top1": ids, "p1": p, "lse": p * 0, "valid": valid})


def turns(sampler: Sampler, canvas: Canvas, outputs: Sequence[Output]) -> list[list[int]]:
    state, found = sampler.init(canvas), []
    for out in outputs:
        decision, state = sampler.decide(canvas, out, state)
        found.append(chosen(decision))
        canvas = apply(canvas, decision)
    return found


def masked(*flags: int) -> Tensor:
    return torch.tensor([flags]).bool()


@pytest.mark.parametrize(
    ("flags", "c", "expected"),
    [
        # the best goes by itself; windows of three are judged on what is left
        ((1, 1, 1, 1, 1), [0.99, 0.8, 0.8, 0.85, 0.1], [0, 1, 2, 3]),
        ((1, 1, 1, 1, 1), [0.99, 0.7, 0.8, 0.85, 0.1], [0]),  # means .75, .78, .58
        ((1, 0, 1, 1, 0), [0.99, 0.0, 0.9, 0.9, 0.0], [0, 2, 3]),  # one decided is allowed
        ((1, 0, 0, 1, 0), [0.99, 0.0, 0.0, 0.9, 0.0], [0]),  # two are not
    ],
)
def test_sweep(flags: tuple[int, ...], c: list[float], expected: list[int]) -> None:
    canvas = make_canvas(masked=masked(*flags))
    assert turns(make("spatial"), canvas, [output(c)])[0] == expected


def test_a_window_does_not_reach_over_the_end_of_the_block() -> None:
    """And a block that is shorter than a window is left alone."""
    canvas = make_canvas(width=5)
    short = replace(canvas, stop=canvas.start + 2, eligible=masked(1, 1, 0, 0, 0))
    sampler = make("spatial", max_decided=3)
    assert turns(sampler, short, [output([0.99, 0.95, 0.9, 0.9, 0.9])])[0] == [0]
    assert turns(make("spatial", width=9), canvas, [output([0.9] * 5)])[0] == [0]


@pytest.mark.parametrize(
    ("tokens", "c", "keep", "expected"),
    [
        ([2, 5, 5, 5, 3], [0.99, 0.7, 0.7, 0.85, 0.1], "confidence", [0, 3]),
        ([2, 5, 5, 5, 3], [0.99, 0.7, 0.7, 0.85, 0.1], "mid", [0, 2]),
        ([2, 5, 5, 5, 3], [0.99, 0.7, 0.7, 0.8, 0.1], "confidence", [0]),  # above, not at
        ([2, 5, 6, 5, 3], [0.99, 0.9, 0.9, 0.9, 0.1], "confidence", [0]),  # runs of one
        ([2, 5, 5, 6, 6], [0.99, 0.9, 0.85, 0.85, 0.9], "confidence", [0, 1, 4]),
    ],
)
def test_repeat(tokens: list[int], c: list[float], keep: str, expected: list[int]) -> None:
    canvas = make_canvas(width=5)
    assert turns(make("repeat", keep=keep), canvas, [output(c, tokens)])[0] == expected


def test_a_decided_position_ends_a_run() -> None:
    canvas = make_canvas(masked=masked(1, 1, 0, 1, 1))
    found = turns(make("repeat"), canvas, [output([0.99, 0.9, 0.9, 0.9, 0.1], [2, 5, 5, 5, 7])])
    assert found[0] == [0]


@pytest.mark.parametrize(
    ("evaluated", "second", "expected"),
    [("last", 0.8, [2]), ("last", 0.7, []), ("ave", 0.9, [2]), ("max", 0.1, [2]), ("ave", 0.2, [])],
)
def test_streaks_are_of_three_turns(evaluated: str, second: float, expected: list[int]) -> None:
    """Position 2 keeps token 4, position 3 changes its own in the third turn."""
    canvas = make_canvas(width=5)
    outs = [
        output([0.99, 0.1, 0.8, 0.95, 0.1]),
        output([0.99, 0.98, 0.75, 0.95, 0.1]),
        output([0.99, 0.98, second, 0.97, 0.1], [2, 3, 4, 7, 6]),
    ]
    sampler = make("temporal", evaluated=evaluated)
    found = turns(sampler, canvas, outs)
    assert found == [[0], [1], sorted([3, *expected])]


def test_turns_that_did_not_compute_a_position_do_not_count() -> None:
    canvas = make_canvas(width=5)
    seen = output([0.99, 0.98, 0.9, 0.97, 0.1])
    partial = Output({**seen.stats, "valid": masked(1, 1, 0, 1, 1)})
    out = replace(canvas, eligible=masked(1, 1, 0, 1, 1))
    state = make("temporal").init(canvas)
    sampler = make("temporal")
    for given, where in ((seen, canvas), (partial, out), (seen, canvas)):
        decision, state = sampler.decide(where, given, state)
    assert 2 not in chosen(decision) and 3 in chosen(decision)
    assert state["own"]["count"][0].tolist() == [3, 3, 2, 3, 3]


@pytest.mark.parametrize("inner", ["threshold", "entropy", "klass"])
def test_with_all_rules_off_it_is_the_inner(inner: str) -> None:
    off = {f"r2__{rule}": False for rule in OFF}
    assert steps_of(decode(f"r2+{inner}", **off)) == steps_of(decode(inner))
    assert steps_of(decode(f"r2+{inner}", r2__confident=0.3)) != steps_of(decode(inner))


def test_an_inner_with_a_query_is_refused() -> None:
    with pytest.raises(CapabilityError, match="r2 cannot wrap punt"):
        decode("r2+punt")
