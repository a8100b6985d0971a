"""PUNT: its rounds on exact laws, what they cost, and what it turns into at the extremes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.errors import OptionError
from dlm_decode.head import output_from_logits
from dlm_decode.models.toy import copy_task, from_table, shuffle_task, xor_task
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.types import Canvas, Draw, Generation, Output, Request
from tests.unit.dependency_cases import (
    Laws,
    exact_llada,
    generate,
    leaves,
    make,
    order_of,
)
from tests.unit.sampler_cases import GREEDY, make_canvas, random_logits

SETTINGS: list[dict[str, Any]] = [{}, {"epsilon": 1.0, "law": "rank"}, {"epsilon": 0.0}]


@pytest.fixture(params=SETTINGS, ids=str)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return SAMPLERS.create("punt", request.param)


class TestLaws(Laws):
    """Those of `dependency_cases`."""


# ------------------------------------------------------------------------------------ one decision


def rounds_of(
    sampler: Sampler, canvas: Canvas, laws: list[Tensor], draw: Draw = GREEDY
) -> tuple[list[Tensor], list[Any]]:
    """Revealed masks of each forward, and the decisions, for given logits a forward."""
    state = sampler.init(canvas)
    shown, decisions = [], []
    for logits in laws:
        query = sampler.query(canvas, state)
        assert query is not None and query.tokens is not None
        shown.append(query.tokens[:, 0] != canvas.tokens)
        output: Output = output_from_logits(
            logits,
            needs=sampler.needs,
            draw=draw,
            canvas=replace(canvas, tokens=query.tokens[:, 0]),
        )
        decision, state = sampler.decide(canvas, output, state)
        decisions.append(decision)
    return shown, decisions


def sharp(order: list[int], vocab: int = 12) -> Tensor:
    """Logits `(1, W, V)` in which position order[r] has the r-th highest confidence."""
    width = len(order)
    logits = torch.zeros(1, width, vocab)
    for r, position in enumerate(order):
        logits[0, position, 1 + position] = 5.0 - 0.3 * r
    return logits


def test_rounds_reveal_by_the_bits_of_ranks() -> None:
    """Ranks 0..5: bit 0 shows 0 2 4, bit 1 shows 0 1 4 5, bit 2 shows 0 1 2 3."""
    canvas = make_canvas(width=6, vocab_size=12)
    order = [3, 1, 0, 5, 2, 4]
    shown, decisions = rounds_of(make("punt", epsilon=0.0), canvas, [sharp(order)] * 4)
    by_rank = [sorted(order.index(p) for p in s[0].nonzero().flatten().tolist()) for s in shown]
    assert by_rank == [[], [0, 2, 4], [0, 1, 4, 5], [0, 1, 2, 3]]
    assert [bool(d.hold) for d in decisions] == [True, True, True, False]
    assert not any(d.commit.any() for d in decisions[:-1])
    assert decisions[-1].commit.all(), "nothing moved, so all survive"
    assert decisions[-1].tokens[0].tolist() == [1, 2, 3, 4, 5, 6]


def test_what_moves_is_dropped_and_is_not_revealed_again() -> None:
    """Rank 1 moves in round 0, where only ranks 1, 3, 5 are tested; it is gone from then on."""
    canvas = make_canvas(width=6, vocab_size=12)
    plain = sharp(list(range(6)))
    moved = plain.clone()
    moved[0, 1] = 0.0
    moved[0, 0] = moved[0, 2] = 0.0  # revealed ones are not tested
    shown, decisions = rounds_of(make("punt"), canvas, [plain, moved, plain, plain])
    revealed = [s[0].nonzero().flatten().tolist() for s in shown]
    assert revealed == [[], [0, 2, 4], [0, 4, 5], [0, 2, 3]]
    assert decisions[-1].commit[0].tolist() == [True, False, True, True, True, True]


def test_the_most_confident_token_is_never_dropped() -> None:
    canvas = make_canvas(width=5, vocab_size=12)
    other = random_logits(canvas, seed=1)
    _, decisions = rounds_of(
        make("punt", epsilon=0.0), canvas, [sharp([2, 0, 1, 3, 4]), *[other] * 3]
    )
    assert decisions[-1].commit[0].tolist() == [False, False, True, False, False]


def test_divergence_is_from_the_plain_law_to_the_revealed_one() -> None:
    """KL(p || q) of a bit at p = (.9, .1), q = (.6, .4) is .2263, the reverse .3112."""
    canvas = make_canvas(width=2, vocab_size=3)
    p, q = (torch.tensor([1e-30, *x]).log() for x in ([0.9, 0.1], [0.6, 0.4]))
    top = torch.tensor([1e-30, 0.99, 0.01]).log()
    laws = [torch.stack([top, p])[None], torch.stack([top, q])[None]]
    for epsilon, both in ((0.25, True), (0.22, False)):
        _, decisions = rounds_of(make("punt", epsilon=epsilon), canvas, laws)
        assert decisions[-1].commit[0].tolist() == [True, both]


def test_rows_are_in_rounds_of_their_own() -> None:
    """A row of one mask is done at once, its neighbours take two and three rounds more."""
    masked = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    canvas = make_canvas(masked=masked, vocab_size=12)
    logits = random_logits(canvas)
    sampler = make("punt")
    _, decisions = rounds_of(sampler, canvas, [logits] * 4)
    assert [d.hold.tolist() for d in decisions] == [
        [False, True, True],
        [False, True, True],
        [False, False, True],
        [False, True, False],
    ]


# ------------------------------------------------------------------------------------ whole runs


def decode(model: Any, length: int, **options: Any) -> Generation:
    decoder = Decoder(model, make("punt", **options), debug=True)
    return decoder.generate(Request([0], gen_length=length, block_length=length))[0]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_independent_positions_cost_one_forward_and_the_rounds(n: int) -> None:
    result = decode(copy_task(list(range(n)), offset=1), n)
    assert result.ids == tuple(range(n))
    assert result.forwards == 1 + math.ceil(math.log2(n))
    assert order_of(result)[-1] == tuple(range(1, n + 1))
    assert not any(order_of(result)[:-1])


def test_exclusive_or_is_told_from_independence() -> None:
    """Pairs are independent, so two go together; revealed together they settle the third."""
    result = decode(xor_task(offset=1), 3)
    a, b, c = result.ids
    assert c == a ^ b
    assert max(len(step) for step in order_of(result)) < 3


def test_two_that_exclude_each_other_go_apart() -> None:
    for seed in range(5):
        decoder = Decoder(shuffle_task(2, offset=1), make("punt"), temperature=1.0, seed=seed)
        (result,) = decoder.generate(Request([0], gen_length=2, block_length=2))
        assert sorted(result.ids) == [0, 1]
        assert [len(step) for step in order_of(result)] == [0, 1, 1]


def test_an_equal_pair_goes_apart_and_an_independent_one_together() -> None:
    table = torch.zeros(2, 2, 2, 2)
    for a, b, c in ((a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)):
        table[a, a, b, c] = [0.6, 0.4][a] * [0.7, 0.3][b] * [0.8, 0.2][c]
    for seed in range(5):
        decoder = Decoder(from_table(table, offset=1), make("punt"), temperature=1.0, seed=seed)
        (result,) = decoder.generate(Request([0], gen_length=4, block_length=4))
        assert result.ids[0] == result.ids[1]
        commits = [step for step in order_of(result) if step]
        assert len(commits) == 2 and len(commits[0]) == 3


def test_an_unlimited_epsilon_commits_everything() -> None:
    """What the rounds say does not matter then: the tokens are those of one step."""
    model = exact_llada()
    ours = generate(model, make("punt", epsilon=1e9))
    for a, b in zip(ours, generate(model, make("threshold", threshold=0.0)), strict=True):
        assert a.ids == b.ids
        assert [step for step in order_of(a) if step] == order_of(b)


def test_epsilon_zero_is_one_token_a_decision() -> None:
    """In a transformer every position moves a little, so the tokens are LLaDA's own, one by one."""
    model = exact_llada()
    ours = generate(model, make("punt", epsilon=0.0))
    for a, b in zip(ours, generate(model, make("llada")), strict=True):
        assert a.ids == b.ids
        assert [step for step in order_of(a) if step] == order_of(b)
        assert a.forwards > b.forwards


def test_state_keeps_its_shape() -> None:
    canvas = make_canvas(rows=2, width=5)
    sampler = make("punt")
    state = sampler.init(canvas)
    output = output_from_logits(
        random_logits(canvas), needs=sampler.needs, draw=GREEDY, canvas=canvas
    )
    _, after = sampler.decide(canvas, output, state)
    assert [t.shape for t in leaves(state)] == [t.shape for t in leaves(after)]
    assert state.keys() == after.keys()


def test_a_negative_epsilon_is_refused() -> None:
    with pytest.raises(OptionError, match="epsilon must be >= 0"):
        make("punt", epsilon=-1.0)
