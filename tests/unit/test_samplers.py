"""Every sampler's rule on given logits, and what all of them must never do."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_decode.errors import OptionError
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import top
from dlm_decode.types import Canvas, Decision, Draw, Output
from tests.golden import golden_json, golden_path, requires_golden
from tests.unit.sampler_cases import (
    GREEDY,
    MASK,
    apply,
    chosen,
    decide,
    logits_with_entropy,
    logits_with_top,
    make_canvas,
    output_of,
    random_logits,
    run,
)

Setting = tuple[str, dict[str, Any]]

HERE: list[Setting] = [
    ("llada", {}),
    ("llada", {"steps": 2}),
    ("llada", {"remasking": "random", "steps": 3}),
    ("llada", {"law": "rank"}),
    ("dream", {}),
    ("dream", {"steps": 3, "schedule": "repaired"}),
    ("dream", {"alg": "origin", "steps": 4}),
    ("dream", {"alg": "maskgit_plus", "alg_temp": 0.5}),
    ("dream", {"alg": "topk_margin", "steps": 20}),
    ("threshold", {}),
    ("threshold", {"threshold": 0.3, "law": "rank"}),
    ("threshold", {"relative_to_best": True}),
    ("factor", {}),
    ("factor", {"factor": 0.5, "last_rank_quirk": True}),
    ("margin", {}),
    ("margin", {"threshold": 0.5}),
    ("entropy", {"steps": 2}),
    ("entropy", {"threshold": 0.8}),
    ("random", {"steps": 2}),
    ("left_to_right", {}),
    ("left_to_right", {"right_to_left": True, "steps": 2}),
    ("entropy_bound", {}),
    ("entropy_bound", {"gamma": 1.0, "order_by": "confidence"}),
    ("entropy_bound", {"gamma": 1.0, "order_by": "margin"}),
    ("klass", {}),
    ("klass", {"conf_threshold": 0.3, "kl_threshold": 1.0, "unmask_strategy": "min_kl"}),
    ("klass", {"conf_threshold": 0.3, "history": "canvas", "unmask_strategy": "max_conf"}),
    ("pc", {}),
    ("pc", {"lambda_": 0.0, "steps": 2}),
    ("hierarchy", {}),
    ("hierarchy", {"threshold": 0.6, "low_threshold": 0.1}),
    ("local_leap", {"threshold": 0.5, "relaxed_threshold": 0.3, "radius": 2}),
    ("credit", {"dense": True}),
    ("credit", {"dense": True, "tuning_free": True}),
    ("prophet", {"early": 2.0, "average": "all"}),
    ("prophet", {"answer": "block"}),
    ("sched", {"shape": "exponential"}),
    ("early_stop", {}),
    ("blank_stop", {}),
]
GIVEN_BY_LOGITS = {"p2", "entropy", "filtered", "logits", "decided"}
DRAWS = [GREEDY, Draw(temperature=1.0), Draw(temperature=0.7, top_p=0.9)]


def make(setting: Setting) -> Sampler:
    return SAMPLERS.create(*setting)


def label(value: Any) -> str | None:
    return "-".join([value[0], *map(str, value[1].values())]) if isinstance(value, tuple) else None


def registered() -> list[Setting]:
    """All settings tested here, and every other sampler as it comes."""
    return HERE + [(name, {}) for name in SAMPLERS.names() if name not in dict(HERE)]


def ragged(vocab_size: int = 8) -> Canvas:
    """Five rows of different windows: full, half decided, one mask, none left, narrow."""
    masked = torch.tensor(
        [
            [1, 1, 1, 1, 1, 1, 1],
            [0, 1, 0, 1, 1, 0, 1],
            [0, 0, 0, 1, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
        ]
    ).bool()
    return replace(make_canvas(masked=masked, vocab_size=vocab_size), step=torch.tensor(5 * [0]))


def row_of(canvas: Canvas, row: int, width: int) -> Canvas:
    """One row, its window cut to `width`."""
    cut = {
        name: value[row : row + 1, :width] if value.ndim == 2 else value[row : row + 1]
        for name, value in vars(canvas).items()
        if isinstance(value, Tensor)
    }
    return replace(canvas, **cut)


# ------------------------------------------------------------------------------- every sampler


@pytest.mark.parametrize("draw", DRAWS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("setting", HERE, ids=label)
def test_runs_end_without_masks_and_never_commit_the_mask_id(setting: Setting, draw: Draw) -> None:
    """Every turn commits something eligible, so that no forward is wasted and no loop hangs."""
    sampler, canvas = make(setting), ragged()
    logits = random_logits(canvas)
    logits[..., MASK] = 50.0
    for decision in run(sampler, canvas, logits, draw):
        assert not (decision.commit & ~canvas.eligible).any()
        assert torch.equal(decision.commit.any(-1), canvas.eligible.any(-1))
        assert not (decision.tokens[decision.commit] == MASK).any()
        canvas = apply(canvas, decision)
    assert not canvas.masked.any()


@pytest.mark.parametrize("setting", HERE, ids=label)
def test_a_row_is_decided_as_if_alone(setting: Setting) -> None:
    """Neither neighbours nor padding change a row: batch means and shared stop flags would."""
    sampler, canvas = make(setting), ragged()
    logits = random_logits(canvas)
    draw = Draw(temperature=1.0)
    together = run(sampler, canvas, logits, draw)
    for row, width in enumerate([7, 7, 7, 7, 3]):
        alone = run(sampler, row_of(canvas, row, width), logits[row : row + 1, :width], draw)
        for one, all_rows in zip(alone, together, strict=False):
            assert torch.equal(one.commit[0], all_rows.commit[row, :width])
            assert torch.equal(
                one.tokens[one.commit], all_rows.tokens[row, :width][all_rows.commit[row, :width]]
            )
        for late in together[len(alone) :]:
            assert not late.commit[row].any()


@pytest.mark.parametrize("setting", HERE, ids=label)
def test_statistics_outside_eligible_positions_do_not_matter(setting: Setting) -> None:
    sampler, canvas = make(setting), ragged()
    output = output_of(sampler, canvas, random_logits(canvas))
    hidden = {name: poisoned(value, ~canvas.eligible) for name, value in output.stats.items()}
    hidden["valid"] = canvas.eligible
    clean, _ = sampler.decide(canvas, output, sampler.init(canvas))
    dirty, _ = sampler.decide(canvas, Output(hidden), sampler.init(canvas))
    assert torch.equal(clean.commit, dirty.commit)
    assert clean.scores is not None and dirty.scores is not None
    assert torch.equal(clean.scores, dirty.scores)


def poisoned(value: Tensor, where: Tensor) -> Tensor:
    if value.dtype.is_floating_point:
        where = where.reshape(where.shape + (1,) * (value.ndim - where.ndim))
        return value.masked_fill(where, torch.nan)
    return value


def goes_by_score(setting: Setting) -> bool:
    name, options = setting
    by_noise = name == "random" or {"remasking", "alg_temp"} & set(options)
    return not by_noise and options.get("alg") != "origin" and "right_to_left" not in options


@pytest.mark.parametrize("setting", [s for s in HERE if goes_by_score(s)], ids=label)
def test_equal_scores_go_by_position(setting: Setting) -> None:
    """Low-precision confidences tie; the first position wins, on any device."""
    canvas = make_canvas(width=6)
    taken = chosen(decide(make(setting), canvas, torch.zeros(1, 6, 8)))
    assert taken == list(range(len(taken)))


@pytest.mark.parametrize("setting", registered(), ids=label)
def test_decide_is_pure(setting: Setting) -> None:
    sampler, canvas = make(setting), ragged()
    output, state = inputs_of(sampler, canvas)
    before = [t.clone() for t in tensors((vars(canvas), output.stats, state))]
    first = sampler.decide(canvas, output, state)
    second = sampler.decide(canvas, output, state)
    for a, b in zip(tensors(vars(first[0])), tensors(vars(second[0])), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(tensors(first[1]), tensors(second[1]), strict=True):
        assert torch.equal(a, b)
    for was, now in zip(before, tensors((vars(canvas), output.stats, state)), strict=True):
        assert torch.equal(was.nan_to_num(), now.nan_to_num())


@pytest.mark.parametrize("draw", DRAWS[:2], ids=["greedy", "sampled"])
@pytest.mark.parametrize("setting", registered(), ids=label)
def test_decide_needs_no_host_sync(setting: Setting, draw: Draw) -> None:
    """Fake tensors have no values: reading one, on whatever device it would be, raises."""
    with FakeTensorMode():
        sampler, canvas = make(setting), ragged()
        output, state = inputs_of(sampler, canvas, draw)
        decision, after = sampler.decide(canvas, output, state)
    assert decision.commit.shape == decision.tokens.shape == (5, 7)
    assert [t.shape for t in tensors(after)] == [t.shape for t in tensors(state)]


def test_fake_tensors_do_catch_a_host_sync() -> None:
    class Reading(Sampler):
        def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
            k = int(canvas.eligible.sum().item())
            return Decision(output.top1, canvas.eligible[:, :k]), state

    with FakeTensorMode(), pytest.raises(Exception, match="_local_scalar_dense"):
        canvas = ragged()
        Reading().decide(canvas, output_of(Reading(), canvas, torch.randn(5, 7, 8)), ())


def inputs_of(sampler: Sampler, canvas: Canvas, draw: Draw = GREEDY) -> tuple[Output, Any]:
    state = sampler.init(canvas)
    if not sampler.needs <= GIVEN_BY_LOGITS or sampler.query(canvas, state) is not None:
        pytest.skip("needs more than the canvas's logits")
    return output_of(sampler, canvas, torch.randn(5, 7, 8), draw), state


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in tensors(value)]
    return [t for value in tree for t in tensors(value)] if isinstance(tree, (tuple, list)) else []


@pytest.mark.parametrize("name", sorted(dict(HERE)))
def test_each_sampler_names_its_paper(name: str) -> None:
    entry = next(e for e in SAMPLERS.entries() if e.name == name)
    assert "arXiv:" in entry.paper
    assert entry.summary.endswith(".")
    assert all(info.help for info in entry.options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llada", {"steps": 0}, "steps must be >= 1"),
        ("llada", {"remasking": "best"}, "low_confidence, random"),
        ("llada", {"law": "draw"}, "propose, rank"),
        ("llada", {"step": 4}, "did you mean 'steps'"),
        ("dream", {"alg": "klass"}, "origin, maskgit_plus, topk_margin, entropy"),
        ("dream", {"eps": 0.0}, "eps must be > 0"),
        ("dream", {"alg_temp": -1.0}, "alg_temp must be >= 0"),
        ("dream", {"schedule": "linear"}, "dream, repaired"),
        ("threshold", {"threshold": -0.1}, "threshold must be >= 0"),
        ("factor", {"factor": 0.0}, "factor must be > 0"),
        ("margin", {"threshold": -1}, "threshold must be >= 0"),
        ("entropy", {"threshold": float("nan")}, "threshold must be >= 0"),
        ("entropy_bound", {"gamma": -1e-3}, "gamma must be >= 0"),
        ("entropy_bound", {"order_by": "p"}, "entropy, confidence, margin"),
        ("klass", {"kl_history_length": 0}, "kl_history_length must be >= 1"),
        ("klass", {"kl_threshold": 20.0}, "kl_threshold must be > 0.0 and <= 10"),
        ("klass", {"unmask_strategy": "random"}, "all, max_conf, min_kl"),
        ("pc", {"alpha": 0.0}, "alpha must be > 0"),
        ("pc", {"lambda_": -1.0}, "lambda_ must be >= 0"),
        ("pc", {"frequencies": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SAMPLERS.create(name, options)


# ------------------------------------------------------------------------------ fixed quotas


def sizes(decisions: list[Decision], row: int = 0) -> list[int]:
    return [int(d.commit[row].sum()) for d in decisions]


def order(decisions: list[Decision]) -> list[list[int]]:
    return [chosen(d) for d in decisions]


@pytest.mark.parametrize(
    ("width", "steps", "expected"),
    [(10, 4, [3, 3, 2, 2]), (3, 5, [1, 1, 1]), (6, 1, [6]), (6, None, [1] * 6)],
)
@pytest.mark.parametrize("name", ["llada", "margin", "entropy", "random", "left_to_right", "pc"])
def test_quota_samplers_spread_a_block(
    name: str, width: int, steps: int | None, expected: list[int]
) -> None:
    canvas = make_canvas(width=width)
    sampler = SAMPLERS.create(name, {"steps": steps})
    assert sizes(run(sampler, canvas, random_logits(canvas))) == expected


def test_steps_are_shared_by_the_blocks_of_each_row() -> None:
    canvas = make_canvas(rows=3, width=8, blocks=[1, 2, 8])
    decisions = run(SAMPLERS.create("llada", {"steps": 8}), canvas, random_logits(canvas))
    assert [sizes(decisions, row)[:4] for row in range(3)] == [
        [1, 1, 1, 1],
        [2, 2, 2, 2],
        [8, 0, 0, 0],
    ]


def test_a_quota_above_what_is_eligible_takes_just_that() -> None:
    """topk over a short row would pick filler entries and overwrite decided tokens."""
    canvas = make_canvas(eligible=torch.tensor([[0, 1, 0, 0, 1, 0]]).bool())
    for name in ("llada", "margin", "entropy", "random", "left_to_right", "pc", "dream", "klass"):
        sampler = SAMPLERS.create(name, {"steps": 1})
        assert chosen(decide(sampler, canvas, random_logits(canvas))) == [1, 4]


def test_each_order_follows_its_score() -> None:
    """Logits in which probability, margin and entropy disagree about the best position."""
    p = torch.tensor(
        [
            [0, 0.50, 0.46, 0.01, 0.01, 0.01, 0.01],
            [0, 0.40, 0.12, 0.12, 0.12, 0.12, 0.12],
            [0, 0.48, 0.46, 0.06, 0.00, 0.00, 0.00],
        ]
    )
    canvas = make_canvas(width=3, vocab_size=7)
    logits = p.clamp(min=1e-9).log()[None]
    expected = {
        "llada": [[0], [2], [1]],
        "margin": [[1], [0], [2]],
        "entropy": [[2], [0], [1]],
        "left_to_right": [[0], [1], [2]],
    }
    for name, positions in expected.items():
        assert order(run(SAMPLERS.create(name), canvas, logits)) == positions
    backwards = SAMPLERS.create("left_to_right", {"right_to_left": True})
    assert order(run(backwards, canvas, logits)) == [[2], [1], [0]]


def test_thresholds_of_margin_and_entropy_always_take_the_best() -> None:
    canvas = make_canvas(width=4)
    logits = logits_with_entropy([0.5, 1.2, 0.1, 0.9])
    for limit, taken in [(0.95, [0, 2, 3]), (0.2, [2]), (0.05, [2])]:
        sampler = SAMPLERS.create("entropy", {"threshold": limit})
        assert chosen(decide(sampler, canvas, logits)) == taken
    logits = logits_with_top([0.9, 0.5, 0.95, 0.3])  # margins .883, .417, .942, .183
    for limit, taken in [(0.4, [0, 1, 2]), (0.9, [2]), (0.99, [2])]:
        sampler = SAMPLERS.create("margin", {"threshold": limit})
        assert chosen(decide(sampler, canvas, logits)) == taken


def test_random_order_is_uniform_and_keyed() -> None:
    canvas = make_canvas(rows=3000, width=3)
    logits = random_logits(canvas)
    for setting in [("random", {}), ("llada", {"remasking": "random"})]:
        first = decide(make(setting), canvas, logits).commit
        assert torch.equal(first, decide(make(setting), canvas, -logits).commit)
        share = first.float().mean(0)
        assert ((share - 1 / 3).abs() < 4 * math.sqrt(2 / 9 / 3000)).all()


# ------------------------------------------------------------------------- Dream's schedule


@pytest.mark.parametrize(
    ("width", "options", "expected"),
    [
        (8, {}, [1, 1, 1, 1, 1, 1, 2]),
        (8, {"schedule": "repaired"}, [1] * 8),
        (8, {"steps": 4}, [1, 2, 2, 3]),
        (16, {"steps": 4}, [3, 4, 4, 5]),
        (16, {"steps": 24}, [*[1] * 14, 2]),
        (16, {"steps": 24, "schedule": "repaired"}, [1] * 16),
        (16, {"steps": 1}, [16]),
        (24, {"steps": 12, "eps": 0.1}, [1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 5]),
    ],
)
@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
def test_dream_spends_no_forward_on_empty_steps(
    alg: str, width: int, options: dict[str, Any], expected: list[int]
) -> None:
    canvas = make_canvas(width=width)
    sampler = SAMPLERS.create("dream", {"alg": alg, **options})
    assert sizes(run(sampler, canvas, random_logits(canvas))) == expected


def test_dream_rows_keep_their_own_schedule() -> None:
    """Published code uses one quota for the batch, the mean of the rows' masks."""
    canvas = make_canvas(rows=2, width=8, masked=torch.ones(2, 8).tril(6).bool())
    assert canvas.masked.sum(-1).tolist() == [7, 8]
    decisions = run(SAMPLERS.create("dream", {"steps": 4}), canvas, random_logits(canvas))
    assert [sizes(decisions, row) for row in range(2)] == [[1, 1, 2, 3], [1, 2, 2, 3]]


