"""The closed forms of ParallelBench (arXiv:2510.04767) for branching, history and DCD samplers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.test_closed_forms import (
    COPY,
    SAMPLED,
    SHUFFLE,
    assert_rate,
    decoded,
    is_order,
    rate,
)

ROWS = 300


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("lopa", {"lookahead": 0, "threshold": 0.51}),
        ("imh", {"alpha": 1.0, "proposals": 2}),
        ("r2", {"threshold.threshold": 0.51}),
        ("slow_fast", {"threshold": 0.51}),
        ("suffix_anchor", {"threshold": 0.51}),
        ("ccd", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shuffles_are_right_when_no_two_unsure_tokens_go_together(
    sampler: str, options: dict[str, Any]
) -> None:
    texts = decoded(SHUFFLE, 4, sampler, (*options.items(), SAMPLED), ROWS)
    assert rate(texts, is_order) == 1.0
    assert len(set(texts)) > 15, "and they are draws, not one text"


def test_a_lookahead_token_was_drawn_before_what_is_committed_beside_it() -> None:
    """Both come from one prediction, and a full row counts as sure: LoPA can repeat an item."""
    options = (("lookahead", 3), ("threshold", 0.51), SAMPLED)
    assert 0.3 < rate(decoded(SHUFFLE, 4, "lopa", options, ROWS), is_order) < 0.9


def test_equal_scores_that_go_together_break_shuffles() -> None:
    """DCD takes all that reach the highest score: n independent draws where all are alike."""
    options = (("threshold", 0.9), ("law", "rank"), SAMPLED)
    texts = decoded(SHUFFLE, 4, "dcd", options, 1000)
    assert_rate(rate(texts, is_order), math.factorial(4) / 4**4, 1.0, 1000)


@pytest.mark.parametrize("sampler", ["saber", "rcr", "edit", "remdm", "lopa", "imh"])
def test_what_depends_on_nothing_is_always_right(sampler: str) -> None:
    texts = decoded(COPY, 5, sampler, (), 2)
    assert rate(texts, lambda ids: ids == tuple(range(5))) == 1.0
