"""CreditDecoding: the published arithmetic, and the list of ids that replaces a whole table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.errors import CapabilityError
from dlm_decode.noise import id_gumbel, token_gumbel
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.samplers.credit import LEAST_IDS, MOST_IDS, Credit
from dlm_decode.samplers.llada import Llada
from dlm_decode.samplers.threshold import Threshold
from dlm_decode.types import Canvas, Decision, Draw, Output, Query
from tests.golden import Case, golden_cases, requires_golden
from tests.reference.dinfer import credit_decoder
from tests.unit.sampler_cases import GREEDY, MASK, apply, make_canvas
from tests.unit.wrapper_cases import (
    check_golden,
    decode,
    probed_output,
    ragged_requests,
    steps_of,
    toy,
)

PAPER = {"alpha": 0.65, "beta": 0.7, "gamma": 0.2}


class Watching(Sampler):
    """Commits nothing and shows the statistics it was handed as its scores."""

    statistic = "p1"

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        nothing = torch.zeros_like(canvas.eligible)
        return Decision(output.candidate, nothing, scores=getattr(output, self.statistic)), state


class WatchingAll(Watching):
    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"p2", "entropy", "filtered", "logits"})


def turns(
    sampler: Sampler, canvas: Canvas, logits: list[Tensor], draw: Draw = GREEDY
) -> list[tuple[Decision, Any]]:
    """Decision and state after each turn, nothing being committed in between."""
    state = sampler.init(canvas)
    found = []
    for turn, values in enumerate(logits):
        canvas = replace(canvas, draw=draw, step=torch.full_like(canvas.step, turn))
        output = probed_output(sampler, canvas, values, state, draw)
        decision, state = sampler.decide(canvas, output, state)
        found.append((decision, state))
    return found


def credit_table(state: Any, vocab_size: int) -> Tensor:
    """The list of a state spread over the vocabulary, `(B, W, V)`."""
    own = state["own"]
    table = torch.zeros(*own["ids"].shape[:2], vocab_size, dtype=torch.float64)
    return table.scatter_add(-1, own["ids"], own["credit"])


def drifting(canvas: Canvas, count: int, seed: int = 0) -> list[Tensor]:
    """Logits of consecutive turns, close enough for best tokens to persist and to change."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*canvas.tokens.shape, canvas.vocab_size)
    base = torch.randn(shape, generator=generator)
    return [base + 0.8 * torch.randn(shape, generator=generator) for _ in range(count)]


# ------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("dense", [False, True])
def test_the_published_recursion(dense: bool) -> None:
    """Three turns of three tokens, worked by hand: C, fused logits and their best probability."""
    canvas = make_canvas(width=1, vocab_size=4)
    seen = [
        torch.tensor([[[-9.0, *x]]]) for x in ([2.0, 1.0, 0.0], [1.0, 1.5, 0.0], [2.0, 1.0, 0.0])
    ]
    found = turns(Credit(Watching(), **PAPER, dense=dense), canvas, seen)
    credits = [credit_table(state, 4)[0, 0, 1:] for _, state in found]
    expected = [[0.921713, 0, 0], [0.645199, 0.886188, 0], [1.373353, 0.620332, 0]]
    torch.testing.assert_close(
        torch.stack(credits), torch.tensor(expected).double(), atol=2e-6, rtol=0
    )
    fused = [[2.424591, 1, 0], [1.32361, 1.912463, 0], [2.561797, 1.31371, 0]]
    best = torch.tensor(fused).softmax(-1).max(-1)
    shown = torch.stack([decision.scores[0, 0] for decision, _ in found])  # type: ignore[index]
    torch.testing.assert_close(shown, best.values, atol=2e-6, rtol=0)
    torch.testing.assert_close(
        shown, torch.tensor([0.752377, 0.587309, 0.733020]), atol=2e-6, rtol=0
    )
    assert [int(decision.tokens) for decision, _ in found] == [1, 2, 1]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_list_equals_a_table_over_the_vocabulary(seed: int, dense: bool) -> None:
    """Against the reference, which keeps the whole table: what is committed, turn by turn."""
    canvas = make_canvas(width=8, vocab_size=12)
    logits = drifting(canvas, 8, seed)
    reference = credit_decoder(0.5, credit_alpha=0.9, boost_gamma=0.3, decay_beta=0.6)
    inner = Threshold(threshold=0.5, relative_to_best=True)
    sampler = Credit(inner, alpha=0.9, gamma=0.3, beta=0.6, dense=dense)
    state = sampler.init(canvas)
    for values in logits:
        if not canvas.masked.any():
            break
        output = probed_output(sampler, canvas, values, state)
        decision, state = sampler.decide(canvas, output, state)
        banned = values[0].clone()
        banned[:, MASK] = -torch.inf
        chosen, tokens = reference(banned, canvas.masked[0])
        assert torch.equal(decision.commit[0], chosen)
        assert torch.equal(decision.tokens[0][chosen], tokens[chosen])
        canvas = apply(canvas, decision)