def test_dream_confidence_is_of_the_filtered_distribution() -> None:
    """Position 0 has the higher probability; 1 is the more certain once top-k = 2 is applied."""
    p = torch.tensor([[0, 0.50, 0.45, *[0.005] * 10], [0, 0.45, 0.06, *[0.049] * 10]])
    canvas, logits = make_canvas(width=2, vocab_size=13), p.clamp(min=1e-9).log()[None]
    for alg in ("maskgit_plus", "topk_margin", "entropy"):
        sampler = SAMPLERS.create("dream", {"alg": alg, "schedule": "repaired"})
        assert chosen(decide(sampler, canvas, logits, Draw(top_k=2))) == [1], alg
    sampler = SAMPLERS.create("dream", {"alg": "maskgit_plus", "schedule": "repaired"})
    assert chosen(decide(sampler, canvas, logits)) == [0]
    assert chosen(decide(SAMPLERS.create("llada"), canvas, logits, Draw(top_k=2))) == [0]


def test_dream_origin_reveals_each_position_in_a_uniform_step() -> None:
    """Step j has probability t_j - t_{j+1}; two positions agree with the sum of its squares."""
    rows, steps = 4000, 4
    canvas = make_canvas(rows=rows, width=3)
    sampler = SAMPLERS.create("dream", {"alg": "origin", "steps": steps, "eps": 1e-5})
    state, logits = sampler.init(canvas), random_logits(canvas)
    revealed = torch.full((rows, 3), -1)
    while canvas.eligible.any():
        decision, state = sampler.decide(canvas, output_of(sampler, canvas, logits), state)
        step = (state["index"] - 1)[:, None].expand(rows, 3)
        revealed = torch.where(decision.commit, step, revealed)
        canvas = apply(canvas, decision)
    deviation = 4 * math.sqrt(0.25 * 0.75 / rows)
    for step in range(steps):
        assert ((revealed == step).float().mean(0) - 0.25).abs().max() < deviation
    assert abs((revealed[:, 0] == revealed[:, 1]).float().mean() - 0.25) < deviation


