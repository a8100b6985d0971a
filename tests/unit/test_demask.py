"""DEMASK: its bound on exact joint laws, the case where it fails, and what it turns into."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.dependency import OracleSource
from dlm_decode.errors import OptionError
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.samplers.demask import Demask
from dlm_decode.types import Request
from tests.unit.dependency_cases import (
    RowLaws,
    exact_llada,
    generate,
    make,
    order_of,
    window_attention,
    with_states,
)
from tests.unit.sampler_cases import chosen, logits_with_top, make_canvas

SETTINGS: list[dict[str, Any]] = [
    {},
    {"mode": "per_position", "tau": 0.05},
    {"source": "cosine", "tau": 1.0},
    {"tau": 0.4, "tau_min": 0.5},
]


@pytest.fixture(params=SETTINGS, ids=str)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return SAMPLERS.create("demask", request.param)


class TestLaws(RowLaws):
    """Those of `dependency_cases`."""


# ------------------------------------------------------------------------------------ identities


@pytest.mark.parametrize("mode", ["cumulative", "per_position"])
def test_tau_zero_is_one_token_a_step(mode: str) -> None:
    """Attention is positive everywhere, so nothing fits beside the most confident token."""
    model = exact_llada()
    ours = generate(model, make("demask", tau=0.0, mode=mode))
    for a, b in zip(ours, generate(model, make("llada", law="rank")), strict=True):
        assert a.ids == b.ids
        assert order_of(a) == order_of(b)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_dependence_the_conjunct_is_a_threshold(temperature: float) -> None:
    model = exact_llada()
    none = OracleSource(lambda canvas, _: torch.zeros(*canvas.tokens.shape, canvas.tokens.shape[1]))
    ours = generate(model, Demask(tau_min=0.6, given=none), temperature=temperature)
    theirs = make("threshold", threshold=0.6, law="rank")
    for a, b in zip(ours, generate(model, theirs, temperature=temperature), strict=True):
        assert a.ids == b.ids
        assert order_of(a) == order_of(b)


def test_without_a_bound_everything_is_committed_at_once() -> None:
    results = generate(exact_llada(), make("demask", tau=1e9))
    assert [len(order_of(r)) for r in results] == [2, 2, 1]


def test_modes_bound_the_step_or_each_token() -> None:
    """Confidence order 0, 1, 2, 3; 1 and 2 lean on 0 with .2 each, 3 on 1 with .05."""
    pairs = {(1, 0): 0.2, (2, 0): 0.2, (3, 1): 0.05}
    canvas = make_canvas(width=4)
    logits = logits_with_top([0.9, 0.8, 0.7, 0.6])
    attention = window_attention(pairs, 4)

    def taken(**options: Any) -> list[int]:
        sampler = make("demask", **options)
        output = with_states(sampler, canvas, logits, attention=attention)
        return chosen(sampler.decide(canvas, output, sampler.init(canvas))[0])

    assert taken(tau=0.26) == [0, 1, 3]
    assert taken(tau=0.21, mode="per_position") == [0, 1, 2, 3]
    assert taken(tau=0.1) == [0, 3]
    assert taken(tau=0.5, tau_min=0.75) == [0, 1]
    assert taken(tau=0.5, tau_min=0.95) == [0], "the best token needs no confidence"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": -0.1}, "tau must be >= 0"),
        ({"mode": "both"}, "cumulative, per_position"),
        ({"quantile": 0.9}, "quantile needs a predictor"),
        ({"tau_min": 1.5}, "tau_min must be >= 0.0 and <= 1"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SAMPLERS.create("demask", options)


# ------------------------------------------------------------------------------------ the bound


def marginals(joint: Tensor, keep: list[int]) -> Tensor:
    """Law of the positions `keep`, axes in that order."""
    drop = [axis for axis in range(joint.ndim) if axis not in keep]
    law = joint.sum(drop) if drop else joint
    return law.permute([sorted(keep).index(p) for p in keep])


def total_variation(joint: Tensor, chosen: list[int]) -> float:
    """TV between the joint law of `chosen` and the product of their marginals."""
    law = marginals(joint, chosen)
    product_law = torch.ones_like(law)
    for axis, position in enumerate(chosen):
        shape = [1] * len(chosen)
        shape[axis] = -1
        product_law = product_law * marginals(joint, [position]).reshape(shape)
    return float((law - product_law).abs().sum()) / 2


def influences(joint: Tensor) -> Tensor:
    """D[i, j] = E_{x_i} TV(p(x_j | x_i), p(x_j)) for every pair."""
    n = joint.ndim
    d = torch.zeros(n, n, dtype=torch.float64)
    for i, j in product(range(n), repeat=2):
        if i != j:
            pair = marginals(joint, [i, j])
            apart = pair.sum(1, keepdim=True) * pair.sum(0, keepdim=True)
            d[i, j] = (pair - apart).abs().sum() / 2
    return d


def random_tree(seed: int, n: int, *, chain: bool) -> Tensor:
    """The joint law `(2,) * n` of bits, each drawn given one earlier bit."""
    generator = torch.Generator().manual_seed(seed)
    joint = torch.ones((2,) * n, dtype=torch.float64)
    for i in range(n):
        parent = i - 1 if chain else int(torch.randint(max(i, 1), (1,), generator=generator))
        p = torch.rand(2, generator=generator, dtype=torch.float64)
        table = torch.stack([p, 1 - p], dim=1)  # [parent's bit, own bit]
        shape = [1] * n
        if i == 0:
            shape[0] = 2
            joint = joint * table[0].reshape(shape)
        else:
            shape[parent] = shape[i] = 2
            joint = joint * table.reshape(shape)
    return joint / joint.sum()


def first_step(joint: Tensor, **options: Any) -> tuple[list[int], float]:
    """What DEMASK commits first on the exact marginals and influences, and its summed bound."""
    n = joint.ndim
    canvas = make_canvas(width=n, mask_id=2, vocab_size=3)
    law = torch.stack([marginals(joint, [i]) for i in range(n)])
    logits = torch.cat([law.log(), torch.full((n, 1), -1e4)], dim=1)[None]
    d = influences(joint)
    sampler = Demask(given=OracleSource(d[None]), **options)
    output = with_states(sampler, canvas, logits)
    decision, _ = sampler.decide(canvas, output, sampler.init(canvas))
    found = chosen(decision)
    confidence = law.amax(-1)
    order = sorted(found, key=lambda i: (-float(confidence[i]), i))
    total = sum(float(d[i, j]) for k, j in enumerate(order) for i in order[:k])
    return found, total


@pytest.mark.parametrize("tau", [0.05, 0.2, 0.6])
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_the_sum_bounds_the_total_variation_of_tree_laws(chain: bool, tau: float) -> None:
    several = 0
    for seed in range(60):
        joint = random_tree(seed, 6, chain=chain)
        taken, total = first_step(joint, tau=tau)
        assert total <= tau + 1e-9
        assert total_variation(joint, taken) <= total + 1e-9
        several += len(taken) > 1
    assert several > 30, "the bound is tested on steps that commit more than one token"


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_a_predictor_that_is_off_by_e_costs_at_most_its_errors(chain: bool) -> None:
    """With D - e instead of D the total variation is within the sum plus e for each pair."""
    e, tau = 0.02, 0.1
    for seed in range(40):
        joint = random_tree(seed, 6, chain=chain)
        d = influences(joint)
        low = (d - e).clamp(min=0)
        canvas = make_canvas(width=6, mask_id=2, vocab_size=3)
        law = torch.stack([marginals(joint, [i]) for i in range(6)])
        logits = torch.cat([law.log(), torch.full((6, 1), -1e4)], dim=1)[None]
        sampler = Demask(tau=tau, given=OracleSource(low[None]))
        taken = chosen(
            sampler.decide(canvas, with_states(sampler, canvas, logits), sampler.init(canvas))[0]
        )
        pairs = len(taken) * (len(taken) - 1) / 2
        assert total_variation(joint, taken) <= tau + pairs * e + 1e-9


def test_the_bound_fails_for_the_exclusive_or() -> None:
    """No two of the bits depend on each other, all three do: the documented counter-example."""
    joint = torch.zeros(2, 2, 2, dtype=torch.float64)
    for a, b in product((0, 1), repeat=2):
        joint[a, b, a ^ b] = 0.25
    taken, total = first_step(joint, tau=0.0)
    assert taken == [0, 1, 2]
    assert total == 0.0
    assert total_variation(joint, taken) == pytest.approx(0.5)


def test_ignored_dependence_breaks_the_bound() -> None:
    """Negative control: with influences of zero, equal bits are committed together."""
    joint = torch.zeros(2, 2, dtype=torch.float64)
    joint[0, 0], joint[1, 1] = 0.4, 0.6
    assert total_variation(joint, [0, 1]) == pytest.approx(0.48)
    assert first_step(joint, tau=0.4)[0] == [0]
    assert first_step(joint, tau=0.5) == ([0, 1], pytest.approx(0.48))


def test_a_request_of_one_position_is_decided() -> None:
    (result,) = generate(exact_llada(), make("demask"), [Request([5, 6], gen_length=1)])
    assert len(result.ids) == 1
