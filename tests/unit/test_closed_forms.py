"""Accuracies that are known in closed form, on exact denoisers of known laws (arXiv:2510.04767).

Every rate is compared within four standard errors, and with a wrong rate that must lie outside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from dlm_decode.api import Decoder
from dlm_decode.models.toy import (
    Tabular,
    copy_task,
    independent_task,
    replace_random_task,
    shuffle_task,
    xor_task,
)
from dlm_decode.types import Request

ROWS = 1500
Ids = tuple[int, ...]


@cache
def decoded(
    task: Callable[[int], Tabular],
    n: int,
    sampler: str,
    options: tuple[tuple[str, Any], ...],
    rows: int = ROWS,
) -> list[Ids]:
    """The texts of `rows` equal requests for n items; each has its own draws."""
    decoder = Decoder(task(n), sampler, options=dict(options), max_batch_size=250)
    request = Request([0], gen_length=n, block_length=n)
    return [result.ids for result in decoder.generate([request] * rows)]


def at_offset(task: Callable[..., Tabular]) -> Callable[[int], Tabular]:
    """The task behind a prompt of one token."""
    return cache(lambda n: task(n, offset=1))


SHUFFLE, REPLACE = at_offset(shuffle_task), at_offset(replace_random_task)
COPY = cache(lambda n: copy_task(range(n), offset=1))
XOR = cache(lambda n: xor_task(offset=1))
SAMPLED = ("temperature", 1.0)


def rate(texts: Sequence[Ids], right: Callable[[Ids], bool]) -> float:
    return sum(map(right, texts)) / len(texts)


def is_order(ids: Ids) -> bool:
    return sorted(ids) == list(range(len(ids)))


def is_replaced(ids: Ids) -> bool:
    """Exactly one item is replaced by item n, and the others stand in their places."""
    n = len(ids)
    return sum(token == n for token in ids) == 1 and all(t in (i, n) for i, t in enumerate(ids))


def assert_rate(found: float, expected: float, other: float, rows: int = ROWS) -> None:
    """Within four standard errors of `expected` and not of `other`."""
    spread = 4 * math.sqrt(max(expected * (1 - expected), 1e-4) / rows)
    assert abs(found - expected) <= spread, (found, expected)
    assert abs(found - other) > spread, "the test could not fail"


def shuffle_rate(n: int, k: int) -> float:
    """prod over steps of m! / ((m - k)! m^k), with m = n, n - k, ... items left."""
    accuracy = 1.0
    for m in range(n, 0, -k):
        taken = min(k, m)
        accuracy *= math.perm(m, taken) / m**taken
    return accuracy


def test_the_formula_for_shuffles_has_its_known_values() -> None:
    assert shuffle_rate(4, 2) == pytest.approx(0.375)
    assert shuffle_rate(6, 2) == pytest.approx(0.3125)
    assert shuffle_rate(4, 4) == pytest.approx(math.factorial(4) / 4**4)


@pytest.mark.parametrize("sampler", ["random", "left_to_right", "llada", "margin", "entropy"])
@pytest.mark.parametrize(("n", "k"), [(4, 2), (4, 4), (5, 2)])
def test_shuffles_drawn_k_at_a_time(sampler: str, n: int, k: int) -> None:
    """k independent draws of what is left: no order of positions can help."""
    options: list[tuple[str, Any]] = [("steps", math.ceil(n / k)), SAMPLED]
    if sampler == "llada":
        options.append(("law", "rank"))
    texts = decoded(SHUFFLE, n, sampler, tuple(options))
    assert_rate(rate(texts, is_order), shuffle_rate(n, k), shuffle_rate(n, 1))


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("random", {}),
        ("threshold", {"threshold": 0.51}),
        ("threshold", {"threshold": 0.9}),
        ("threshold", {"threshold": 0.51, "law": "rank"}),
        ("factor", {"factor": 0.9}),
        ("entropy_bound", {"gamma": 0.1}),
        ("dream", {}),
        ("klass", {}),
    ],
)
def test_shuffles_are_always_right_one_at_a_time(sampler: str, options: dict[str, Any]) -> None:
    """Above one half a threshold lets no two go: of two equal halves neither reaches it.

    A turn that decides two or more is right only once they are certain. `dream` rounds its last
    step up to two tokens, which is its published defect and right half of the time.
    """
    texts = decoded(SHUFFLE, 4, sampler, (*options.items(), SAMPLED), 300)
    if sampler == "dream":
        assert_rate(rate(texts, is_order), 0.5, 1.0, 300)
        texts = decoded(SHUFFLE, 4, sampler, (("schedule", "repaired"), SAMPLED), 300)
    assert rate(texts, is_order) == 1.0
    assert len(set(texts)) > 20, "and they are draws, not one text"


def test_draws_one_at_a_time_are_uniform_over_the_orders() -> None:
    """All 24 orders equally often: the chi-square of 23 degrees of freedom below its 0.1% point."""
    for sampler in ("random", "llada"):
        options = (SAMPLED, ("law", "rank")) if sampler == "llada" else (SAMPLED,)
        counts = Counter(decoded(SHUFFLE, 4, sampler, options))
        expected = ROWS / 24
        assert len(counts) == 24
        assert sum((c - expected) ** 2 / expected for c in counts.values()) < 49.7


@pytest.mark.parametrize("n", [4, 6])
def test_replacing_one_item_in_a_single_step(n: int) -> None:
    """Each position takes the new item with probability 1/n: right with (1 - 1/n)^(n - 1)."""
    texts = decoded(REPLACE, n, "random", (("steps", 1), SAMPLED))
    assert_rate(rate(texts, is_replaced), (1 - 1 / n) ** (n - 1), 1.0)


@pytest.mark.parametrize(
    ("n", "steps", "right"), [(4, 4, 1), (4, 2, 0), (4, 1, 0), (5, 3, 1), (6, 2, 0)]
)
def test_replacing_greedily_depends_on_the_last_step(n: int, steps: int, right: int) -> None:
    """All old items are the likelier ones, until the last position has to take the new one.

    So it is right exactly if the last step decides one token; of two or more none takes it (equal
    halves go to the smaller id, which is the old item).
    """
    texts = decoded(REPLACE, n, "llada", (("steps", steps),), 2)
    assert (n // steps == 1) == bool(right), "the rest of a budget goes first"
    assert rate(texts, is_replaced) == right


@pytest.mark.parametrize("n", [3, 5])
def test_replacing_by_a_threshold_is_right_above_its_bound(n: int) -> None:
    """Old items have (n - 1)/n at first: a lower threshold takes all of them at once."""
    bound = (n - 1) / n
    for threshold, expected in ((bound + 1e-6, 1.0), (bound - 1e-6, 0.0)):
        texts = decoded(REPLACE, n, "threshold", (("threshold", threshold),), 2)
        assert rate(texts, is_replaced) == expected


@pytest.mark.parametrize("sampler", ["llada", "random", "threshold", "factor", "entropy_bound"])
def test_copies_are_right_in_one_step(sampler: str) -> None:
    """Positions that depend on nothing can all be decided at once, at any temperature."""
    for temperature in (0.0, 1.0):
        steps = (("steps", 1),) if sampler in ("llada", "random") else ()
        task = Decoder(COPY(5), sampler, options=dict(steps), temperature=temperature)
        result = task.generate(Request([0], gen_length=5, block_length=5))[0]
        assert result.ids == (0, 1, 2, 3, 4) and result.forwards == 1


@pytest.mark.parametrize(("steps", "expected"), [(1, 0.5), (3, 1.0)])
def test_an_exclusive_or_needs_its_third_bit_last(steps: int, expected: float) -> None:
    """Pairs are independent, so the third bit is right half of the time if drawn with them."""
    texts = decoded(XOR, 3, "random", (("steps", steps), SAMPLED))
    found = rate(texts, lambda ids: ids[0] ^ ids[1] == ids[2])
    assert_rate(found, expected, 1.5 - expected)


def test_the_entropy_bound_takes_as_many_bits_as_its_nats() -> None:
    """Of three fair bits it takes k with (k - 1) ln 2 <= gamma, and errs when it takes all."""
    for gamma, forwards, expected in ((0.5, 3, 1.0), (0.7, 2, 1.0), (1.4, 1, 0.5)):
        task = Decoder(XOR(3), "entropy_bound", options={"gamma": gamma}, temperature=1.0)
        results = task.generate([Request([0], gen_length=3, block_length=3)] * 400)
        assert {r.forwards for r in results} == {forwards}
        found = rate([r.ids for r in results], lambda ids: ids[0] ^ ids[1] == ids[2])
        assert_rate(found, expected, 0.75, 400)


@pytest.mark.parametrize("law", ["rank", "propose"])
def test_drawing_before_or_after_ranking_are_two_laws(law: str) -> None:
    """Share of tokens that are not the likeliest: 1 - c after ranking, less if draws are ranked.

    For L positions of top mass c: (1 - c)(1 - (1 - c)^L) / (L c) when the likeliest draws go first.
    """
    length, c, vocab = 3, 0.4, 4
    rest = (1 - c) / (vocab - 1)
    task = independent_task([[c] + [rest] * (vocab - 1)] * length, offset=1)
    decoder = Decoder(task, "llada", options={"law": law}, temperature=1.0, max_batch_size=250)
    request = Request([0], gen_length=length, block_length=length)
    texts = [r.ids for r in decoder.generate([request] * ROWS)]
    misses = sum(token != 0 for ids in texts for token in ids) / (ROWS * length)
    closed = {"rank": 1 - c, "propose": (1 - c) * (1 - (1 - c) ** length) / (length * c)}
    other = closed["propose" if law == "rank" else "rank"]
    assert_rate(misses, closed[law], other, ROWS * length)