def test_dream_alg_temp_draws_positions_by_weight() -> None:
    """Without replacement, by weights exp(confidence / alg_temp); far from the uniform control."""
    rows = 4000
    canvas = make_canvas(rows=rows, width=3)
    logits = logits_with_top([0.9, 0.5, 0.3]).expand(rows, 3, 8)
    sampler = SAMPLERS.create("dream", {"alg": "maskgit_plus", "alg_temp": 0.2})
    share = decide(sampler, canvas, logits).commit.float().mean(0)
    weights = torch.tensor([0.9, 0.5, 0.3]).div(0.2).softmax(0)
    assert (share - weights).abs().max() < 4 * math.sqrt(0.25 / rows)
    assert (share - 1 / 3).abs().max() > 0.3
    cold = SAMPLERS.create("dream", {"alg": "maskgit_plus", "alg_temp": 0.0})
    assert decide(cold, canvas, logits).commit.sum(0).tolist() == [rows, 0, 0]


# ------------------------------------------------------- threshold, factor, entropy bound


@pytest.mark.parametrize(
    ("tau", "taken"), [(0.9, [1, 2]), (0.79, [1, 2, 3]), (0.99, [1]), (0.0, [0, 1, 2, 3])]
)
def test_threshold_takes_all_that_reach_it_and_always_the_best(
    tau: float, taken: list[int]
) -> None:
    sampler = SAMPLERS.create("threshold", {"threshold": tau})
    logits = logits_with_top([0.5, 0.95, 0.91, 0.8])
    assert chosen(decide(sampler, make_canvas(width=4), logits)) == taken


