"""Ranking and selection: one total order, never more than is eligible."""

from __future__ import annotations

import pytest
import torch

from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.scores import (
    best,
    check_choice,
    commit_candidates,
    confidence,
    inverse_permutation,
    longest_prefix,
    margin,
    negative_entropy,
    ranks,
    sorted_by_rank,
    top,
)
from dlm_decode.types import Output
from tests.unit.sampler_cases import make_canvas

ALL = torch.ones(1, 5, dtype=torch.bool)
SOME = torch.tensor([[True, False, True, False, True]])


def test_equal_scores_are_ranked_by_position() -> None:
    assert ranks(torch.tensor([[0.5, 0.9, 0.5, 0.9, 0.5]]), ALL).tolist() == [[2, 0, 3, 1, 4]]


def test_neighbouring_doubles_are_told_apart() -> None:
    a = 0.9
    b = float(torch.nextafter(torch.tensor(a, dtype=torch.float64), torch.tensor(1.0).double()))
    scores = torch.tensor([[a, b, a]], dtype=torch.float64)
    assert ranks(scores, torch.ones(1, 3, dtype=torch.bool)).tolist() == [[1, 0, 2]]


def test_positions_that_are_not_eligible_rank_last_even_against_minus_infinity() -> None:
    scores = torch.tensor([[-torch.inf, 9.0, -torch.inf, torch.nan, 1.0]])
    assert ranks(scores, SOME)[SOME].tolist() == [1, 2, 0]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 99])
def test_top_takes_at_most_what_is_eligible(count: int) -> None:
    scores = torch.tensor([[1.0, 9.0, 2.0, 9.0, 3.0]])
    taken = top(scores, SOME, count)
    assert taken.sum() == min(count, 3)
    assert not (taken & ~SOME).any()
    assert torch.equal(taken, top(scores, SOME, torch.tensor([count])))


def test_every_row_has_its_own_count() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0]]).repeat(3, 1)
    eligible = torch.ones(3, 3, dtype=torch.bool)
    taken = top(scores, eligible, torch.tensor([0, 1, 2]))
    assert taken.int().tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 1]]


def test_best_of_nothing_is_nothing() -> None:
    assert not best(torch.rand(2, 5), torch.zeros(2, 5, dtype=torch.bool)).any()


def test_sorting_and_ranking_are_inverse() -> None:
    rank = torch.tensor([[2, 0, 1], [0, 2, 1]])
    values = torch.tensor([[7, 8, 9], [1, 2, 3]])
    assert sorted_by_rank(values, rank).tolist() == [[8, 9, 7], [1, 3, 2]]
    assert inverse_permutation(inverse_permutation(rank)).tolist() == rank.tolist()


def test_prefix_ends_at_the_first_failure() -> None:
    rank = torch.tensor([[3, 0, 1, 2, 4]])
    passes = torch.tensor([[True, True, False, True, True]])
    assert longest_prefix(passes, rank, ALL).int().tolist() == [[0, 1, 1, 0, 0]]
    assert longest_prefix(passes, rank, SOME).int().tolist() == [[0, 0, 1, 0, 0]]


def output(**stats: float) -> Output:
    return Output({name: torch.tensor([[value]]) for name, value in stats.items()})


def test_confidence_by_law_and_distribution() -> None:
    greedy = output(top1=3, p1=0.5, q1=0.75)
    drawn = output(top1=3, p1=0.5, q1=0.75, sampled=4, p_sampled=0.25, q_sampled=0.125)
    assert [confidence(greedy, law=law).item() for law in ("propose", "rank")] == [0.5, 0.5]
    assert [confidence(drawn, law=law).item() for law in ("propose", "rank")] == [0.25, 0.5]
    assert confidence(drawn, on="filtered").item() == 0.125
    assert confidence(drawn, law="rank", on="filtered").item() == 0.75


def test_margin_and_entropy_of_both_distributions() -> None:
    out = output(p1=0.5, p2=0.25, q1=0.75, q2=0.125, entropy=1.5, q_entropy=0.5)
    assert (margin(out).item(), margin(out, on="filtered").item()) == (0.25, 0.625)
    assert (negative_entropy(out).item(), negative_entropy(out, on="filtered").item()) == (
        -1.5,
        -0.5,
    )


def test_statistics_that_were_not_declared_are_refused() -> None:
    with pytest.raises(CapabilityError, match="p2"):
        margin(output(p1=0.5))


def test_commit_candidates_keeps_to_eligible_positions_and_drops_their_nans() -> None:
    canvas = make_canvas(masked=SOME)
    out = Output({"top1": torch.arange(5)[None]})
    scores = torch.tensor([[1.0, torch.nan, 2.0, torch.inf, 3.0]])
    decision = commit_candidates(canvas, out, ALL, scores)
    assert torch.equal(decision.commit, SOME)
    assert decision.tokens.tolist() == [[0, 1, 2, 3, 4]]
    assert decision.scores is not None and decision.scores.tolist() == [[1.0, 0.0, 2.0, 0.0, 3.0]]


def test_check_choice() -> None:
    check_choice("law", "rank", ("propose", "rank"))
    with pytest.raises(OptionError, match="law must be one of propose, rank, got 'x'"):
        check_choice("law", "x", ("propose", "rank"))
