"""DAPD, DAWN and DOS: the rules on given attention, and the simpler samplers they turn into."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.errors import OptionError
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.types import Canvas
from tests.unit.dependency_cases import (
    RowLaws,
    exact_llada,
    generate,
    make,
    order_of,
    window_attention,
    with_states,
)
from tests.unit.sampler_cases import chosen, logits_with_top, make_canvas, random_logits

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("dapd", {}),
    ("dapd", {"tau": 0.05, "tau_end": 0.001, "switch": 0.0}),
    ("dapd", {"law": "rank", "layers_from": 0.0}),
    ("dawn", {}),
    ("dawn", {"tau_sink": 1.0, "tau_low": 0.1, "tau_induce": 0.1, "blockers": "either"}),
    ("dawn", {"tau_sink": 1.0, "tau_low": 0.1, "anchors": "canvas"}),
    ("dos", {}),
    ("dos", {"rule": "threshold", "threshold": 0.4, "times_confidence": True}),
    ("dos", {"rule": "entropy_bound", "gamma": 1.0}),
]


def label(setting: Any) -> str:
    return "-".join([setting[0], *map(str, setting[1].values())])


@pytest.fixture(params=SETTINGS, ids=label)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return SAMPLERS.create(*request.param)


class TestLaws(RowLaws):
    """Those of `dependency_cases`."""


def taken(
    sampler: Sampler,
    confidences: list[float],
    pairs: dict[tuple[int, int], float],
    canvas: Canvas | None = None,
) -> list[int]:
    """Offsets committed on given confidences and attention {(query, key): value}."""
    canvas = make_canvas(width=len(confidences)) if canvas is None else canvas
    attention = window_attention(pairs, len(confidences))
    logits = logits_with_top(confidences)
    output = with_states(sampler, canvas, logits, attention=attention)
    return chosen(sampler.decide(canvas, output, sampler.init(canvas))[0])


# ------------------------------------------------------------------------------------ DAPD


def test_dapd_without_edges_commits_everything() -> None:
    assert taken(make("dapd"), [0.3, 0.9, 0.2, 0.5], {}) == [0, 1, 2, 3]
    assert taken(make("dapd", tau=0.5), [0.3, 0.9], {(0, 1): 0.5, (1, 0): 0.5}) == [0, 1]


def test_dapd_takes_an_independent_set_by_degree_times_confidence() -> None:
    """Edges 0-1, 1-2 of weights .2 and .1 (half the one-sided attention), and 3 alone."""
    pairs = {(0, 1): 0.4, (2, 1): 0.2}
    # scores: 0: .2 * .5 = .10, 1: .3 * .4 = .12, 2: .1 * .9 = .09, 3: 0
    assert taken(make("dapd"), [0.5, 0.4, 0.9, 0.3], pairs) == [1, 3]
    # 1 is less sure: .3 * .3 = .09 < .10, so 0 goes first and 1 is blocked
    assert taken(make("dapd"), [0.5, 0.3, 0.9, 0.3], pairs) == [0, 2, 3]


def test_dapd_commits_certain_tokens_whatever_their_edges() -> None:
    pairs = {(0, 1): 0.4, (1, 0): 0.4}
    assert taken(make("dapd"), [1.0, 1.0, 0.4], pairs) == [0, 1, 2]
    assert taken(make("dapd"), [0.8, 0.7, 0.4], pairs) == [0, 2]


def test_dapd_goes_by_confidence_once_half_is_decided() -> None:
    sampler = make("dapd", threshold=0.6)
    start = make_canvas(width=6)
    state = sampler.init(start)
    pairs = {(4, 5): 0.4, (5, 4): 0.4}
    logits = logits_with_top([0.5, 0.5, 0.5, 0.5, 0.7, 0.8])
    for decided, expected in ((3, [3, 5]), (4, [4, 5])):
        masked = (torch.arange(6) >= decided)[None]
        canvas = replace(start, masked=masked, eligible=masked)
        attention = window_attention(pairs, 6)
        output = with_states(sampler, canvas, logits, attention=attention)
        assert chosen(sampler.decide(canvas, output, state)[0]) == expected


def test_dapd_tau_moves_with_the_decided_share() -> None:
    sampler = make("dapd", tau=0.3, tau_end=0.0, switch=0.0)
    start = make_canvas(width=4)
    pairs = {(2, 3): 0.4, (3, 2): 0.4}
    logits = logits_with_top([0.5, 0.5, 0.6, 0.5])
    for decided, expected in ((0, [0, 2] + [1, 3] * 0), (2, [2])):
        masked = (torch.arange(4) >= decided)[None]
        canvas = replace(start, masked=masked, eligible=masked)
        output = with_states(sampler, canvas, logits, attention=window_attention(pairs, 4))
        found = chosen(sampler.decide(canvas, output, sampler.init(start))[0])
        assert found == (expected if decided else [0, 1, 2])  # tau .3 and .15 against .4


# ------------------------------------------------------------------------------------ DAWN


def dawn_canvas(decided: list[int], width: int) -> Canvas:
    masked = torch.ones(1, width).bool()
    masked[0, decided] = False
    return make_canvas(masked=masked)


def test_dawn_without_edges_is_a_threshold() -> None:
    model = exact_llada()
    dawn = make("dawn", tau_edge=1.5, tau_low=0.45, tau_conf=0.9)
    threshold = make("threshold", threshold=0.45)
    for ours, theirs in zip(generate(model, dawn), generate(model, threshold), strict=True):
        assert order_of(ours) == order_of(theirs)
        assert ours.ids == theirs.ids


def test_dawn_commits_the_best_if_there_is_nothing_else() -> None:
    assert taken(make("dawn"), [0.3, 0.5, 0.45, 0.2], {}) == [1]


def test_dawn_induces_what_leans_on_certain_tokens() -> None:
    """2 looks at the decided 0 with .1; below tau_low it is committed only because of that."""
    sampler = make("dawn", tau_sink=1.0, tau_induce=0.5, tau_low=0.8)
    leaning = {(2, 0): 0.1}
    canvas = dawn_canvas([0], 4)
    assert taken(sampler, [0.95, 0.95, 0.6, 0.6], leaning, canvas) == [1, 2]
    assert taken(sampler, [0.85, 0.95, 0.6, 0.6], leaning, canvas) == [1], "0 is uncertain now"
    assert taken(sampler, [0.95, 0.95, 0.4, 0.6], leaning, canvas) == [1], "2 is too unsure"
    assert taken(sampler, [0.95, 0.95, 0.6, 0.6], {(2, 0): 0.05}, canvas) == [1]


def test_dawn_ignores_sinks() -> None:
    """When every row looks at 0 it tells nothing; without the other rows it would."""
    sampler = make("dawn", tau_sink=0.05, tau_induce=0.5, tau_low=0.8)
    canvas = dawn_canvas([0], 4)
    everyone = {(row, 0): 0.1 for row in range(1, 4)}
    assert taken(sampler, [0.95, 0.95, 0.6, 0.6], everyone, canvas) == [1]
    assert taken(sampler, [0.95, 0.95, 0.6, 0.6], {(2, 0): 0.1}, canvas) == [1, 2]


def test_dawn_thins_the_rest_to_an_independent_set() -> None:
    sampler = make("dawn", tau_sink=1.0, tau_low=0.5)
    assert taken(sampler, [0.6, 0.7, 0.65, 0.4], {(0, 1): 0.1}) == [1, 2]
    assert taken(sampler, [0.6, 0.7, 0.65, 0.4], {}) == [0, 1, 2]
    assert taken(sampler, [0.6, 0.7, 0.65, 0.4], {(1, 0): 0.1, (2, 1): 0.1}) == [1]


def test_dawn_blocks_dependants_of_what_is_confident_and_induced() -> None:
    """1 is confident; it blocks 2 in the code's reading only if it also leans on a certain one."""
    confidences = [0.95, 0.95, 0.75, 0.3]
    canvas = dawn_canvas([0], 4)
    sampler = make("dawn", tau_sink=1.0)
    free, induced = {(2, 1): 0.1}, {(2, 1): 0.1, (1, 0): 0.1}
    assert taken(sampler, confidences, free, canvas) == [1, 2]
    assert taken(sampler, confidences, induced, canvas) == [1]
    assert taken(replace(sampler, blockers="either"), confidences, free, canvas) == [1]