def test_threshold_is_inclusive() -> None:
    canvas = make_canvas(width=2, vocab_size=3)
    logits = torch.tensor([[[9.0, 0.0, 0.0], [9.0, 1.0, 0.0]]])
    assert chosen(decide(SAMPLERS.create("threshold", {"threshold": 0.5}), canvas, logits)) == [
        0,
        1,
    ]


def test_threshold_relative_to_the_best_takes_near_ties() -> None:
    canvas = make_canvas(width=4)
    logits = logits_with_top([0.6, 0.6 - 5e-6, 0.6 - 5e-5, 0.2])
    plain = SAMPLERS.create("threshold")
    relative = SAMPLERS.create("threshold", {"relative_to_best": True})
    assert chosen(decide(plain, canvas, logits)) == [0]
    assert chosen(decide(relative, canvas, logits)) == [0, 1]


@pytest.mark.parametrize(
    ("confidences", "factor", "quirk", "count"),
    [
        ([0.99, 0.95, 0.9, 0.6, 0.2], 1.0, False, 3),
        ([0.99, 0.95, 0.9, 0.6, 0.2], 0.3, False, 2),
        ([0.2, 0.2, 0.2], 1.0, False, 1),
        ([0.99, 0.2], 1.0, False, 1),
        ([0.99, 0.2], 1.0, True, 2),
        ([0.2, 0.2], 1.0, True, 2),
        ([0.99, 0.95, 0.2], 1.0, True, 3),
        ([0.99, 0.95, 0.2, 0.2], 1.0, True, 2),
        ([0.5], 1.0, True, 1),
        ([0.999] * 5, 1.0, True, 5),
    ],
)
def test_factor(confidences: list[float], factor: float, quirk: bool, count: int) -> None:
    canvas = make_canvas(width=len(confidences))
    sampler = SAMPLERS.create("factor", {"factor": factor, "last_rank_quirk": quirk})
    shuffled = [confidences[-1], *confidences[:-1]]
    assert len(chosen(decide(sampler, canvas, logits_with_top(confidences)))) == count
    assert len(chosen(decide(sampler, canvas, logits_with_top(shuffled)))) == count


