"""CCD, slow-fast sampling and the suffix anchor: their rules on scripted predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.types import Canvas, Output, Request
from tests.unit.sampler_cases import apply, chosen, make_canvas
from tests.unit.wrapper_cases import decode, steps_of


def make(name: str, **options: Any) -> Sampler:
    return SAMPLERS.create(name, options)


def output(c: Sequence[float], tokens: Sequence[int] | None = None) -> Output:
    """Tokens 2, 3, ... unless given; confidences c, and entropies that fall with them."""
    ids = torch.tensor([tokens or list(range(2, 2 + len(c)))])
    p = torch.tensor([c], dtype=torch.float64)
    valid = torch.ones_like(ids, dtype=torch.bool)
    return Output({"top1": ids, "p1": p, "lse": p * 0, "entropy": 1 - p, "valid": valid})


def turns(sampler: Sampler, canvas: Canvas, outputs: Sequence[Output]) -> list[list[int]]:
    """What each turn commits; the last output is repeated until nothing is open."""
    state, found = sampler.init(canvas), []
    outs = list(outputs)
    while canvas.eligible.any() and len(found) < 40:
        decision, state = sampler.decide(canvas, outs[min(len(found), len(outs) - 1)], state)
        found.append(chosen(decision))
        canvas = apply(canvas, decision)
    return found


# ------------------------------------------------------------------------------------------- ccd

FALLING = [0.99, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]


def test_ccd_warms_up_by_entropy_then_takes_the_steady_ones() -> None:
    """warm=1: turns 0 and 1 by entropy; V is 1 there, 2 in turn 2, 3 in turn 3, ..."""
    canvas = make_canvas(width=8)
    sampler = make("ccd", variant="ds", warm=1)
    # turn 1 leaves 2 in the buffer (V = 1); in turn 2 only it is steady: V = 2, ranks 2 and 3
    # turn 2 buffers 3, 4; turn 3 (V = 3) finds 3, 4 of 3, 4, 5 steady; 5, 6, 7 follow
    assert turns(sampler, canvas, [output(FALLING)]) == [[0], [1], [2], [3, 4], [5, 6, 7]]
    one = make("ccd", warm=1)
    assert turns(one, canvas, [output(FALLING)]) == [[i] for i in range(8)]


def test_ccd_falls_back_to_entropy_when_the_token_changes() -> None:
    canvas = make_canvas(width=8)
    changed = output(FALLING, [2, 3, 4, 5, 7, 7, 8, 9])
    outs = [output(FALLING), output(FALLING), output(FALLING), changed]
    found = turns(make("ccd", variant="ds", warm=1), canvas, outs)
    assert found[3] == [3], "4 has another token now"


def test_ccd_ignores_the_buffer_if_none_of_the_best_is_in_it() -> None:
    canvas = make_canvas(width=8)
    other = output(FALLING[::-1], [9, 8, 7, 6, 5, 4, 3, 2])
    outs = [output(FALLING), output(FALLING), output(FALLING), other]
    assert turns(make("ccd", variant="ds", warm=1), canvas, outs)[3] == [7]


@pytest.mark.parametrize("b", [1, 2, 3])
def test_with_constant_predictions_ds_commits_at_least_a_quota(b: int) -> None:
    canvas = make_canvas(width=8)
    sampler = make("ccd", variant="ds", warm=0, steps=8 // b)
    found = turns(sampler, canvas, [output(FALLING)])
    assert all(len(step) >= min(b, 8 // (8 // b)) for step in found[:-1])
    assert sorted(place for step in found for place in step) == list(range(8))


def test_while_warming_up_ccd_is_the_entropy_decoder() -> None:
    assert steps_of(decode("ccd", warm=99)) == steps_of(decode("entropy"))
    assert steps_of(decode("ccd", variant="ds", warm=0)) != steps_of(decode("entropy"))


# ------------------------------------------------------------------------------------- slow_fast


def test_exploring_for_ever_is_the_threshold_decoder() -> None:
    for law in ("propose", "rank"):
        ours = decode("slow_fast", explore=99, threshold=0.6, law=law, temperature=1.0)
        plain = decode("threshold", threshold=0.6, law=law, temperature=1.0)
        assert steps_of(ours) == steps_of(plain)


def test_the_fast_phase_stays_in_the_region_found() -> None:
    """Two slow turns see c >= .3 up to position 3; then 2 goes before 5, though 5 is surer."""
    canvas = make_canvas(width=7)
    slow = output([0.99, 0.95, 0.35, 0.4, 0.2, 0.1, 0.1])
    late = output([0.0, 0.0, 0.35, 0.5, 0.2, 0.8, 0.1])
    found = turns(make("slow_fast", explore=2), canvas, [slow, slow, late, late, late])
    assert found[:4] == [[0, 1], [3], [2], [5]]


def test_an_unsettled_estimate_is_the_mean() -> None:
    """Estimates 17 and 13 (positions begin at 10): the region is [10, 15)."""
    canvas = make_canvas(width=7)
    outs = [
        output([0.99, 0.1, 0.1, 0.1, 0.1, 0.1, 0.4]),
        output([0.0, 0.98, 0.4, 0.1, 0.1, 0.1, 0.1]),
        output([0.0, 0.0, 0.4, 0.5, 0.6, 0.8, 0.8]),
    ]
    found = turns(make("slow_fast", explore=2), canvas, outs)
    assert found == [[0], [1], [4], [3], [2], [5], [6]]


def test_a_settled_estimate_stands() -> None:
    """13 and 14 agree, so 17 in the third slow turn is not looked at any more."""
    canvas = make_canvas(width=7)
    outs = [
        output([0.99, 0.1, 0.4, 0.1, 0.1, 0.1, 0.1]),
        output([0.0, 0.98, 0.1, 0.4, 0.1, 0.1, 0.1]),
        output([0.0, 0.0, 0.1, 0.1, 0.1, 0.1, 0.5]),
        output([0.0, 0.0, 0.4, 0.5, 0.6, 0.8, 0.8]),
    ]
    found = turns(make("slow_fast", explore=3), canvas, outs)
    assert found[:5] == [[0], [1], [6], [3], [2]]


# --------------------------------------------------------------------------------- suffix_anchor


def test_without_strength_or_suffix_it_is_the_threshold_decoder() -> None:
    plain = steps_of(decode("threshold", threshold=0.6))
    assert steps_of(decode("suffix_anchor", threshold=0.6)) == plain
    request = Request([3, 5], gen_length=10, block_length=10, suffix_ids=[7, 8])
    for stop in (True, False):
        given = replace(request, stop_at_eos=stop)
        off = decode("suffix_anchor", given, strength=0.0, threshold=0.6)
        damped = decode("suffix_anchor", given, threshold=0.6)
        assert steps_of(off) == steps_of(decode("threshold", given, threshold=0.6))
        assert steps_of(damped) != steps_of(off)


def test_the_damping_falls_with_distance_and_progress() -> None:
    canvas = make_canvas(width=6)
    canvas = replace(canvas, ends_from=canvas.stop + 2)
    sampler = make("suffix_anchor")
    kept = sampler._kept(canvas)[0]  # type: ignore[attr-defined]
    assert (kept[1:] < kept[:-1]).all() and kept[-1] == pytest.approx(1 - 2.718281828 ** (-1 / 8))
    later = sampler._kept(replace(canvas, remaining=canvas.remaining // 2))[0]  # type: ignore[attr-defined]
    assert (later > kept).all()
    end = sampler._kept(replace(canvas, remaining=canvas.remaining * 0))[0]  # type: ignore[attr-defined]
    assert (end == 1).all()
    plain = replace(canvas, ends_from=canvas.stop)
    assert (sampler._kept(plain) == 1).all()  # type: ignore[attr-defined]