# ------------------------------------------------------------------------------------ DOS


def test_dos_orders_by_attention_on_decided_tokens() -> None:
    """The prompt and position 1 of the window are decided; 0, 2 and 3 are not."""
    canvas = dawn_canvas([1], 4)
    attention = torch.zeros(1, 4, 14)
    attention[0, 0, [3, 12]] = torch.tensor([0.3, 0.7])  # .3 on the prompt
    attention[0, 2, [11, 13]] = torch.tensor([0.6, 0.4])  # .6 on position 1
    attention[0, 3, [4, 11, 12]] = torch.tensor([0.2, 0.3, 0.5])  # .5 on both
    sampler = make("dos", tau_sink=1.0, steps=1)
    assert order(sampler, canvas, attention) == [2, 3, 0]
    # position 1 gets .9 of three rows, a mean of .3: as a sink it no longer counts
    assert order(replace(sampler, tau_sink=0.25), canvas, attention) == [0, 3, 2]


def order(sampler: Sampler, canvas: Canvas, attention: Tensor) -> list[int]:
    output = with_states(sampler, canvas, torch.zeros(1, 4, 8), attention=attention)
    decision, _ = sampler.decide(canvas, output, sampler.init(canvas))
    assert decision.scores is not None
    places = canvas.eligible[0].nonzero().flatten().tolist()
    return sorted(places, key=lambda p: -float(decision.scores[0, p]))


