"""Early exits: Prophet's stages and regions, SchED's falling threshold, and when rows end."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.errors import OptionError
from dlm_decode.exits import EarlyExit, progress
from dlm_decode.samplers import SAMPLERS
from dlm_decode.samplers.credit import Credit
from dlm_decode.samplers.llada import Llada
from dlm_decode.samplers.prophet import Prophet
from dlm_decode.samplers.sched import Sched
from dlm_decode.samplers.threshold import Threshold
from dlm_decode.types import Canvas, Decision, Output, Request
from tests.golden import Case, golden_cases, requires_golden
from tests.unit.sampler_cases import make_canvas, output_of
from tests.unit.wrapper_cases import check_golden, decode, ragged_requests, steps_of, toy


def gaps(margins: list[float], vocab_size: int = 8) -> Tensor:
    """Logits `(1, W, V)` with the given distances of the best (id 2) to the second (id 3)."""
    logits = torch.full((1, len(margins), vocab_size), -20.0)
    logits[..., 3] = 0.0
    logits[0, :, 2] = torch.tensor(margins)
    return logits


def exits(sampler: EarlyExit, canvas: Canvas, margins: list[float]) -> bool:
    output = output_of(sampler, canvas, gaps(margins))
    decision, _ = sampler.decide(canvas, output, sampler.init(canvas))
    assert decision.fill is not None and decision.done is not None
    assert torch.equal(decision.fill, decision.done)
    return bool(decision.fill[0])


def partly(masked: list[int], **changed: Any) -> Canvas:
    """A row of one block with these positions undecided."""
    canvas = make_canvas(masked=torch.tensor([masked]).bool())
    return replace(canvas, **changed)


# ---------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("decided", "margin", "expected"),
    [(0, 7.4, False), (0, 7.6, True), (4, 5.1, True), (4, 4.9, False), (7, 2.6, True)],
)
def test_the_threshold_falls_in_stages(decided: int, margin: float, expected: bool) -> None:
    """7.5, 5 and 2.5 nats at 0, 0.4 and 0.7 of ten positions."""
    masked = [0] * decided + [1] * (10 - decided)
    assert exits(Prophet(), partly(masked), [margin] * 10) is expected


def test_only_undecided_margins_count_unless_asked() -> None:
    """The published mean counts decided positions, whose margins are large."""
    canvas, margins = partly([0, 0, 1, 1]), [20.0, 20.0, 3.0, 3.0]
    assert not exits(Prophet(), canvas, margins)
    assert exits(Prophet(average="all"), canvas, margins)
    assert Prophet(average="all").needs == {"p2", "decided"}


@pytest.mark.parametrize(
    ("options", "region"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"answer": "block"}, [4, 5]),
        ({"answer": "span", "answer_start": 2, "answer_length": 3}, [2, 3, 4]),
        ({"answer": "span", "answer_start": 6}, [6, 7]),
        ({"answer": "marker", "marker": "5 6", "answer_length": 2}, [5, 6]),
        ({"answer": "marker", "marker": "5,6", "answer_start": 1, "answer_length": 9}, [6, 7]),
        ({"answer": "marker", "marker": "6 5"}, []),
        ({"answer": "marker", "marker": "0"}, []),
    ],
)
def test_answer_regions(options: dict[str, Any], region: list[int]) -> None:
    """Marker 5 6 at 0 and again at 3; the block is 4 and 5; padding behind 8 is never a marker."""
    canvas = partly([0, 0, 0, 0, 0, 1, 1, 1, 0, 0])
    tokens = torch.tensor([[5, 6, 3, 5, 6, 0, 0, 0, 0, 0]])
    padding = torch.arange(10) >= 8
    canvas = replace(
        canvas,
        tokens=tokens,
        editable=canvas.editable & ~padding,
        start=canvas.start + 4,
        stop=canvas.start + 6,
    )
    found = Prophet(**options).region(canvas)[0, :8]
    assert found.nonzero().flatten().tolist() == region


def test_an_answer_without_masks_ends_nothing() -> None:
    canvas = partly([0, 0, 1, 1])
    sampler = Prophet(answer="span", answer_length=2, early=0, mid=0, late=0)
    assert not exits(sampler, canvas, [9.0] * 4)
    assert exits(replace(sampler, average="all"), canvas, [9.0] * 4)


@pytest.mark.parametrize(
    ("shape", "k", "expected"),
    [
        ("linear", 2.0, [8.0, 5.0, 2.0]),
        ("cosine", 2.0, [8.0, 5.0, 2.0]),
        ("exponential", 4.0, [8.0, 2 + 6 * math.exp(-2), 2 + 6 * math.exp(-4)]),
    ],
)
def test_sched_thresholds(shape: str, k: float, expected: list[float]) -> None:
    sampler = Sched(shape=shape, tau_high=8.0, tau_low=2.0, k=k)
    tau = sampler.tau(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
    torch.testing.assert_close(tau, torch.tensor(expected, dtype=torch.float64))
    quarter = sampler.tau(torch.tensor([0.25], dtype=torch.float64))
    assert (shape == "cosine") == (float(quarter) > 6.5)


def test_progress_counts_steps_where_there_are_some() -> None:
    """A budgeted inner is at (turn + 1) / steps, an adaptive one at its share of decided ones."""
    canvas = replace(
        partly([0, 0, 0, 1, 1, 1, 1, 1]), turn=torch.tensor([4]), total=torch.tensor([8])
    )
    assert float(progress(Prophet(Llada(steps=10)), canvas)) == 0.5
    assert float(progress(Prophet(Credit(Llada(steps=4))), canvas)) == 1.0
    assert float(progress(Prophet(Threshold()), canvas)) == pytest.approx(3 / 8)


def test_an_exit_drops_everything_else_the_inner_wanted() -> None:
    class Revoking(Threshold):
        def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
            every = torch.ones_like(canvas.eligible)
            wrong = torch.full_like(output.top1, 7)
            hold = every.any(-1)
            return Decision(wrong, every, remask=every, overwrite=every, hold=hold), state

    canvas = partly([0, 1, 1, 1])
    sampler = Prophet(Revoking(), early=0, mid=0, late=0)
    decision, _ = sampler.decide(
        canvas, output_of(sampler, canvas, gaps([1.0] * 4)), sampler.init(canvas)
    )
    assert decision.tokens.tolist() == [[2, 2, 2, 2]]
    assert decision.remask is not None and not decision.remask.any()
    assert decision.overwrite is not None and not decision.overwrite.any()
    assert decision.hold is not None and not decision.hold.any()
    never = replace(sampler, early=99, mid=99, late=99)
    decision, _ = never.decide(
        canvas, output_of(sampler, canvas, gaps([1.0] * 4)), sampler.init(canvas)
    )
    assert decision.remask is not None and decision.remask.all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer": "marker"}, "marker must be given with answer=marker"),
        ({"marker": "3"}, "got marker='3' and answer='all'"),
        ({"answer": "marker", "marker": "the answer"}, "must be token ids such as"),
        ({"answer": "marker", "marker": "-3"}, "must be token ids such as"),
        ({"answer": "end"}, "one of all, block, span, marker"),
        ({"late": -1}, "late must be >= 0"),
        ({"mid_from": 1.5}, "mid_from must be"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SAMPLERS.create("prophet", options)


# ------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("name", ["prophet", "sched"])
@pytest.mark.parametrize("average", ["masked", "all"])
def test_threshold_zero_is_one_forward_of_argmax(name: str, average: str) -> None:
    options = {"early": 0, "mid": 0, "late": 0} if name == "prophet" else {"tau_high": 0}
    results = decode(f"{name}+llada", average=average, **options)
    once = decode(
        "left_to_right", [replace(r, block_length=32) for r in ragged_requests()], steps=1
    )
    assert [r.forwards for r in results] == [1, 1, 1]
    assert [r.canvas for r in results] == [r.canvas for r in once]
    assert [len(r.trace.steps) for r in results] == [1, 1, 1]


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_a_row_ends_only_when_every_mask_was_computed(cache: str) -> None:
    """With the dual cache that is a block's first turn; no mask is left or filled by guess."""
    request = Request([3, 5, 7, 2], gen_length=24, block_length=8, stop_at_eos=False)
    result = decode("prophet+llada", request, cache=cache, early=99, mid=0, late=0)[0]
    sizes = [len(step.positions) for step in result.trace.steps]
    # A third is decided after 8 of 24: mid begins at 0.33, in the first turn of the second block.
    assert sizes == [1] * 8 + [16]
    late = decode("prophet+llada", request, cache=cache, early=99, mid_from=0.4, mid=0, late=0)[0]
    sizes = [len(step.positions) for step in late.trace.steps]
    assert sizes == ([1] * 16 + [8] if cache == "dual" else [1] * 10 + [14])
    assert toy().info.mask_id not in late.canvas


