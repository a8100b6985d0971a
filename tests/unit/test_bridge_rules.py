"""Verification is exact for every certified law, by enumeration; biased variants are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.bridge import FACTORISED, ONE_HOT, RULES, Draft, Tree, best_prefixes
from dlm_decode.bridge.draft import recorded
from dlm_decode.bridge.rules import Case, Rule
from dlm_decode.bridge.rules.block import Block
from dlm_decode.bridge.rules.match import Match, own_tokens
from dlm_decode.bridge.rules.rejection import Rejection
from dlm_decode.bridge.streams import gumbel, uniform
from dlm_decode.errors import CapabilityError, OptionError
from tests.unit.bridge_cases import Leaf, Table, distance, drafts, sampled_order

EXACT, POWER = 1e-12, 0.01
CPU = torch.device("cpu")
SOFT_RULES = (Rejection(), Block())
TABLES = [Table(seed) for seed in range(2)]

Cut = Callable[[Table, Leaf], int]


def emitted_law(
    table: Table, leaves: Iterable[Leaf], rule: Rejection, law: str, cut: Cut | None = None
) -> dict[tuple[int, ...], float]:
    """The exact law of the first g + 1 emitted tokens, by the rule's own functions."""
    begun: dict[tuple[int, ...], float] = {}
    for leaf in merged(leaves):
        mass, tokens, steps, stated = leaf
        length = len(tokens) if cut is None else cut(table, leaf)
        log_q = stated.log() if law == FACTORISED else None
        draft = Draft(tokens, law, log_q, steps, (1.0,) * len(tokens)).cut(length)
        p = table.rows(draft.tokens)
        q = draft.laws(table.vocab, CPU).exp()
        named = torch.tensor(draft.tokens, dtype=torch.long)
        for accepted, chance in enumerate(rule.counts(rule.chances(p, q, named)).tolist()):
            rest = rule.residual(p, q, named, accepted).tolist() if chance else []
            for token, share in enumerate(rest):
                prefix = (*draft.tokens[:accepted], token)
                begun[prefix] = begun.get(prefix, 0.0) + mass * chance * share
    found: dict[tuple[int, ...], float] = {}
    for prefix, mass in begun.items():
        for whole, part in table.continued(prefix, mass).items():
            found[whole] = found.get(whole, 0.0) + part
    return found


def merged(leaves: Iterable[Leaf]) -> Iterable[Leaf]:
    """Leaves of the same tokens, steps and laws, as one."""
    found: dict[tuple[Any, ...], Leaf] = {}
    for mass, tokens, steps, laws in leaves:
        key = (tokens, steps, tuple(laws.flatten().tolist()))
        before = found.get(key)
        found[key] = (mass + (before[0] if before else 0.0), tokens, steps, laws)
    return found.values()


def error(
    leaves: Callable[[Table], Iterable[Leaf]], rule: Rejection, law: str, cut: Cut | None = None
) -> float:
    """The largest distance from the target over all tables."""
    return max(
        distance(emitted_law(table, leaves(table), rule, law, cut), table.target())
        for table in TABLES
    )


def at_once(m: Tensor, canvas: Sequence[int], step: int) -> Sequence[int]:
    return range(len(canvas))


def left_to_right(m: Tensor, canvas: Sequence[int], step: int) -> Sequence[int]:
    return [step]


def right_to_left(m: Tensor, canvas: Sequence[int], step: int) -> Sequence[int]:
    return [len(canvas) - 1 - step]


def surest(m: Tensor, canvas: Sequence[int], step: int) -> Sequence[int]:
    open_ = [i for i, token in enumerate(canvas) if token < 0]
    return [max(open_, key=lambda i: float(m[i].max()))]


def ends_first(m: Tensor, canvas: Sequence[int], step: int) -> Sequence[int]:
    return ([0, 2], [1])[step]


def tail_first(m: Tensor, canvas: Sequence[int], step: int) -> Sequence[int]:
    return ([1, 2], [0])[step]


ORDERS = (at_once, left_to_right, right_to_left, surest, ends_first, tail_first)