def test_dos_is_uniform_attention_in_reading_order() -> None:
    """With nothing to tell positions apart the order is by position: `left_to_right`."""
    sampler = make("dos", steps=3)
    canvas = make_canvas(width=6)
    attention = torch.full((1, 6, 16), 1 / 16)
    output = with_states(sampler, canvas, random_logits(canvas), attention=attention)
    assert chosen(sampler.decide(canvas, output, sampler.init(canvas))[0]) == [0, 1]


def test_dos_rules_meet_their_plain_samplers_where_order_does_not_matter() -> None:
    model = exact_llada()
    for ours, theirs in (
        (make("dos", rule="threshold", threshold=0.0), make("threshold", threshold=0.0)),
        (make("dos", rule="entropy_bound", gamma=1e9), make("entropy_bound", gamma=1e9)),
        (make("dos", steps=1), make("llada", steps=1)),
    ):
        for a, b in zip(generate(model, ours), generate(model, theirs), strict=True):
            assert a.ids == b.ids
            assert order_of(a) == order_of(b)


def test_dos_with_a_threshold_falls_back_to_its_own_order() -> None:
    sampler = make("dos", rule="threshold", threshold=0.8, tau_sink=1.0)
    attention = window_attention({(0, 3): 0.4, (1, 3): 0.1, (2, 3): 0.3}, 4)
    canvas = make_canvas(width=4)
    for confidences, expected in (([0.7, 0.5, 0.6, 0.1], [3]), ([0.7, 0.85, 0.9, 0.1], [1, 2])):
        output = with_states(sampler, canvas, logits_with_top(confidences), attention=attention)
        assert chosen(sampler.decide(canvas, output, sampler.init(canvas))[0]) == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dapd", {"tau": -1.0}, "tau must be >= 0"),
        ("dapd", {"layers_from": 1.5}, "layers_from must be >= 0.0 and <= 1"),
        ("dawn", {"blockers": "none"}, "both, either"),
        ("dos", {"rule": "klass"}, "quota, threshold, entropy_bound"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SAMPLERS.create(name, options)


def test_needs_are_only_what_is_read() -> None:
    assert make("dos").needs == {"attention"}
    assert make("dos", rule="entropy_bound").needs == {"attention", "entropy"}
    assert make("dawn", anchors="canvas").scope == "canvas"