def test_factor_quirk_counts_eligible_positions_only() -> None:
    canvas = make_canvas(eligible=torch.tensor([[1, 1, 1, 0, 0, 0]]).bool())
    sampler = SAMPLERS.create("factor", {"last_rank_quirk": True})
    logits = logits_with_top([0.99, 0.2, 0.2, 0.99, 0.99, 0.99])
    assert chosen(decide(sampler, canvas, logits)) == [0]


def test_factor_quirk_with_two_eligible_positions_takes_both() -> None:
    canvas = make_canvas(eligible=torch.tensor([[0, 1, 0, 0, 1, 0]]).bool())
    logits = logits_with_top([0.99, 0.2, 0.99, 0.99, 0.2, 0.99])
    for quirk, taken in [(False, [1]), (True, [1, 4])]:
        sampler = SAMPLERS.create("factor", {"last_rank_quirk": quirk})
        assert chosen(decide(sampler, canvas, logits)) == taken


def test_factor_one_admits_at_the_published_bounds() -> None:
    """f = 1 needs a lowest confidence above .5, 2/3, .75, .8 for 1, 2, 3, 4 tokens."""
    sampler = SAMPLERS.create("factor")
    for n in (2, 3, 4):
        bound = 1 - 1 / (n + 1)
        for lowest, taken in [(bound + 1e-4, n), (bound - 1e-4, n - 1)]:
            logits = logits_with_top([0.999] * (n - 1) + [lowest])
            assert len(chosen(decide(sampler, make_canvas(width=n), logits))) == taken


@pytest.mark.parametrize(
    ("gamma", "taken"), [(0.1, [0, 1, 2]), (0.02, [0, 1]), (0.4, [0, 1, 2, 3]), (0.0, [0])]
)
def test_entropy_bound(gamma: float, taken: list[int]) -> None:
    """Left sides are 0, .01, .06, .36."""
    sampler = SAMPLERS.create("entropy_bound", {"gamma": gamma})
    canvas = make_canvas(width=4)
    assert chosen(decide(sampler, canvas, logits_with_entropy([0.01, 0.05, 0.3, 0.8]))) == taken
    backwards = decide(sampler, canvas, logits_with_entropy([0.8, 0.3, 0.05, 0.01]))
    assert chosen(backwards) == sorted(3 - i for i in taken)


def test_entropy_bound_ignores_entropies_that_are_not_eligible() -> None:
    canvas = make_canvas(eligible=torch.tensor([[1, 0, 1, 0, 1, 1]]).bool())
    logits = logits_with_entropy([0.05, 0.0, 0.01, 1.0, 0.8, 0.3])
    sampler = SAMPLERS.create("entropy_bound", {"gamma": 0.1})
    assert chosen(decide(sampler, canvas, logits)) == [0, 2, 5]