def lied(leaves: Iterable[Leaf]) -> Iterable[Leaf]:
    """Every token claims to be of one step, so that the record rule never applies."""
    return ((mass, tokens, (0,) * len(tokens), laws) for mass, tokens, _, laws in leaves)


@pytest.mark.parametrize("rule", SOFT_RULES, ids=["rejection", "block"])
@pytest.mark.parametrize("order", ORDERS)
def test_certified_laws_are_exact_under_the_record_rule(order: Callable, rule: Rejection) -> None:
    assert error(lambda t: drafts(t, order), rule, FACTORISED) < EXACT


@pytest.mark.parametrize("rule", SOFT_RULES, ids=["rejection", "block"])
@pytest.mark.parametrize("order", ORDERS)
def test_one_hot_is_exact_for_any_order(order: Callable, rule: Rejection) -> None:
    assert error(lambda t: drafts(t, order, 0.7), rule, ONE_HOT) < EXACT


def test_one_hot_is_exact_where_the_order_depends_on_drawn_tokens() -> None:
    assert error(sampled_order, Rejection(), ONE_HOT) < EXACT


def first_below(table: Table, leaf: Leaf, threshold: float = 0.4) -> int:
    _, tokens, _, laws = leaf
    low = (i for i, t in enumerate(tokens) if float(laws[i, t]) < threshold)
    return next(low, len(tokens))


def cut_before(table: Table, leaf: Leaf) -> int:
    return first_below(table, leaf)


def cut_after(table: Table, leaf: Leaf) -> int:
    return min(first_below(table, leaf) + 1, len(leaf[1]))


def test_cutting_after_a_doubtful_token_is_exact() -> None:
    for rule in SOFT_RULES:
        assert error(lambda t: drafts(t, at_once), rule, FACTORISED, cut_after) < EXACT
        assert error(lambda t: drafts(t, at_once), rule, ONE_HOT, cut_before) < EXACT


def argmax_draft(table: Table) -> Iterable[Leaf]:
    laws = table.m[(-1,) * table.length]
    return [(1.0, tuple(laws.argmax(-1).tolist()), (0,) * table.length, laws)]


def preferred_of_two(table: Table) -> Iterable[Leaf]:
    """The one of two drafts that the verifier finds likelier."""
    leaves = list(drafts(table, at_once))

    def opinion(leaf: Leaf) -> float:
        chances = zip(table.rows(leaf[1])[:-1], leaf[1], strict=True)
        return float(torch.stack([law[token] for law, token in chances]).prod())

    for a, b in product(leaves, leaves):
        best = a if opinion(a) >= opinion(b) else b
        yield (a[0] * b[0], *best[1:])


BIASED = {
    "argmax tokens, soft law": argmax_draft,
    "drawn at another temperature": lambda t: drafts(t, at_once, 0.7),
    "right to left, marginals of the commit step": lambda t: lied(drafts(t, right_to_left)),
    "surest first, marginals of the commit step": lambda t: lied(drafts(t, surest)),
    "order by drawn tokens, commit step": lambda t: lied(sampled_order(t)),
    "order by drawn tokens, record rule": sampled_order,
    "the better of two drafts": preferred_of_two,
}


@pytest.mark.parametrize("name", BIASED)
def test_biased_variants_are_caught(name: str) -> None:
    """Negative controls: the enumeration has the power to see each of these mistakes."""
    assert error(BIASED[name], Rejection(), FACTORISED) > POWER
    assert error(BIASED[name], Rejection(), ONE_HOT) < EXACT


def test_cutting_before_a_doubtful_token_is_caught() -> None:
    assert error(lambda t: drafts(t, at_once), Rejection(), FACTORISED, cut_before) > POWER


def test_drawing_again_after_a_mismatch_is_caught() -> None:
    """Emitting another draw than the one that was compared is biased; emitting it is not."""
    p, x = torch.tensor([0.4, 0.3, 0.2, 0.1]), 0
    hot = torch.eye(4)[x]
    emit = p[x] * hot + (p * (1 - hot))
    again = p[x] * hot + (1 - p[x]) * p
    assert torch.allclose(emit, p)
    assert float((again - p).abs().sum() / 2) > POWER


