"""Task families: gold answers verify, corrupted ones fail, held-out prompts are never trained."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from dlm_decode.tasks import (
    FAMILIES,
    Family,
    Item,
    get_family,
    grids,
    held_out,
    lists,
    mini_gsm8k,
    mini_mbpp,
    split_of,
    train_stream,
    verify,
)
from dlm_decode.tasks.items import draw_distinct, new_item

NAMES = sorted(FAMILIES)


def some(name: str, n: int, seed: int = 0) -> list[Item]:
    return [FAMILIES[name].make(rng) for rng in [random.Random(seed)] for _ in range(n)]


def pick(name: str, **meta: str) -> Item:
    """The first item whose meta has these values."""
    return next(i for i in some(name, 400) if all(i.meta.get(k) == v for k, v in meta.items()))


@pytest.mark.parametrize("name", NAMES)
def test_gold_answers_verify(name: str) -> None:
    items = some(name, 12 if name == mini_mbpp.NAME else 400)
    assert all(verify(item, item.answer) for item in items)


@pytest.mark.parametrize("name", NAMES)
def test_answers_of_other_items_and_noise_fail(name: str) -> None:
    """Negative control: a verifier that says yes to everything would pass the gold test."""
    items = some(name, 12 if name == mini_mbpp.NAME else 200)
    for item, other in itertools.pairwise(items):
        if item.meta != other.meta and name != mini_mbpp.NAME:
            assert not verify(item, other.answer) or name == grids.NAME
        for text in ("", "42", item.answer[:-1], item.answer + " x", item.prompt):
            assert not verify(item, text)


@pytest.mark.parametrize("name", NAMES)
def test_held_out_prompts_are_distinct_and_never_in_the_training_stream(name: str) -> None:
    n = 60
    test, validation = held_out(name, n, 3), held_out(name, n, 3, split="validation")
    trained = {item.prompt for item in itertools.islice(train_stream({name: 1.0}, seed=5), 1000)}
    prompts = {item.prompt for item in test} | {item.prompt for item in validation}
    assert len(prompts) == 2 * n
    assert not prompts & trained
    assert {split_of(prompt) for prompt in trained} == {"train"}


@pytest.mark.parametrize("name", NAMES)
def test_items_are_a_function_of_the_seed(name: str) -> None:
    assert held_out(name, 20, 1) == held_out(name, 20, 1)
    assert held_out(name, 20, 1) != held_out(name, 20, 2)
    streams = [list(itertools.islice(train_stream({name: 1.0}, seed=s), 20)) for s in (0, 0, 1)]
    assert streams[0] == streams[1] != streams[2]


def test_train_stream_draws_families_by_weight() -> None:
    items = itertools.islice(train_stream({"lists": 3.0, "grids": 1.0, "mini-mbpp": 0.0}), 2000)
    counts = {name: 0 for name in NAMES}
    for item in items:
        counts[item.family] += 1
    assert counts["mini-mbpp"] == counts["mini-gsm8k"] == 0
    assert 1350 < counts["lists"] < 1650


def test_errors_name_the_parameter_and_the_value() -> None:
    with pytest.raises(ValueError, match=r"family must be one of .*'poems'"):
        get_family("poems")
    with pytest.raises(ValueError, match="weights must be non-negative"):
        next(train_stream({"lists": -1.0}))
    with pytest.raises(ValueError, match="split must be"):
        held_out("lists", 1, split="train")


def test_asking_for_more_held_out_items_than_there_are_prompts_is_an_error() -> None:
    few = Family(
        "few", lambda rng: new_item("few", str(rng.randrange(40)), "", {}), lambda i, t: True
    )
    with pytest.raises(ValueError, match="n must be at most the number of distinct test prompts"):
        draw_distinct(few, 40, seed=0, split="test", max_tries=200)


def test_items_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        some("lists", 1)[0].answer = ""  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    ["1+1=3\n#### {n}", "#### {wrong}", "__import__('os')\n#### {n}", "####{n}", "#### {n} apples"],
)
def test_gsm8k_rejects_false_equations_and_wrong_results(text: str) -> None:
    item = some(mini_gsm8k.NAME, 1)[0]
    n = item.meta["result"]
    assert not verify(item, text.format(n=n, wrong=n + 1))


def test_gsm8k_results_are_within_two_digits_and_few_equations() -> None:
    for item in some(mini_gsm8k.NAME, 500):
        assert 2 <= item.meta["result"] <= mini_gsm8k.MAX_VALUE
        assert item.answer.count("=") <= mini_gsm8k.MAX_EQUATIONS


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "def f(xs):\n    import os\n    return 0",
        "def f(xs):\n    return xs.__class__",
        "def f(xs):\n    return open('x')",
        "def f(xs):\n    return eval('1')",
        "def f(xs):\n    return __builtins__",
        "def f(xs):\n    while 1:\n        xs = xs",
        "def f(xs):\n    return 9 ** 9 ** 9",
        "def f(xs):\n    return 'a'",
        "def g(xs):\n    return 0",
        "def f(xs):\n    return 0\nprint('passed')",
        "@f\ndef f(xs):\n    return 0",
        "def f(xs, y=print):\n    return 0",
        "def f(xs):\n    return (lambda: 0)()",
        "def f(xs:\n",
    ],
)
def test_mbpp_refuses_unlisted_syntax_without_running_it(source: str) -> None:
    assert not mini_mbpp.is_safe(source)
    assert not verify(some(mini_mbpp.NAME, 1)[0], source)


def test_mbpp_accepts_another_right_program_and_rejects_a_wrong_or_endless_one() -> None:
    tests = (((1, 2, 3), 6), ((), 0))
    item = Item("x", mini_mbpp.NAME, "sum", "", {"tests": tests})
    assert verify(item, "def f(xs):\n    return sum(xs)")
    assert not verify(item, "def f(xs):\n    return len(xs)")
    assert not verify(item, "def f(xs):\n    return sum([a for a in range(10000000000)])")
    assert not verify(item, "def f(xs):\n    return sum(range(3)) + nothing")


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("[ bee cat ant ]", True),
        ("[ ant bee cat ]", False),
        ("[ bee bee ant ]", False),
        ("[ bee cat ]", False),
        ("bee cat ant", False),
        ("[ bee  cat ant ]", False),
    ],
)
def test_shuffle_takes_any_other_order_of_the_same_words(answer: str, right: bool) -> None:
    meta = {"operation": "shuffle", "words": ("ant", "bee", "cat"), "new": "dog", "answer": ()}
    assert verify(Item("x", lists.NAME, "", "", meta), answer) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("[ dog bee cat ]", True),
        ("[ ant bee dog ]", True),
        ("[ ant bee cat ]", False),
        ("[ dog bee dog ]", False),
        ("[ ant bee cat dog ]", False),
    ],
)
def test_replace_random_takes_any_one_place(answer: str, right: bool) -> None:
    meta = {
        "operation": "replace-random",
        "words": ("ant", "bee", "cat"),
        "new": "dog",
        "answer": (),
    }
    assert verify(Item("x", lists.NAME, "", "", meta), answer) is right


def test_every_list_operation_is_drawn() -> None:
    assert {i.meta["operation"] for i in some(lists.NAME, 300)} == set(lists.OPERATIONS)


def test_there_are_576_latin_squares_and_288_sudokus_of_order_four() -> None:
    assert len(grids.LATIN_SQUARES) == 576
    assert len(grids.SUDOKUS) == 288


def test_a_sudoku_has_one_solution_and_a_broken_one_fails() -> None:
    item = pick(grids.NAME, kind="sudoku")
    right = [g for g in grids.SUDOKUS if verify(item, grids.render(g))]
    assert [grids.render(g) for g in right] == [item.answer]
    assert not verify(item, item.answer[1] + item.answer[0] + item.answer[2:])


def test_a_latin_square_may_be_completed_otherwise_but_must_keep_its_givens() -> None:
    item = next(
        i
        for i in some(grids.NAME, 400)
        if i.meta["kind"] == "latin" and sum(map(bool, i.meta["givens"])) == 4
    )
    right = [g for g in grids.LATIN_SQUARES if verify(item, grids.render(g))]
    assert len(right) > 1
    assert len(right) < len(grids.LATIN_SQUARES)