def test_entropy_bound_ordered_by_confidence_subtracts_the_running_maximum() -> None:
    """The most confident position need not have the lowest entropy."""
    p = torch.tensor(
        [
            [0.0, 0.60, 0.08, 0.08, 0.08, 0.08, 0.08],
            [0.0, 0.55, 0.45, 0.00, 0.00, 0.00, 0.00],
            [0.0, 0.50, 0.50, 0.00, 0.00, 0.00, 0.00],
        ]
    )
    canvas, logits = make_canvas(width=3, vocab_size=7), p.clamp(min=1e-12).log()[None]
    # entropies 1.317, .688, .693: by confidence 0, .688, 1.381; by entropy 0, .688, 1.381
    for order_by, first in [("confidence", 0), ("entropy", 1)]:
        options = {"order_by": order_by, "gamma": 0.5}
        assert chosen(decide(SAMPLERS.create("entropy_bound", options), canvas, logits)) == [first]
        options["gamma"] = 0.7
        pair = {"confidence": [0, 1], "entropy": [1, 2]}[order_by]
        assert chosen(decide(SAMPLERS.create("entropy_bound", options), canvas, logits)) == pair


# ------------------------------------------------------------------------------------- KLASS


def klass(**options: Any) -> Sampler:
    return SAMPLERS.create("klass", options)


@pytest.mark.parametrize(("n", "expected"), [(1, [1, 5]), (2, [1, 1, 4]), (3, [1, 1, 1, 3])])
def test_klass_commits_what_stood_still_for_n_turns(n: int, expected: list[int]) -> None:
    """n divergences need n + 1 distributions."""
    canvas = make_canvas(width=6)
    decisions = run(klass(kl_history_length=n), canvas, logits_with_top([0.95] * 6))
    assert sizes(decisions) == expected


def test_klass_waits_for_positions_that_still_change() -> None:
    canvas = make_canvas(width=6)
    still, moved = (
        logits_with_top([0.95, 0.9499, 0.9498, p, 0.9496, 0.9495]) for p in (0.9497, 0.99)
    )
    decisions = run(klass(), canvas, [still, still, moved, moved, moved])
    assert order(decisions) == [[0], [1], [2, 4, 5], [3]]
    kl = 0.99 * math.log(0.99 / 0.9497) + 0.01 * math.log(0.01 / 0.0503)
    assert kl > 0.01
    assert order(run(klass(kl_threshold=kl + 1e-4), canvas, [still, still, moved])) == [
        [0],
        [1],
        [2, 3, 4, 5],
    ]
    assert len(run(klass(kl_threshold=kl - 1e-4), canvas, [still, still, moved])) == 4


def test_klass_divergence_is_the_published_one() -> None:
    """sum p_t (ln(p_t + 1e-12) - ln(p_{t-1} + 1e-12)), in double precision there."""
    canvas = make_canvas(width=5, vocab_size=50)
    sampler = klass()
    a, b = random_logits(canvas, 1, 6.0), random_logits(canvas, 2, 6.0)
    state = sampler.init(canvas)
    assert state["divergences"].isinf().all()
    for logits in (a, b):
        _, state = sampler.decide(canvas, output_of(sampler, canvas, logits), state)
    p, q = (output_of(sampler, canvas, x).logits.double().softmax(-1) for x in (b, a))
    exact = (p * ((p + 1e-12).log() - (q + 1e-12).log())).sum(-1)
    torch.testing.assert_close(state["divergences"][..., -1].double(), exact, rtol=1e-5, atol=1e-6)
    assert (state["divergences"][..., 0] > 10).all()


def test_klass_does_not_count_turns_in_which_a_position_was_not_computed() -> None:
    canvas = make_canvas(width=4)
    sampler = klass()
    state, logits = sampler.init(canvas), logits_with_top([0.95, 0.94, 0.93, 0.92])
    partly = torch.tensor([[True, True, False, True]])
    taken = []
    for turn in range(3):
        output = output_of(sampler, canvas, logits)
        if turn == 1:
            output = Output({**output.stats, "valid": partly})
        decision, state = sampler.decide(canvas, output, state)
        canvas = apply(canvas, decision)
        taken.append(chosen(decision))
    assert taken == [[0], [1], [3]]
    settled = {**state, "divergences": torch.zeros(1, 4, 2)}
    stale = Output({**output.stats, "valid": torch.zeros(1, 4, dtype=torch.bool)})
    fresh = sampler.decide(make_canvas(width=4, step=3), output, settled)[0]
    assert chosen(fresh) == [0, 1, 2, 3]
    fallback = sampler.decide(make_canvas(width=4, step=3), stale, settled)[0]
    assert chosen(fallback) == [0]
    _, after = sampler.decide(canvas, stale, state)
    assert torch.equal(after["divergences"], state["divergences"])
    assert torch.equal(after["previous"], state["previous"])


def test_klass_comparison_and_strategies() -> None:
    canvas = make_canvas(width=2, vocab_size=3)
    half = torch.tensor([[[9.0, 0.0, 0.0]] * 2])
    options = {"conf_threshold": 0.5, "kl_history_length": 1, "steps": 1}
    assert sizes(run(klass(**options), canvas, half)) == [2]
    state = klass(**options).init(canvas)
    state["divergences"] = torch.zeros(1, 2, 1)
    state["previous"] = torch.full((1, 2, 3), math.log(0.5))
    late = replace(canvas, step=torch.tensor([1]))
    for comparison, count in [("ge", 2), ("gt", 1)]:
        sampler = klass(**{**options, "steps": 2}, comparison=comparison)
        output = output_of(sampler, late, half)
        assert int(sampler.decide(late, output, state)[0].commit.sum()) == count

    canvas = make_canvas(width=4)
    before = logits_with_top([0.92, 0.91, 0.95, 0.94])
    after = logits_with_top([0.92, 0.91, 0.96, 0.945])
    for strategy, taken in [("all", [0, 1, 3]), ("max_conf", [3]), ("min_kl", [0])]:
        sampler = klass(kl_history_length=1, unmask_strategy=strategy)
        assert chosen(run(sampler, canvas, [before, after])[1]) == taken