def expected_accepted(rule: Rejection, p: Tensor, q: Tensor, length: int) -> float:
    total = 0.0
    for tokens in product(range(len(p)), repeat=length):
        named = torch.tensor(tokens)
        chances = rule.chances(p.expand(length + 1, -1), q.expand(length, -1), named)
        mean = rule.counts(chances) @ torch.arange(length + 1, dtype=p.dtype)
        total += float(q[named].prod() * mean)
    return total


def test_block_verification_accepts_what_its_paper_says() -> None:
    """Sun et al.'s example: 10/9 tokens by the token rule, 11/9 by the block rule."""
    p, q = (torch.tensor(x, dtype=torch.float64) / 3 for x in ([1, 2], [2, 1]))
    assert expected_accepted(Rejection(), p, q, 2) == pytest.approx(10 / 9)
    assert expected_accepted(Block(), p, q, 2) == pytest.approx(11 / 9)


def test_a_length_that_looks_ahead_gives_the_papers_bias() -> None:
    """DSpark's counterexample: admitting x only if it is the first token makes (.85, .15)."""
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])
    admitted = q[0] * torch.tensor([1.0, 0.0])
    assert torch.allclose(admitted + q[1] * p, torch.tensor([0.85, 0.15]))


def test_the_token_rule_on_one_position() -> None:
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 2, dtype=torch.float64)
    q = torch.tensor([[0.6, 0.1, 0.2, 0.1]], dtype=torch.float64)
    rule, made, lied_about = Rejection(), torch.zeros(4).double(), torch.zeros(4).double()
    for token in range(4):
        named = torch.tensor([token])
        chance = rule.chances(p, q, named)[0]
        law = chance * torch.eye(4)[token] + (1 - chance) * rule.residual(p, q, named, 0)
        made += q[0, token] * law
        lied_about = law if token == 0 else lied_about
    assert torch.allclose(made, p[0])
    assert torch.allclose(lied_about, torch.tensor([2, 1, 0, 0]).double() / 3)


def test_block_and_token_rule_agree_on_one_hot_drafts() -> None:
    table = TABLES[0]
    for _, tokens, steps, _ in drafts(table, at_once):
        draft = Draft(tokens, steps=steps)
        p, q, named = table.rows(tokens), draft.laws(3, CPU).exp(), torch.tensor(tokens)
        counts = [rule.counts(rule.chances(p, q, named)) for rule in SOFT_RULES]
        assert torch.allclose(*counts)


class TestDeclaredLaw:
    def test_a_one_hot_draft_cannot_state_a_law(self) -> None:
        with pytest.raises(CapabilityError, match="only a certified law"):
            Draft((1,), ONE_HOT, torch.zeros(1, 3))

    def test_a_factorised_draft_must_state_law_and_steps(self) -> None:
        with pytest.raises(CapabilityError, match="needs log_q and a step for each, got 0 and 1"):
            Draft((1,), FACTORISED, None, (0,))
        with pytest.raises(CapabilityError, match="law must be"):
            Draft((1,), "guess")

    def test_without_a_law_verification_is_one_hot(self) -> None:
        laws = Draft((2, 0)).laws(3, CPU).exp()
        assert laws.tolist() == [[0, 0, 1], [1, 0, 0]]

    def test_positions_committed_out_of_order_are_one_hot(self) -> None:
        assert recorded((0, 2, 1, 2)) == [True, True, False, True]
        stated = torch.full((3, 4), 0.25).log()
        laws = Draft((1, 2, 3), FACTORISED, stated, (1, 0, 1)).laws(4, CPU).exp()
        assert laws[1].tolist() == [0, 0, 1, 0]
        assert torch.allclose(laws[[0, 2]].float(), torch.tensor(0.25))

    def test_a_smaller_vocabulary_is_filled_up_with_nothing(self) -> None:
        laws = Draft((1,), FACTORISED, torch.full((1, 2), 0.5).log(), (0,)).laws(4, CPU).exp()
        assert laws.tolist()[0] == pytest.approx([0.5, 0.5, 0, 0])