@pytest.mark.parametrize("statistic", ["p2", "entropy", "q1", "q2", "q_entropy", "logits"])
def test_an_inner_that_reads_more_gets_it_exactly(statistic: str) -> None:
    """Whatever an inner reads is that of softmax(l + alpha ln(1 + C))."""
    canvas = make_canvas(width=5, vocab_size=9)
    watching = type("One", (WatchingAll,), {"statistic": statistic})()
    sampler = Credit(watching, **PAPER)
    logits = drifting(canvas, 4)
    decision, state = turns(sampler, canvas, logits)[-1]
    fused = logits[-1].double() + 0.65 * credit_table(state, 9).log1p()
    fused[..., MASK] = -torch.inf
    p = fused.softmax(-1).sort(dim=-1, descending=True).values
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
    wanted = {
        "p2": p[..., 1],
        "q1": p[..., 0],
        "q2": p[..., 1],
        "entropy": entropy,
        "q_entropy": entropy,
        "logits": fused,
    }[statistic]
    assert decision.scores is not None
    torch.testing.assert_close(decision.scores.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_drawn_token_is_that_of_the_whole_fused_law(temperature: float) -> None:
    """Without the logits: same token and probability as drawing anew from all of them."""
    canvas = make_canvas(rows=50, width=6, vocab_size=10)
    draw = Draw(temperature=temperature)
    watching = type("Drawn", (Watching,), {"statistic": "p_sampled"})()
    logits = drifting(canvas, 5)
    few, whole = (
        turns(Credit(watching, alpha=2.0, dense=dense), canvas, logits, draw)
        for dense in (False, True)
    )
    changed = 0
    plain = turns(watching, canvas, logits, draw)
    for (a, _), (b, _), (c, _) in zip(few, whole, plain, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert a.scores is not None and b.scores is not None
        torch.testing.assert_close(a.scores, b.scores, atol=1e-5, rtol=1e-4)
        changed += int((a.tokens != c.tokens).sum())
    assert changed > 100, "credit with such a weight must change what is drawn"


def test_top_p_without_whole_logits_is_refused_not_guessed() -> None:
    canvas = make_canvas(width=4)
    draw = Draw(temperature=1.0, top_p=0.9)
    with pytest.raises(CapabilityError, match="dense=true"):
        turns(Credit(), canvas, drifting(canvas, 1), draw)
    assert turns(Credit(dense=True), canvas, drifting(canvas, 1), draw)


def test_noise_of_some_ids_is_that_of_the_whole_vocabulary() -> None:
    canvas = make_canvas(rows=2, width=3)
    ids = torch.tensor([5, 0, 17, 1030]).expand(2, 3, 4)
    rows = [x.flatten() for x in (canvas.keys[:, None].expand(2, 3), canvas.positions)]
    whole = token_gumbel(*rows, canvas.commits[:, None].expand(2, 3).flatten(), 0, 1100)
    assert torch.equal(id_gumbel(canvas, ids), whole.view(2, 3, -1).gather(-1, ids))


def test_the_tuning_free_variant_follows_the_blocks_progress() -> None:
    """alpha = beta = 1 - masks / block, gamma = 1."""
    canvas = make_canvas(width=8, vocab_size=6)
    sampler = Credit(Watching(), tuning_free=True)
    logits = drifting(canvas, 2)
    p = [x.index_fill(-1, torch.tensor([MASK]), -torch.inf).double().softmax(-1) for x in logits]
    state = sampler.init(canvas)
    output = probed_output(sampler, canvas, logits[0], state)
    decision, state = sampler.decide(canvas, output, state)
    assert torch.equal(decision.scores, output.p1), "nothing is decided: alpha is 0"
    done = torch.arange(8) < 2
    canvas = replace(canvas, masked=~done[None], eligible=~done[None], step=canvas.step + 1)
    output = probed_output(sampler, canvas, logits[1], state)
    decision, state = sampler.decide(canvas, output, state)
    table = torch.zeros(1, 8, 6, dtype=torch.float64)
    table.scatter_(-1, p[0].argmax(-1, keepdim=True), p[0].amax(-1, keepdim=True))
    table = 0.25 * table
    table.scatter_add_(-1, p[1].argmax(-1, keepdim=True), p[1].amax(-1, keepdim=True))
    fused = (p[1].log() + 0.25 * table.log1p()).softmax(-1).amax(-1)
    assert decision.scores is not None
    torch.testing.assert_close(decision.scores[:, 2:].double(), fused[:, 2:], atol=1e-6, rtol=0)


# ----------------------------------------------------------------------------------- state


def test_a_position_that_was_not_computed_keeps_its_credit() -> None:
    """Under a cache only some rows are computed in a turn; the others' credit must not decay."""
    canvas = make_canvas(width=4)
    sampler = Credit(Watching())
    logits = drifting(canvas, 2)
    _, state = turns(sampler, canvas, logits[:1])[0]
    half = torch.tensor([[True, True, False, False]])
    narrow = replace(canvas, eligible=half, step=canvas.step + 1)
    output = probed_output(sampler, narrow, logits[1], state)
    output = Output({**output.stats, "valid": half})
    _, after = sampler.decide(narrow, output, state)
    before, now = credit_table(state, 8), credit_table(after, 8)
    assert torch.equal(before[:, 2:], now[:, 2:])
    assert (before[:, :2] != now[:, :2]).any(-1).all()


def test_the_list_is_long_enough_for_every_turn_of_a_block() -> None:
    """A new best token in every turn: exact as long as there are ids for the block's positions."""
    width = 12
    canvas = make_canvas(width=width, vocab_size=40)
    logits = [
        torch.zeros(1, width, 40).index_fill(-1, torch.tensor([2 + t]), 3.0) for t in range(width)
    ]
    _, state = turns(Credit(Watching(), **PAPER), canvas, logits)[-1]
    gain = (logits[0][0, 0, 1:].double().softmax(-1).max()) ** 0.2
    expected = torch.stack([gain * 0.7 ** (width - 1 - t) for t in range(width)])
    table = credit_table(state, 40)[0]
    torch.testing.assert_close(
        table[:, 2 : 2 + width], expected.expand(width, -1), rtol=1e-5, atol=0
    )


def test_beyond_the_list_the_smallest_credit_goes() -> None:
    """Only samplers that take more turns than positions get there; state keeps its shape."""
    canvas = make_canvas(width=3, vocab_size=40)
    logits = [torch.zeros(1, 3, 40).index_fill(-1, torch.tensor([2 + t]), 3.0) for t in range(11)]
    found = turns(Credit(Watching()), canvas, logits)
    assert all(state["own"]["ids"].shape == (1, 3, LEAST_IDS) for _, state in found)
    assert sorted(found[-1][1]["own"]["ids"][0, 0].tolist()) == list(range(5, 13))
    wide = make_canvas(width=MOST_IDS + 9)
    assert Credit().init(wide)["own"]["ids"].shape[-1] == MOST_IDS


def test_credit_begins_anew_with_each_block_inside_a_canvas_sampler() -> None:
    """Its inner lives as long as the request; the credit of a block does not."""
    klass = SAMPLERS.create("klass", {"history": "canvas"})
    canvas = make_canvas(width=4)
    state = Credit(klass).init(canvas)
    state["own"]["credit"] += 1.0
    again = Credit(klass).own_state(replace(canvas, step=canvas.step + 1), state)
    fresh = Credit(klass).own_state(canvas, state)
    assert bool((again["credit"] == 1).all()) and not bool(fresh["credit"].any())


def test_an_end_id_without_confidence_gets_no_credit() -> None:
    requests = [replace(r, eos="no_confidence", stop_at_eos=False) for r in ragged_requests()]
    for dense in (False, True):
        results = decode("credit+threshold", requests, dense=dense, threshold=0.5)
        assert all(toy().info.mask_id not in r.canvas for r in results)


# ------------------------------------------------------------------------------- decoding


def test_an_inner_with_its_own_query_is_refused() -> None:
    class Asking(Threshold):
        def query(self, canvas: Canvas, state: Any) -> Query:
            return Query(tokens=canvas.tokens[:, None])

    with pytest.raises(CapabilityError, match="has a query of its own"):
        decode(Credit(Asking()))


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_few_ids_and_whole_logits_decode_the_same(cache: str, temperature: float) -> None:
    few, whole = (
        decode(
            "credit+threshold",
            model=toy(3),
            cache=cache,
            temperature=temperature,
            threshold=0.9,
            dense=dense,
        )
        for dense in (False, True)
    )
    assert steps_of(few) == steps_of(whole)
    options = {"temperature": temperature, "threshold": 0.9}
    plain = decode("threshold", model=toy(3), cache=cache, **options)
    assert steps_of(few) != steps_of(plain)


def test_something_is_decided_even_if_nothing_is_confident() -> None:
    results = decode("credit+threshold", threshold=1.5)
    assert all(len(s.positions) == 1 for r in results for s in r.trace.steps)


def test_any_inner_takes_its_steps_with_credit() -> None:
    assert all(r.forwards == 9 for r in decode(Credit(Llada()))[:1])


def published() -> list[Any]:
    cases = golden_cases("llada-tiny-a", "decode_dinfer")
    return [pytest.param(c, id=c["name"]) for c in cases if "Credit" in c["decoder"]]


@requires_golden
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("case", published())
def test_dinfer_credit(case: Case, dense: bool) -> None:
    s = case["settings"]
    options = {
        "relative_to_best": True,
        "threshold": s["threshold"],
        "alpha": s.get("credit_alpha", 0.7),
        "gamma": s.get("boost_gamma", 0.2),
        "beta": s.get("decay_beta", 0.8),
        "dense": dense,
    }
    check_golden(case, "credit+threshold", options)


@requires_golden
def test_dinfers_traces_need_the_credit() -> None:
    """Negative control: without credit some trace differs."""
    case = golden_cases("llada-tiny-a", "decode_dinfer")[2]
    options = {"relative_to_best": True, "threshold": case["settings"]["threshold"]}
    with pytest.raises(AssertionError):
        check_golden(case, "threshold", options)
