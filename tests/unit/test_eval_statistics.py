"""Intervals, paired tests and AUP against values computed by hand or by definition."""

from __future__ import annotations

import math
import random

import pytest

from dlm_decode.eval.metrics import summarise
from dlm_decode.eval.statistics import Z_95, aup, bootstrap, mcnemar, wilson


def test_wilson_solves_its_defining_equation() -> None:
    """Each end p satisfies (p_hat - p)^2 = z^2 p (1 - p) / n."""
    for successes, trials in ((41, 100), (3, 7), (999, 1000)):
        found = wilson(successes, trials)
        for end in (found.low, found.high):
            left = (successes / trials - end) ** 2
            assert math.isclose(left, Z_95**2 * end * (1 - end) / trials, rel_tol=1e-9)


def test_wilson_at_the_borders() -> None:
    assert wilson(0, 10).low == 0
    assert wilson(10, 10).high == 1
    assert 0 < wilson(0, 10).high < 0.3
    with pytest.raises(ValueError, match="3/2"):
        wilson(3, 2)


def test_the_published_margins_of_the_benchmarks() -> None:
    """GSM8K 78% of 1319: about 2.2 points; HumanEval 44% of 164: about 7.6."""
    gsm8k, humaneval = wilson(1029, 1319), wilson(72, 164)
    assert (gsm8k.high - gsm8k.low) / 2 == pytest.approx(0.022, abs=0.001)
    assert (humaneval.high - humaneval.low) / 2 == pytest.approx(0.076, abs=0.002)


def test_mcnemar_is_the_exact_sign_test() -> None:
    a = {str(i): i < 60 for i in range(100)}
    b = {str(i): 10 <= i < 72 for i in range(100)}
    found = mcnemar(a, b)
    assert (found.both, found.only_a, found.only_b, found.neither) == (50, 10, 12, 28)
    tail = sum(math.comb(22, k) for k in range(11)) / 2**22
    assert found.p_value == pytest.approx(min(1.0, 2 * tail))
    assert found.difference == pytest.approx(0.02)
    assert mcnemar(a, a).p_value == 1.0
    with pytest.raises(ValueError, match="share no problem"):
        mcnemar(a, {"x": True})


def test_bootstrap_covers_the_mean() -> None:
    rng = random.Random(0)
    rows = [rng.gauss(5, 1) for _ in range(400)]
    found = bootstrap(rows, lambda xs: sum(xs) / len(xs))
    assert found.low < found.value < found.high
    assert (found.high - found.low) / 2 == pytest.approx(1.96 / 20, rel=0.2)
    assert bootstrap(rows, lambda xs: sum(xs) / len(xs)) == found


def test_aup_of_published_points() -> None:
    """d3LLM's LLaDA points on GSM8K-CoT: one point is rho times y; two add a trapezoid."""
    assert aup([(1.0, 72.55)], 74.68) == pytest.approx(72.55)

    def weight(y: float) -> float:
        return y * math.exp(-3 * (1 - y / 74.68))

    expected = 72.55 + 0.5 * 1.77 * (weight(72.55) + weight(74.68))
    assert aup([(2.77, 74.68), (1.0, 72.55)], 74.68) == pytest.approx(expected)
    assert aup([(1.0, 72.55), (9.0, 60.0)], 74.68) == pytest.approx(72.55), "5 points below: out"
    assert aup([], 70.0) == 0.0


def _row(tokens: int, forwards: int, seconds: float, right: bool) -> dict[str, object]:
    return {
        "tokens": tokens, "forwards": forwards, "forwards_by_kind": {"full": forwards},
        "computed_positions": 10 * forwards, "decode_s": seconds, "ttfb_s": seconds / 2,
        "finish_reason": "eos", "scores": {"correct": right},
    }  # fmt: skip


def test_figures_are_ratios_of_sums() -> None:
    found = summarise([_row(10, 10, 1.0, True), _row(30, 5, 1.0, False)], ["correct"])
    assert found["tpf"]["value"] == pytest.approx(40 / 15)
    assert found["tps"]["value"] == pytest.approx(20)
    assert found["ppt"] == pytest.approx(150 / 40)
    assert found["forwards_by_kind"] == {"full": 15}
    assert found["accuracy"]["correct"]["value"] == 0.5
    with pytest.raises(ValueError, match="no figures"):
        summarise([], ["correct"])