class TestJudging:
    @pytest.mark.parametrize("name", RULES.names())
    def test_greedy_verdicts_are_those_of_the_argmax(self, name: str) -> None:
        log_p = torch.eye(4)[[1, 2, 0]] * 9
        rule: Rule = RULES.create(name)
        for drafted, accepted in (((1, 2), 2), ((1, 3), 1), ((0, 2), 0), ((), 0)):
            case = Case(Draft(drafted), log_p[: len(drafted) + 1], 5, 7, True)
            (verdict,) = rule.judge([case])
            assert verdict.kept == tuple(range(accepted))
            assert verdict.emitted == (1, 2, 0)[: accepted + 1]

    def test_match_emits_the_same_whatever_was_drafted(self) -> None:
        log_p = torch.randn(1, 8).log_softmax(-1).expand(3, -1)
        own = own_tokens(Case(Draft((0, 0)), log_p, 3, 10, False)).tolist()
        for drafted in product(range(8), repeat=2):
            (verdict,) = Match().judge([Case(Draft(drafted), log_p, 3, 10, False)])
            assert list(verdict.emitted) == own[: len(verdict.emitted)]

    def test_noise_is_that_of_the_absolute_position(self) -> None:
        assert torch.equal(gumbel(3, 10, 4, 8)[2:], gumbel(3, 12, 2, 8))
        assert not torch.equal(gumbel(3, 10, 1, 8), gumbel(4, 10, 1, 8))

    def test_test_numbers_are_uniform_and_new_every_round(self) -> None:
        numbers = uniform(1, 0, 4000, round_=3)
        assert abs(float(numbers.mean()) - 0.5) < 0.02
        assert abs(float((numbers < 0.1).double().mean()) - 0.1) < 0.02
        assert not torch.equal(numbers, uniform(1, 0, 4000, round_=4))

    @pytest.mark.parametrize("name", ["rejection", "block", "typical"])
    def test_trees_are_for_match(self, name: str) -> None:
        draft = Draft((1,), tree=Tree((1,), (-1,)))
        case = Case(draft, torch.zeros(2, 4), 0, 3, False)
        with pytest.raises(CapabilityError, match="rule 'match' only"):
            RULES.create(name).judge([case])


class TestTree:
    def test_best_prefixes_are_the_most_probable_ones(self) -> None:
        log_m = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
        tree = best_prefixes(log_m, 12)
        found = {tuple(tree.tokens[i] for i in tree.path(n)) for n in range(len(tree))}
        every = [x for depth in (1, 2, 3) for x in product(range(4), repeat=depth)]
        score = {x: sum(float(log_m[i, t]) for i, t in enumerate(x)) for x in every}
        assert found == set(sorted(every, key=lambda x: -score[x])[:12])

    def test_the_impossible_is_never_a_node(self) -> None:
        log_m = torch.tensor([[0.0, -torch.inf], [0.0, -torch.inf]])
        assert best_prefixes(log_m, 9) == Tree((0, 0), (-1, 0))

    def test_following_descends_as_far_as_the_verifier_agrees(self) -> None:
        tree = Tree((5, 6, 7, 8), (-1, -1, 1, 2))
        assert tree.follow([6, 0, 7, 8, 1]) == [1, 2, 3]
        assert tree.follow([6, 0, 9, 8, 1]) == [1]
        assert tree.follow([4, 0, 7, 8, 1]) == []

    def test_siblings_differ_and_parents_come_first(self) -> None:
        for tokens, parents in (((1, 1), (-1, -1)), ((1, 2), (1, -1))):
            with pytest.raises(OptionError, match="parents before children"):
                Tree(tokens, parents)
        with pytest.raises(OptionError, match="budget must be at least 1"):
            best_prefixes(torch.zeros(1, 2), 0)