def test_one_rows_exit_leaves_the_others_alone() -> None:
    alone = [decode("prophet+llada", r, early=5)[0] for r in ragged_requests()]
    assert steps_of(decode("prophet+llada", early=5)) == steps_of(alone)
    assert len({r.forwards for r in alone}) > 1


def published() -> list[Any]:
    return [pytest.param(c, id=c["name"]) for c in golden_cases("llada-tiny-a", "decode_prophet")]


def published_options(case: Case) -> dict[str, Any]:
    s = case["settings"]
    start = s["answer_start_pos"] - len(case["prompt_ids"][0])
    options = {"steps": s["steps"], "answer": "span", "answer_start": start, "average": "all"}
    return options | (s["early_exit_thresholds"] or {})


@requires_golden
@pytest.mark.parametrize("case", published())
def test_published_early_exits(case: Case) -> None:
    check_golden(case, "prophet+llada", published_options(case))


@requires_golden
@pytest.mark.parametrize(
    "changed", [{"average": "masked"}, {"answer": "all"}, {"llada.steps": None, "steps": 16}]
)
def test_published_early_exits_need_their_settings(changed: dict[str, Any]) -> None:
    """Negative control: with another mean, region or budget some trace differs."""
    different = 0
    for case in golden_cases("llada-tiny-a", "decode_prophet"):
        options = published_options(case) | changed
        options.pop("llada.steps", None)
        if options["answer"] == "all":
            del options["answer_start"]
        try:
            check_golden(case, "prophet+llada", options)
        except AssertionError:
            different += 1
    assert different
