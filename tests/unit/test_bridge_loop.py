"""Whatever drafts, what comes out is the verifier's: equal tokens, or the exact law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from dlm_decode.bridge import (
    CONTROLLERS,
    FACTORISED,
    Context,
    DiffusionDrafter,
    Draft,
    NullDrafter,
    Piece,
    PromptLookup,
    RandomDrafter,
    Sampling,
    Speculator,
    Totals,
    custom_generate,
    speculate,
)
from dlm_decode.bridge.adaptive_parallel import ParallelConfig, adaptive_parallel
from dlm_decode.bridge.marginals import Reuse, Span, Stored, marginals
from dlm_decode.bridge.verifier import Verifier
from dlm_decode.bridge.vllm import DiffusionProposer
from dlm_decode.errors import CapabilityError, OptionError, RequestError
from dlm_decode.models.toy import random_dream, random_llada
from tests.unit.bridge_cases import Scripted, generate_alone, oracle, spoiled, tiny_llama

PROMPTS = ([1], [3, 4, 5], [7, 8, 9, 10, 11, 12, 13], [2, 2])
MOST = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def answers(model: Any) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): generate_alone(model, p, max_new_tokens=MOST) for p in PROMPTS}


@pytest.fixture(scope="module")
def penalised(model: Any) -> dict[tuple[int, ...], list[int]]:
    settings = {"max_new_tokens": MOST, "repetition_penalty": 1.7}
    return {tuple(p): generate_alone(model, p, **settings) for p in PROMPTS}


def drafter(name: str, answers: dict[tuple[int, ...], list[int]]) -> Any:
    made = {
        "null": lambda: NullDrafter(),
        "junk": lambda: RandomDrafter(48),
        "lookup": lambda: PromptLookup(),
        "oracle": lambda: oracle(answers),
        "spoiled": lambda: spoiled(answers),
        "one pass": lambda: DiffusionDrafter(random_llada()),
        "passes": lambda: DiffusionDrafter(random_dream(), passes=3, reuse=Reuse(2, 3)),
        "tree": lambda: DiffusionDrafter(random_llada(), tree_budget=9),
        "engine": lambda: DiffusionDrafter(random_llada(), "entropy", "dual"),
    }
    return made[name]()


NAMES = ("null", "junk", "lookup", "oracle", "spoiled", "one pass", "passes", "tree", "engine")


@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_that_of_generate(
    model: Any, answers: Any, penalised: Any, name: str
) -> None:
    """In a ragged batch and alone, with and without a repetition penalty; a text ends by itself."""
    assert any(ids[-1] == 42 for ids in answers.values())
    assert answers != penalised
    for expected, penalty in ((answers, 1.0), (penalised, 1.7)):
        sampling = Sampling(repetition_penalty=penalty)
        speculator = Speculator(model, drafter(name, expected), sampling=sampling, max_batch_size=3)
        found = speculator.generate(PROMPTS, max_new_tokens=MOST)
        assert [list(r.ids) for r in found] == list(expected.values())
        assert [r.finish_reason for r in found] == [
            "eos" if ids[-1] == 42 else "length" for ids in expected.values()
        ]


def test_an_end_id_inside_a_draft_ends_the_text(model: Any, answers: Any) -> None:
    """Also where the draft goes on behind it, and where the length limit falls inside a draft."""
    prompt, ids = next((p, ids) for p, ids in answers.items() if ids[-1] == 42)
    beyond = oracle({prompt: [*ids, 1, 2, 3, 4, 5]})
    (result,) = Speculator(model, beyond).generate([prompt], max_new_tokens=40)
    assert (list(result.ids), result.finish_reason) == (ids, "eos")
    (cut,) = Speculator(model, beyond).generate([prompt], max_new_tokens=len(ids) - 2)
    assert (list(cut.ids), cut.finish_reason) == (ids[:-2], "length")


def test_a_right_draft_costs_one_forward_and_a_wrong_one_a_forward_a_token(
    model: Any, answers: Any
) -> None:
    right = Totals.over(Speculator(model, oracle(answers)).generate(PROMPTS, max_new_tokens=MOST))
    assert right.verifier_forwards == len(PROMPTS)
    wrong = Totals.over(Speculator(model, spoiled(answers)).generate(PROMPTS, max_new_tokens=MOST))
    assert wrong.tokens_per_verifier_forward == 1 and wrong.accepted == 0


def test_accounting_adds_up(model: Any, answers: Any) -> None:
    found = Speculator(model, PromptLookup()).generate(PROMPTS, max_new_tokens=MOST)
    for result in found:
        assert sum(r.emitted for r in result.rounds) == len(result.ids)
        assert all(r.accepted <= r.drafted and r.emitted <= r.accepted + 1 for r in result.rounds)
    totals = Totals.over(found)
    by_position = totals.acceptance_by_position()
    assert all(0 <= a <= 1 for a in by_position)
    assert totals.as_dict()["tokens"] == sum(len(ids) for ids in answers.values())


SAMPLED = Sampling(temperature=0.8, top_p=0.95)


def test_sampled_output_depends_on_the_seed_and_never_on_the_drafter(
    model: Any, answers: Any
) -> None:
    """Under `match`; a rule that draws otherwise is the negative control."""

    def run(name: str, seed: int, rule: str = "match") -> list[tuple[int, ...]]:
        found = speculate(
            model, drafter(name, answers), PROMPTS,
            max_new_tokens=MOST, sampling=SAMPLED, seed=seed, rule=rule, max_batch_size=3,
        )  # fmt: skip
        return [r.ids for r in found]

    alone = run("null", 3)
    for name in ("junk", "oracle", "one pass", "passes", "tree", "engine"):
        assert run(name, 3) == alone, name
    assert run("null", 4) != alone
    assert run("one pass", 3, "rejection") != run("junk", 3, "rejection")


def test_equal_prompts_of_one_call_get_different_draws(model: Any) -> None:
    found = speculate(model, NullDrafter(), [[3, 4]] * 4, max_new_tokens=6, sampling=SAMPLED)
    assert len({r.ids for r in found}) > 1


@dataclass(frozen=True)
class Liar:
    """Always drafts `token` and claims to have drawn it from all ids alike."""

    token: int
    vocab_size: int

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        law = torch.full((1, self.vocab_size), 1 / self.vocab_size).log()
        draft = Draft((self.token,), FACTORISED, law, (0,))
        return [draft.cut(context.room) for context in contexts]


def chi_square_p(model: Any, maker: Any, rule: str, count: int = 700) -> float:
    """p-value of the first two tokens of `count` draws against the exact law."""
    sampling = Sampling(temperature=0.8, top_k=4)
    speculator = Speculator(
        model, maker, rule=rule, controller="fixed", sampling=sampling,
        max_batch_size=350, end_ids=(), seed=1,
    )  # fmt: skip
    prompt = [3, 1]
    found = speculator.generate([prompt] * count, max_new_tokens=2)
    law = {}
    with torch.inference_mode():
        first = speculator.law.scores(model(torch.tensor([prompt])).logits[0, -1:], [])[0].exp()
        for a in range(len(first)):
            logits = model(torch.tensor([[*prompt, a]])).logits[0, -1:]
            for b, p in enumerate(speculator.law.scores(logits, [])[0].exp()):
                law[a, b] = float(first[a] * p)
    seen = {
        pair: sum(r.ids == pair for r in found) for pair in product(range(len(first)), repeat=2)
    }
    assert all(law[pair] > 0 for pair, n in seen.items() if n)
    cells = [(count * p, seen[pair]) for pair, p in law.items() if count * p >= 5]
    rest = (count - sum(e for e, _ in cells), count - sum(n for _, n in cells))
    cells += [rest] if rest[0] > 1 else []
    statistic = sum((n - e) ** 2 / e for e, n in cells)
    degrees = torch.tensor((len(cells) - 1) / 2.0, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, half))


@pytest.mark.slow
def test_soft_rules_keep_the_verifiers_law() -> None:
    """Chi-square on an enumerable vocabulary; a draft that lies about its law is the control."""
    model, denoiser = tiny_llama(2, vocab=10), random_llada(1, vocab=10)
    for rule in ("rejection", "block", "match"):
        assert chi_square_p(model, DiffusionDrafter(denoiser, passes=2), rule) > 1e-6, rule
    (likeliest,) = generate_alone(model, [3, 1], max_new_tokens=1)
    assert chi_square_p(model, Liar(likeliest, 10), "rejection") < 1e-6


def test_marginals_with_kept_keys_are_those_without(model: Any) -> None:
    """With everything in the overlap computed anew nothing is stale; the store holds the prefix."""
    for denoiser in (random_llada(), random_dream()):
        mask = denoiser.info.mask_id
        prefix = list(range(1, 9))
        stored = Stored()
        plain = marginals(denoiser, [Span([*prefix, mask, mask], 8, 8, 2, Stored())], Reuse())[0]
        marginals(denoiser, [Span([*prefix[:5], mask], 5, 5, 1, stored)], Reuse())
        assert (len(stored.ids), stored.age) == (5, 0)
        span = Span([*prefix, mask, mask], 8, 8, 2, stored)
        torch.testing.assert_close(marginals(denoiser, [span], Reuse(overlap=8))[0], plain)
        near = marginals(denoiser, [span], Reuse(overlap=1))[0]
        assert stored.age == 1 and near.shape == plain.shape
        assert float(near[:, mask].max()) == -torch.inf


class TestControllers:
    @pytest.mark.parametrize("name", CONTROLLERS.names())
    def test_lengths_stay_in_range_and_state_is_returned(self, name: str) -> None:
        controller = CONTROLLERS.create(name)
        state, total = controller.init(), 0
        for drafted, accepted in ((8, 8), (8, 0), (20, 20), (3, 1)):
            first = controller.first(state)
            assert 1 <= first <= 60
            more = controller.more(state, [0.99] * first, first)
            total += more
            assert 0 <= more <= 60
            assert controller.more(state, [0.01] * first, first) == 0
            state = controller.observe(state, drafted, accepted)
        assert total > 0 or name in ("fixed", "adl", "heuristic")

    def test_adl_follows_its_means(self) -> None:
        controller = CONTROLLERS.create("adl")
        state = controller.init()
        assert controller.first(state) == 20
        for _ in range(6):
            state = controller.observe(state, 28, 28)
        assert controller.first(state) == 30

    def test_heuristic_grows_by_two_and_shrinks_by_one(self) -> None:
        controller = CONTROLLERS.create("heuristic")
        assert controller.observe(5, 5, 5) == 7
        assert controller.observe(5, 5, 4) == 4

    def test_a_dear_drafter_drafts_less(self) -> None:
        sure = [0.9] * 8
        cheap, dear = (CONTROLLERS.create("cost", {"c_d": c}) for c in (0.1, 9.0))
        assert cheap.more(cheap.init(), sure, 8) == 8
        assert dear.more(dear.init(), sure, 8) == 0


class TestInGenerate:
    def test_output_is_that_of_generate_with_padding(self, model: Any, answers: Any) -> None:
        ids = torch.tensor([[42, 42, 1], [3, 4, 5]])
        mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
        pieces: list[Piece] = []
        settings = {"max_new_tokens": MOST, "do_sample": False}
        drafts = DiffusionDrafter(random_llada())
        found = model.generate(
            ids, attention_mask=mask, custom_generate=custom_generate, drafter=drafts,
            on_piece=pieces.append, **settings,
        )  # fmt: skip
        for row, prompt in zip(found[:, 3:].tolist(), ((1,), (3, 4, 5)), strict=True):
            assert row[: len(answers[prompt])] == answers[prompt]
        assert sum(len(p.tokens) for p in pieces if p.place == 0) == len(answers[1,])

    def test_sampling_settings_of_generate_hold(self, model: Any) -> None:
        ids, mask = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.long)
        settings = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95}
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, custom_generate=custom_generate,
            drafter=RandomDrafter(48), draft_seed=3, **settings,
        )  # fmt: skip
        (own,) = speculate(
            model, NullDrafter(), [[3, 4, 5]], max_new_tokens=8, sampling=SAMPLED, seed=3
        )
        assert found[0, 3:].tolist()[: len(own.ids)] == list(own.ids)

    def test_what_has_no_meaning_is_refused(self, model: Any) -> None:
        ids = torch.tensor([[3, 4, 5]])
        settings = {"max_new_tokens": 4, "custom_generate": custom_generate}
        with pytest.raises(OptionError, match="needs drafter"):
            model.generate(ids, **settings)
        with pytest.raises(CapabilityError, match="num_beams=1, got 2"):
            model.generate(ids, num_beams=2, drafter=NullDrafter(), **settings)
        with pytest.raises(CapabilityError, match="return_dict_in_generate"):
            model.generate(ids, return_dict_in_generate=True, drafter=NullDrafter(), **settings)


class TestAdaptiveParallel:
    def test_the_guide_alone_decides_at_r_0_and_nobody_at_r_1(self, model: Any) -> None:
        denoiser, guide = random_llada(), Verifier(model)
        whole = adaptive_parallel(
            denoiser, guide, [3, 4], max_new_tokens=8, config=ParallelConfig(r=1.0, lookahead=8)
        )
        assert whole.accepted[0] == len(whole.ids) or whole.finish_reason == "eos"
        wary = adaptive_parallel(
            denoiser, guide, [3, 4], max_new_tokens=8, config=ParallelConfig(r=0.0)
        )
        assert wary.forwards >= whole.forwards
        assert sum(wary.accepted) == len(wary.ids)

    @pytest.mark.parametrize("rule", ["paper", "code"])
    def test_a_seed_gives_one_text(self, model: Any, rule: str) -> None:
        config = ParallelConfig(temperature=0.8, rule=rule, lookahead=6)
        runs = [
            adaptive_parallel(
                random_llada(), Verifier(model), [3, 4], max_new_tokens=8, config=config, seed=s
            )
            for s in (1, 1, 2)
        ]
        assert runs[0] == runs[1] and runs[0].ids != runs[2].ids

    def test_both_must_share_their_ids(self, model: Any) -> None:
        with pytest.raises(CapabilityError, match="must share their ids, got 50 and 48"):
            adaptive_parallel(random_llada(vocab=50), Verifier(model), [3])


class TestVllm:
    """The documented interface only: nothing here has run inside vLLM."""

    def proposer(self) -> DiffusionProposer:
        from types import SimpleNamespace

        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=5),
            additional_config={"dlm_decode": {"controller": "fixed"}},
        )
        made = DiffusionProposer(config)
        made.drafter = DiffusionDrafter(random_llada())
        return made

    def test_rows_that_sampled_nothing_get_no_draft(self) -> None:
        ids = torch.zeros(3, 12, dtype=torch.long)
        ids[:, :4] = torch.tensor([1, 2, 3, 5])
        proposer = self.proposer()
        found = proposer.propose([[5], [], [3, 5]], [4, 4, 4], ids.numpy())
        assert [bool(draft) for draft in found] == [True, False, True]
        assert all(len(draft) <= 5 for draft in found)
        assert len(proposer.memory) == 1
        proposer.dummy_run(1)

    def test_unknown_settings_are_refused(self) -> None:
        from types import SimpleNamespace

        config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=5),
            additional_config={"dlm_decode": {"dafter": "x"}},
        )
        with pytest.raises(OptionError, match="dafter"):
            DiffusionProposer(config)


class TestWrongUse:
    def test_zero_prompts_empty_prompts_and_too_long_ones_are_refused(self, model: Any) -> None:
        speculator = Speculator(model, NullDrafter())
        for prompts, message in (
            ([], "0 prompts"),
            ([[1], []], "prompt 1 is empty"),
            ([[1, 99]], "holds id 99"),
            ([[1] * 250], "take 262 positions, but the verifier has 256"),
        ):
            with pytest.raises(RequestError, match=message):
                speculator.stream(prompts, max_new_tokens=MOST)
        with pytest.raises(RequestError, match="max_new_tokens must be at least 1"):
            speculator.stream([[1]], max_new_tokens=0)

    def test_vocabularies_must_be_of_one_size(self, model: Any) -> None:
        other = DiffusionDrafter(random_llada(vocab=50))
        with pytest.raises(CapabilityError, match="50 ids and the verifier 48"):
            Speculator(model, other)
        foreign = Scripted(lambda context: [49, 1], vocab_size=50)
        (found,) = Speculator(model, foreign, shared_ids=True).generate([[1]], max_new_tokens=2)
        assert len(found.ids) == 2

    def test_a_certified_draft_is_never_cut_before_an_unknown_id(self, model: Any) -> None:
        """Such a cut looks at what it cuts; the drafter must draw from known ids only."""
        with pytest.raises(CapabilityError, match="a certified draft holds id 49"):
            Speculator(model, Liar(49, 50), shared_ids=True).generate([[1]], max_new_tokens=3)
        wide = DiffusionDrafter(random_llada(3, vocab=64))
        settings = {"rule": "rejection", "sampling": SAMPLED, "shared_ids": True}
        found = Speculator(model, wide, **settings).generate(PROMPTS, max_new_tokens=6)
        assert all(token < 48 for r in found for token in r.ids)

    def test_a_drafter_needs_a_mask_id(self, model: Any) -> None:
        with pytest.raises(CapabilityError, match="has no mask id"):
            DiffusionDrafter(model)
        broken = random_llada()
        broken.info = type(broken.info)(**{**vars(broken.info), "mask_id": 48})
        with pytest.raises(
            CapabilityError, match=r"mask id must be one of its ids 0 \.\. 47, got 48"
        ):
            DiffusionDrafter(broken)

    def test_lossy_rules_must_be_asked_for(self, model: Any) -> None:
        with pytest.raises(OptionError, match="lossless=False"):
            Speculator(model, NullDrafter(), rule="typical")
        lossy = Speculator(model, RandomDrafter(48), rule="typical", lossless=False)
        (found,) = lossy.generate([[1]], max_new_tokens=4)
        assert found.lossless is False

    def test_options_are_checked(self, model: Any) -> None:
        for settings in ({"passes": 0}, {"canvas": 0}, {"tree_budget": 0}):
            with pytest.raises(OptionError, match="must be at least 1, got 0"):
                DiffusionDrafter(random_llada(), **settings)
        with pytest.raises(OptionError, match="one pass"):
            DiffusionDrafter(random_llada(), "threshold", tree_budget=4)
        with pytest.raises(OptionError, match="max_batch_size"):
            Speculator(model, NullDrafter(), max_batch_size=0)
        with pytest.raises(OptionError, match="min_ngram"):
            PromptLookup(max_ngram=1, min_ngram=2)
