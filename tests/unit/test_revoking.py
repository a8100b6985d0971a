"""Samplers that take tokens back: their rules turn by turn, their extremes, and that they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.outcome import next_canvas, settle
from dlm_decode.rows import COMMIT, OVERWRITE, REMASK
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.types import Canvas, Request
from tests.unit.sampler_cases import logits_with_top, make_canvas
from tests.unit.wrapper_cases import decode, probed_output, steps_of

Turn = tuple[list[int], list[int], list[int]]
"""Offsets committed, masked again, overwritten."""


def make(name: str, **options: Any) -> Sampler:
    return SAMPLERS.create(name, options)


def turns(
    sampler: Sampler, canvas: Canvas, logits: Sequence[Tensor] | Tensor, most: int = 40
) -> tuple[list[Turn], Canvas]:
    """What happens until no mask is left, on logits a turn, the last repeated."""
    given = [logits] if isinstance(logits, Tensor) else list(logits)
    state, found = sampler.init(canvas), []
    while canvas.masked.any() and len(found) < most:
        output = probed_output(sampler, canvas, given[min(len(found), len(given) - 1)], state)
        decision, state = sampler.decide(canvas, output, state)
        settled = settle(canvas, output, decision)
        codes = settled.codes[0]
        found.append(
            tuple(
                (codes == code).nonzero().flatten().tolist() for code in (COMMIT, REMASK, OVERWRITE)
            )
        )
        canvas = next_canvas(canvas, output, settled)
    return found, canvas


# ----------------------------------------------------------------------------------------- saber


def test_saber_commits_two_at_first_then_what_beats_the_mean() -> None:
    """Mean .8 after two: only those above go, but at least n = 1."""
    logits = logits_with_top([0.9, 0.7, 0.85, 0.82, 0.5, 0.4])
    off = make("saber", n=2, backtrack=False)
    found, _ = turns(off, make_canvas(width=6), logits)
    # theta: 1; then mean(.9, .85) = .875 keeps all out, so two go: .82, .7; then .5, .4
    assert [turn[0] for turn in found] == [[0, 2], [1, 3], [4, 5]]
    later = [logits, logits_with_top([0.9, 0.95, 0.85, 0.99, 0.98, 0.4])]
    found, _ = turns(off, make_canvas(width=6), later)
    assert [turn[0] for turn in found] == [[0, 2], [1, 3, 4], [5]]


def test_saber_takes_back_what_fell_most() -> None:
    """n = 2 takes back one a turn; of those never seen before it is the first, so it stays open."""
    first = logits_with_top([0.9, 0.7, 0.85, 0.8, 0.5, 0.4])
    second = logits_with_top([0.3, 0.7, 0.5, 0.8, 0.5, 0.4])
    found, canvas = turns(make("saber", n=2), make_canvas(width=6), [first, second])
    assert found[:2] == [([2], [], []), ([1, 3], [2], [])]
    assert not canvas.masked.any()


def test_saber_dream_takes_back_the_least_likely_token() -> None:
    """Nine at once give r = ceil(9 / 8) = 2; the model now gives another token at position 1."""
    canvas = make_canvas(width=9, vocab_size=16)
    sampler = make("saber", n=9, variant="dream")
    top = [0.9, 0.88, 0.86, 0.84, 0.82, 0.8, 0.78, 0.76, 0.74]
    found, canvas = turns(sampler, canvas, logits_with_top(top, 16), most=1)
    assert found[0] == ([0, 1, 2, 3, 4, 5, 6], [], []), "the two least sure are not kept"


@pytest.mark.parametrize("variant", ["llada", "dream"])
def test_saber_leaves_fewer_masks_every_turn(variant: str) -> None:
    for n in (1, 2, 5):
        for seed in range(3):
            canvas = make_canvas(width=12, vocab_size=16)
            generator = torch.Generator().manual_seed(seed)
            many = [3 * torch.randn(1, 12, 16, generator=generator) for _ in range(12)]
            found, canvas = turns(make("saber", n=n, variant=variant), canvas, many)
            assert all(len(c) > len(r) for c, r, _ in found)
            assert not canvas.masked.any()


# ------------------------------------------------------------------------------------------- rcr


def test_rcr_masks_the_lowest_again() -> None:
    """Four steps of one token: all go but three, then the surer ones push an old one out."""
    steps = [
        logits_with_top([0.9, 0.5, 0.4, 0.3]),
        logits_with_top([0.9, 0.95, 0.97, 0.1]),
        logits_with_top([0.2, 0.95, 0.97, 0.1]),
    ]
    found, canvas = turns(make("rcr", steps=4), make_canvas(width=4), steps)
    assert found == [([0], [], []), ([1, 2], [0], []), ([0], [], []), ([3], [], [])]
    assert not canvas.masked.any()


def test_rcr_on_steady_predictions_is_the_quota_decoder() -> None:
    logits = logits_with_top([0.9, 0.5, 0.4, 0.7, 0.6, 0.3])
    for steps in (2, 3, 4, 6, 9):
        rcr, _ = turns(make("rcr", steps=steps), make_canvas(width=6), logits)
        llada, _ = turns(make("llada", steps=steps), make_canvas(width=6), logits)
        assert rcr == llada
    assert steps_of(decode("rcr", steps=6)) != steps_of(decode("llada", steps=6))


# ------------------------------------------------------------------------------------------ edit


def test_edit_overwrites_a_token_the_model_is_sure_is_another() -> None:
    other = logits_with_top([0.99, 0.5, 0.4, 0.3])
    other[0, 0, [2, 7]] = other[0, 0, [7, 2]]
    steps = [logits_with_top([0.99, 0.5, 0.4, 0.3]), other]
    found, canvas = turns(make("edit"), make_canvas(width=4), steps)
    assert found[0] == ([0], [], []) and found[1] == ([1], [], [0])
    assert canvas.tokens[0, 0] == 7, "2 at first"
    sure = logits_with_top([0.99, 0.98, 0.97, 0.3])
    assert turns(make("edit"), make_canvas(width=4), sure)[0][0] == ([0, 1, 2], [], [])


def test_edit_without_editing_is_the_threshold_decoder() -> None:
    off = decode("edit", threshold=0.6, editing_threshold=1.0)
    assert steps_of(off) == steps_of(decode("threshold", threshold=0.6))
    on = decode("edit", threshold=0.6, editing_threshold=0.3)
    assert steps_of(on) != steps_of(off)


def test_edit_forwards_full_blocks_again_until_nothing_changes() -> None:
    """At least once, for that shows whether anything does; at most so many times in each block."""
    request = Request([3, 5, 7], gen_length=12, block_length=6, stop_at_eos=False)
    forwards = []
    for most in (0, 1, 3, 16):
        options = {"threshold": 0.0, "editing_threshold": 0.9, "max_post_steps": most}
        (result,) = decode("edit", request, **options)
        forwards.append(result.forwards)
        assert forwards[0] + 2 * min(most, 1) <= forwards[-1] <= forwards[0] + 2 * most
    assert result.trace.steps[-1].positions == (), "the last block was looked at and left"
    assert forwards[0] == 2


# ----------------------------------------------------------------------------------------- remdm

STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "cap", "eta": 0.3},
    {"strategy": "rescale", "eta": 0.5},
    {"strategy": "rescale", "eta": 1.0},
    {"strategy": "cap", "eta": 0.0},
]


def shares(
    sampler: Sampler, steps: int, rows: int = 1500, width: int = 8
) -> tuple[list[float], int]:
    """The share of masks after each step, over many rows, and how many tokens were masked again."""
    canvas = make_canvas(rows=rows, width=width)
    logits = torch.zeros(rows, width, 8)
    state, found, back = sampler.init(canvas), [], 0
    for _ in range(steps):
        output = probed_output(sampler, canvas, logits, state)
        decision, state = sampler.decide(canvas, output, state)
        settled = settle(canvas, output, decision)
        back += int((settled.codes == REMASK).sum())
        canvas = next_canvas(canvas, output, settled)
        found.append(float(canvas.masked.float().mean()))
    return found, back


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_the_masked_share_is_that_of_the_schedule_for_any_sigma(options: dict[str, Any]) -> None:
    found, back = shares(make("remdm", steps=5, **options), 5)
    for i, share in enumerate(found, 1):
        expected = 1 - i / 5
        assert abs(share - expected) <= 4 * (0.25 / 12000) ** 0.5, (i, share)
    assert (back > 0) == (options["eta"] > 0)


def test_a_sigma_beyond_the_bound_would_not_keep_it() -> None:
    """Negative control: remasking that reveals no more in return changes the share."""
    conf, _ = shares(make("remdm", steps=5, strategy="conf"), 5)
    assert abs(conf[1] - 0.6) > 4 * (0.25 / 12000) ** 0.5


def test_the_loop_holds_the_share() -> None:
    """20 steps: alpha rises to .8 at t = .5, stays until t = .2, then rises to 1."""
    options = {"strategy": "loop", "eta": 0.3, "t_on": 0.5, "t_off": 0.2, "alpha_on": 0.8}
    found, back = shares(make("remdm", steps=20, **options), 20)
    spread = 4 * (0.25 / 12000) ** 0.5
    for i, share in enumerate(found, 1):
        t = 1 - i / 20
        alpha = 1 - t if t < 0 else 0.8 * (1 - t) / 0.5 if t > 0.5 else 0.8
        alpha = 1 - 0.2 * t / 0.2 if t < 0.2 - 1e-9 else alpha
        assert abs(share - (1 - alpha)) <= spread, (i, share, alpha)
    assert back > 0


def test_without_sigma_nothing_is_masked_again() -> None:
    for result in decode("remdm", eta=0.0, temperature=1.0):
        assert not any(step.remasked for step in result.trace.steps)
    assert any(step.remasked for result in decode("remdm", eta=0.5) for step in result.trace.steps)


# ----------------------------------------------------------------------------------- termination

EAGER: list[tuple[str, dict[str, Any]]] = [
    ("saber", {"n": 1}),
    ("saber", {"n": 9, "variant": "dream"}),
    ("rcr", {}),
    ("rcr", {"steps": 2}),
    ("edit", {"threshold": 0.0, "editing_threshold": 0.0}),
    ("edit", {"threshold": 2.0, "editing_threshold": 0.0}),
    ("remdm", {"eta": 1.0}),
    ("remdm", {"eta": 1.0, "strategy": "rescale"}),
    ("remdm", {"strategy": "conf"}),
    ("remdm", {"strategy": "loop", "eta": 1.0}),
]


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize(("name", "options"), EAGER, ids=str)
def test_the_most_eager_settings_end(name: str, options: dict[str, Any], cache: str) -> None:
    """Long before the engine has to make them: no row ends by its step cap."""
    request = Request([3, 5, 7], gen_length=12, block_length=6, stop_at_eos=False)
    given = {f"{name}__{key}": value for key, value in options.items()}
    for temperature in (0.0, 1.0):
        (result,) = decode(name, request, cache=cache, temperature=temperature, **given)
        assert result.finish_reason in ("length", "eos")
        assert result.forwards <= 24 + 2 * 16, "16 more to edit each of two full blocks"
