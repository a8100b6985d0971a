"""Rules that look at neighbours: dInfer's hierarchy of runs, and LocalLeap's anchors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dlm_decode.errors import OptionError
from dlm_decode.samplers import SAMPLERS
from dlm_decode.samplers.hierarchy import Hierarchy
from dlm_decode.samplers.local_leap import LocalLeap
from tests.golden import Case, golden_cases, requires_golden
from tests.reference.dinfer import hierarchy_decoder
from tests.unit.sampler_cases import chosen, decide, logits_with_top, make_canvas, random_logits
from tests.unit.wrapper_cases import check_golden


def taken(sampler: Any, top: list[float], masked: list[int] | None = None) -> list[int]:
    canvas = make_canvas(masked=torch.tensor([masked or [1] * len(top)]).bool())
    return chosen(decide(sampler, canvas, logits_with_top(top)))


@pytest.mark.parametrize("seed", range(5))
def test_hierarchy_equals_a_loop_over_runs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    masked = torch.rand(6, 24, generator=generator) < 0.6
    masked[0], masked[1] = True, False
    masked[2, :], masked[2, [0, 23]] = False, True
    canvas = make_canvas(masked=masked, vocab_size=12)
    logits = random_logits(canvas, seed, 2.0)
    sampler = Hierarchy(threshold=0.8, low_threshold=0.45)
    decision = decide(sampler, canvas, logits)
    banned = logits.index_fill(-1, torch.tensor([canvas.mask_id]), -torch.inf)
    rule = hierarchy_decoder(0.8, 0.45)
    for row in range(6):
        expected = rule(banned[row], masked[row])[0] if masked[row].any() else masked[row]
        assert torch.equal(decision.commit[row], expected)


def test_hierarchy_takes_each_runs_best() -> None:
    masked = [1, 1, 0, 1, 1, 1, 0, 1]
    top = [0.5, 0.6, 0.99, 0.45, 0.95, 0.92, 0.99, 0.3]
    assert taken(Hierarchy(), top, masked) == [1, 4, 5]
    assert taken(Hierarchy(low_threshold=0.2), top, masked) == [1, 4, 5, 7]
    assert taken(Hierarchy(threshold=0.99, low_threshold=0.99), top, masked) == [4]


def test_of_equal_positions_in_a_run_the_first_goes() -> None:
    """The published code commits all of them, which are neighbours."""
    canvas = make_canvas(masked=torch.tensor([[1, 1, 0, 1, 1, 1]]).bool())
    decision = decide(Hierarchy(low_threshold=0.1), canvas, torch.zeros(1, 6, 8))
    assert chosen(decision) == [0, 3]


def published() -> list[Any]:
    cases = golden_cases("llada-tiny-a", "decode_dinfer")
    return [pytest.param(c, id=c["name"]) for c in cases if "Hierarchy" in c["decoder"]]


@requires_golden
@pytest.mark.parametrize("case", published())
def test_dinfer_hierarchy(case: Case) -> None:
    names = ("threshold", "low_threshold")
    check_golden(case, "hierarchy", {name: case["settings"][name] for name in names})


def test_tokens_near_an_anchor_need_less_confidence() -> None:
    top = [0.8, 0.5, 0.95, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8]
    assert taken(LocalLeap(radius=4), top) == [0, 2, 4, 5, 6]
    assert taken(LocalLeap(radius=2), top) == [0, 2, 4]
    assert taken(LocalLeap(radius=0), top) == [2]
    assert taken(LocalLeap(radius=99), top) == [0, 2, 4, 5, 6, 7, 8]


def test_a_decided_position_is_no_anchor() -> None:
    assert taken(LocalLeap(), [0.95, 0.8, 0.85], [0, 1, 1]) == [2]


def test_without_anchors_leaping_is_the_threshold_rule() -> None:
    canvas = make_canvas(rows=3, width=9, vocab_size=12)
    logits = random_logits(canvas)
    options = {"threshold": 0.9}
    leap = SAMPLERS.create("local_leap", options | {"relaxed_threshold": 0.9})
    plain = SAMPLERS.create("threshold", options)
    assert torch.equal(decide(leap, canvas, logits).commit, decide(plain, canvas, logits).commit)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("local_leap", {"radius": -1}, "radius must be >= 0"),
        ("local_leap", {"relaxed_threshold": -0.1}, "relaxed_threshold must be >= 0"),
        ("hierarchy", {"low_threshold": -0.1}, "low_threshold must be >= 0"),
        ("hierarchy", {"law": "draw"}, "propose, rank"),
        ("credit", {"beta": 1.2}, "beta must be >= 0.0 and <= 1"),
        ("sched", {"shape": "step"}, "linear, cosine, exponential"),
        ("sched", {"k": 0}, "k must be > 0"),
        ("blank_stop", {"pad_id": -1}, "pad_id must be >= 0"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SAMPLERS.create(name, options)
