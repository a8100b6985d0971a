"""DCD: the sliding window, its commit rules, and the published traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.schedules import SCHEDULES, Span, Window
from dlm_decode.types import Generation, Output, Request
from tests.golden import golden_cases, requires_golden
from tests.unit.sampler_cases import chosen, decide, logits_with_top, make_canvas, output_of
from tests.unit.test_golden_decode import Case, decode, rows_of, steps_of
from tests.unit.wrapper_cases import decode as decode_toy
from tests.unit.wrapper_cases import steps_of as toy_steps


def make(**options: Any) -> Sampler:
    return SAMPLERS.create("dcd", options)


def options_of(settings: dict[str, Any]) -> dict[str, Any]:
    algo, value = settings["decode_algo"], settings["decode_param"]
    if algo == "fixed":
        return {"rule": "fixed", "count": value}
    if algo == "entropy-threshold":
        return {"order_by": "entropy", "entropy": -value}
    return {"threshold": value}


ENDED = ("dream-tiny-a", "sliding_dual_r8")
"""The one case whose text ends early, see `test_published_padding_behind_the_end`."""


def cases() -> list[Any]:
    found = [
        (n, c) for n in ("llada-tiny-a", "dream-tiny-a") for c in golden_cases(n, "decode_dcd")
    ]
    return [pytest.param(n, c, id=f"{n}-{c['name']}") for n, c in found if (n, c["name"]) != ENDED]


def published(name: str, case: Case, **more: Any) -> Generation:
    s = case["settings"]
    sliding = s["window_type"] == "sliding"
    cache, _, vicinity = s["cache_type"].partition("-delay")
    options = {f"dcd.{key}": value for key, value in options_of(s).items()}
    if sliding:
        options["schedule.max_length"] = s["max_window_length"]
    if sliding and cache != "none":
        options |= {"refresh_tokens": s["refresh_count"], "vicinity": int(vicinity or 0)}
    (result,) = decode(
        name,
        case,
        s["generate_length"],
        s["initial_window_length"] if sliding else s["block_size"],
        sampler="dcd",
        schedule="sliding" if sliding else "fixed",
        cache=cache,
        options=options,
        **more,
    )
    return result


def committed(case: Case) -> list[list[int]]:
    return [step["committed"] for step in case["steps"] if step["committed"]]


@requires_golden
@pytest.mark.parametrize(("name", "case"), cases())
def test_the_published_loop(name: str, case: Case) -> None:
    result = published(name, case)
    assert [[p for p, _ in step] for step in steps_of(result)] == committed(case)
    assert list(result.ids) == case["final_ids"][0][len(rows_of(case)[0]) :]
    assert result.forwards == len(committed(case))
    computed = sum(step["forward_length"] for step in case["steps"])
    assert result.trace.computed_positions == computed


@requires_golden
def test_published_padding_behind_the_end() -> None:
    """An end id makes the published loop fill all that follows it with pads, which later forwards
    see and which count as decoded; here those positions stay masked. Given as frozen, they lead to
    the same decisions."""
    name, which = ENDED
    (case,) = (c for c in golden_cases(name, "decode_dcd") if c["name"] == which)
    (first,), *rest = committed(case)
    assert steps_of(published(name, case))[0] == [[first, case["settings"]["eos_id"]]]
    start = len(rows_of(case)[0])
    final = case["final_ids"][0][start:]
    behind = dict(enumerate(final))
    for place in range(first - start):
        del behind[place]
    result = published(name, case, frozen=behind)
    assert [[p for p, _ in step] for step in steps_of(result)] == rest
    assert list(result.ids) == final
    assert result.forwards == len(rest)


def test_the_window_holds_as_many_masks() -> None:
    schedule, span = SCHEDULES.create("sliding", {"max_length": 6}), Span(10, 20, 3)
    masked = np.zeros(22, dtype=bool)
    masked[10:20] = True
    window = schedule.advance(span, schedule.first(span), masked)
    assert window == Window(10, 13, 0)
    masked[[11, 12]] = False
    window = schedule.advance(span, window, masked)
    assert window == Window(10, 15, 0), "the start stays, so the block does"
    masked[[13, 14]] = False
    assert schedule.advance(span, window, masked) == Window(10, 16, 0), "never longer than 6"
    masked[10] = False
    assert schedule.advance(span, window, masked) == Window(15, 18, 1)
    masked[15:19] = False
    assert schedule.advance(span, window, masked) == Window(19, 20, 1)


def test_equal_scores_go_together_and_thresholds_do_not_hold_up() -> None:
    canvas = make_canvas(width=5)
    sure = logits_with_top([0.95, 0.92, 0.7, 0.91, 0.3])
    output = output_of(make(), canvas, sure)
    equal = Output({**output.stats, "p1": torch.tensor([[0.5, 0.7, 0.7, 0.2, 0.3]])})
    assert chosen(make().decide(canvas, equal, ())[0]) == [1, 2]
    assert chosen(decide(make(), canvas, sure)) == [0, 1, 3]
    assert chosen(decide(make(rule="fixed", count=2), canvas, sure)) == [0, 1]


def test_fixed_blocks_with_distinct_scores_are_the_threshold_decoder() -> None:
    ours = decode_toy("dcd", threshold=0.6)
    assert toy_steps(ours) == toy_steps(decode_toy("threshold", threshold=0.6))


@pytest.mark.parametrize("cache", ["none", "dual", "prefix"])
def test_speculation_stays_lossless_when_the_window_moves(cache: str) -> None:
    """A draft assumes the window it was made in, so a chain ends with every turn."""
    plain = decode_toy("dcd", schedule="sliding", cache=cache, threshold=0.5)
    fast = decode_toy("self_speculative+dcd", schedule="sliding", cache=cache, dcd__threshold=0.5)
    assert toy_steps(plain) == toy_steps(fast)


def test_a_position_put_off_is_not_forced_by_a_block_boundary() -> None:
    """With one token a turn the window reaches on, where fixed blocks would finish first."""
    request = Request([3, 5], gen_length=12, block_length=3, stop_at_eos=False)
    orders = [
        [step.positions for step in decode_toy("llada", request, schedule=s)[0].trace.steps]
        for s in ("fixed", "sliding")
    ]
    blocks = [[(p[0] - 2) // 3 for p in order] for order in orders]
    assert blocks[0] == sorted(blocks[0]) and blocks[1] != sorted(blocks[1])