def test_klass_history_over_the_canvas_outlives_blocks_but_waits_in_each() -> None:
    """The published loop keeps distributions of the whole row, and waits n - 1 steps a block."""
    first = torch.tensor([[1, 1, 1, 0, 0, 0]]).bool()
    canvas = make_canvas(masked=torch.ones(1, 6).bool(), eligible=first)
    sampler, logits = klass(history="canvas"), logits_with_top([0.96, 0.95, 0.94, 0.93, 0.92, 0.91])
    assert sampler.scope == "canvas"
    assert klass().scope == "block"
    state, taken = sampler.init(canvas), []
    while canvas.masked.any():
        if not canvas.eligible.any():
            canvas = replace(canvas, eligible=canvas.masked, step=canvas.step * 0)
        decision, state = sampler.decide(canvas, output_of(sampler, canvas, logits), state)
        canvas = apply(canvas, decision)
        taken.append(chosen(decision))
    assert taken == [[0], [1], [2], [3], [4, 5]]


# -------------------------------------------------------------------------------- PC sampler


def table(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "frequencies.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_pc_prefers_the_beginning_of_the_block() -> None:
    """exp(-.25 * 3) * .9 = .425 < .5; without the decay the most confident goes first."""
    canvas = make_canvas(width=4)
    logits = logits_with_top([0.5, 0.45, 0.2, 0.9])
    assert chosen(decide(SAMPLERS.create("pc"), canvas, logits)) == [0]
    assert chosen(decide(SAMPLERS.create("pc", {"lambda_": 0.0}), canvas, logits)) == [3]
    near, far = (
        decide(SAMPLERS.create("pc"), make_canvas(width=4, start=start), logits).scores
        for start in (0, 5000)
    )
    assert near is not None and far is not None and torch.equal(near, far)


def test_pc_prefers_rare_tokens_up_to_alpha(tmp_path: Path) -> None:
    """Ids 2, 3, 4 have p_D .9, .09, .01; the score is p times -ln p_D, with its minus sign."""
    path = table(tmp_path, {"2": 90, "3": 9, "4": 1})
    canvas, logits = make_canvas(width=3), logits_with_top([0.9, 0.8, 0.7])
    sampler = SAMPLERS.create("pc", {"lambda_": 0.0, "frequencies": path})
    decisions = run(sampler, canvas, logits)
    assert order(decisions) == [[2], [1], [0]]
    assert decisions[0].scores is not None
    expected = [p * -math.log(f + 1e-9) for p, f in [(0.9, 0.9), (0.8, 0.09), (0.7, 0.01)]]
    torch.testing.assert_close(
        decisions[0].scores.exp()[0], torch.tensor(expected).double(), rtol=1e-5, atol=0
    )
    capped = SAMPLERS.create("pc", {"lambda_": 0.0, "frequencies": path, "alpha": 1.5})
    assert order(run(capped, canvas, logits)) == [[1], [2], [0]]


def test_pc_reads_the_published_layout_and_counts_unlisted_ids_as_rarest(tmp_path: Path) -> None:
    plain = table(tmp_path, {"2": 90, "3": 9, "7": 1, "5": 0})
    (tmp_path / "b").mkdir()
    published = table(
        tmp_path / "b", {"num_token": 100, "p_baseline_dict": {"2": 90, "3": 9, "7": 1}}
    )
    canvas = make_canvas(width=3)
    states = [
        SAMPLERS.create("pc", {"frequencies": p}).init(canvas)["surprisal"]
        for p in (plain, published)
    ]
    assert torch.equal(*states)
    rare = -math.log(0.01 + 1e-9)
    torch.testing.assert_close(states[0][0, [0, 1, 4, 5, 6, 7]], torch.full((6,), rare))


@pytest.mark.parametrize("content", [{}, [], {"a": 1}, {"1": -2}, {"-1": 2}, {"1": "x"}])
def test_pc_refuses_tables_that_are_not_counts(tmp_path: Path, content: Any) -> None:
    with pytest.raises(OptionError, match="frequencies must"):
        SAMPLERS.create("pc", {"frequencies": table(tmp_path, content)})


def test_pc_refuses_a_table_of_another_tokenizer(tmp_path: Path) -> None:
    sampler = SAMPLERS.create("pc", {"frequencies": table(tmp_path, {"2": 1, "99": 1})})
    with pytest.raises(OptionError, match="below the vocabulary's 8, got 99"):
        sampler.init(make_canvas())


# ---------------------------------------------------------------------- drawing at T > 0


@pytest.mark.parametrize(("law", "other"), [("rank", "propose"), ("propose", "rank")])
def test_drawing_laws_have_their_closed_forms(law: str, other: str) -> None:
    """Share of committed tokens that are not the most probable one, L positions of top mass c.

    Ranking positions, then drawing: 1 - c. Drawing everywhere, then keeping the most probable
    draw: (1 - c)(1 - (1 - c)^L) / (L c) on average, (1 - c)^L in the first step.
    """
    rows, length, c = 2000, 8, 0.1
    closed = {
        "rank": (1 - c, 1 - c),
        "propose": ((1 - c) ** length, (1 - c) * (1 - (1 - c) ** length) / (length * c)),
    }
    canvas = make_canvas(rows=rows, width=length, vocab_size=21)
    rest = math.log((1 - c) / 19)
    logits = torch.full((rows, length, 21), rest)
    logits[..., 5] = math.log(c)
    decisions = run(SAMPLERS.create("llada", {"law": law}), canvas, logits, Draw(temperature=1.0))
    miss = [(d.tokens[d.commit] != 5).float().mean().item() for d in decisions]
    assert abs(miss[0] - closed[law][0]) < 4 * math.sqrt(0.25 / rows)
    assert abs(sum(miss) / length - closed[law][1]) < 4 * math.sqrt(0.25 / rows / length)
    assert abs(sum(miss) / length - closed[other][1]) > 0.2


def test_threshold_proposes_the_drawn_tokens_probability() -> None:
    """Under "propose" only positions that drew their top token can pass a high threshold."""
    canvas = make_canvas(rows=500, width=4)
    logits = logits_with_top([0.6] * 4).expand(500, 4, 8)
    draw = Draw(temperature=1.0)
    options = {"threshold": 0.5}
    proposed = decide(SAMPLERS.create("threshold", options), canvas, logits, draw)
    ranked = decide(SAMPLERS.create("threshold", options | {"law": "rank"}), canvas, logits, draw)
    assert ranked.commit.all()
    expected = 0.6 + 0.4**4 / 4  # the best of a row always goes
    assert abs(proposed.commit.float().mean() - expected) < 4 * math.sqrt(0.25 / 2000)


# ---------------------------------------------------------------------------- golden fixtures

SELECTIONS: dict[str, Setting] = {
    **{f"fast_dllm.threshold={t}": ("threshold", {"threshold": t}) for t in (0.3, 0.5, 0.7, 0.9)},
    **{
        f"dinfer.threshold={t}": ("threshold", {"threshold": t, "relative_to_best": True})
        for t in (0.3, 0.5, 0.7, 0.9, 0.99)
    },
    **{
        f"fast_dllm.factor={f}": ("factor", {"factor": f, "last_rank_quirk": True})
        for f in (0.25, 0.5, 1.0, 1.5, 2.5)
    },
    **{
        f"transformers.entropy_bound gamma={g} (masked positions only)": (
            "entropy_bound",
            {"gamma": g},
        )
        for g in (0.1, 0.5, 1.0, 2.0, 4.0)
    },
}


def golden_sets() -> list[tuple[Canvas, Tensor, dict[str, Any]]]:
    from safetensors.torch import load_file

    selections = golden_json("unit", "selection")
    data = load_file(golden_path("unit", "selection.safetensors"))
    mask_id = selections["mask_token_id"]
    cases = []
    for case in selections["cases"]:
        logits, x = data[f"set{case['set']}.logits"], data[f"set{case['set']}.x"]
        canvas = make_canvas(masked=x == mask_id, mask_id=mask_id, vocab_size=logits.shape[-1])
        dream = {k: v for k, v in data.items() if k.startswith(f"set{case['set']}.dream.")}
        cases.append((canvas, logits, case["selected"] | {"dream": dream, "set": case["set"]}))
    return cases


@requires_golden
@pytest.mark.parametrize("name", list(SELECTIONS))
def test_published_selection_rules(name: str) -> None:
    sampler = make(SELECTIONS[name])
    for canvas, logits, selected in golden_sets():
        decision = decide(sampler, canvas, logits)
        assert [chosen(decision, row) for row in range(len(logits))] == selected[name]
        argmax = torch.tensor(selected["argmax"])
        assert torch.equal(decision.tokens[decision.commit], argmax[decision.commit])


@requires_golden
@pytest.mark.parametrize("k", [1, 3, 7])
def test_published_top_k_selection(k: int) -> None:
    for canvas, logits, selected in golden_sets():
        p = output_of(SAMPLERS.create("llada"), canvas, logits).p1
        taken = top(p, canvas.masked, k)
        positions = [row.nonzero().flatten().tolist() for row in taken]
        assert positions == selected[f"fast_dllm.topk k={k}"]


@requires_golden
@pytest.mark.parametrize("alg", ["maskgit_plus", "topk_margin", "entropy"])
@pytest.mark.parametrize(("top_p", "top_k"), [(None, None), (0.9, None), (None, 5), (0.7, 10)])
def test_published_dream_confidences(alg: str, top_p: float | None, top_k: int | None) -> None:
    sampler = SAMPLERS.create("dream", {"alg": alg})
    for canvas, logits, selected in golden_sets():
        decision = decide(sampler, canvas, logits, Draw(top_p=top_p, top_k=top_k))
        key = f"set{selected['set']}.dream.{alg}.top_p={top_p}.top_k={top_k}"
        assert decision.scores is not None
        torch.testing.assert_close(
            decision.scores[canvas.masked],
            selected["dream"][f"{key}.confidence"],
            rtol=1e-4,
            atol=1e-5,
        )
        assert torch.equal(decision.tokens[canvas.masked], selected["dream"][f"{key}.token"])
