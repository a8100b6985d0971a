"""WINO: shadows leave the real tokens alone and see what they should; the two rules; its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.errors import CapabilityError
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.toy import random_dream, random_llada
from dlm_decode.outcome import next_canvas, settle
from dlm_decode.rows import COMMIT, REMASK
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.types import Canvas, Decision, Output, Query, Request
from tests.unit.sampler_cases import logits_with_top, make_canvas
from tests.unit.wrapper_cases import decode, probed_output, steps_of

MODELS: dict[str, Backbone] = {
    "llada": random_llada(1, hidden=16, heads=2, vocab=32, dtype=torch.float64),
    "dream": random_dream(1, hidden=16, heads=2, kv_heads=1, vocab=32, dtype=torch.float64),
}
REQUESTS = [
    Request([3, 5, 7], gen_length=8, block_length=4, stop_at_eos=False),
    Request([9], gen_length=5, block_length=8, frozen={2: 6}, suffix_ids=[4], stop_at_eos=False),
]


@dataclass(frozen=True)
class Asking(Sampler):
    """Commits the first open position and notes what it was given."""

    asked: frozenset[str] = frozenset()
    notes: list[tuple[Canvas, Output]] = field(default_factory=list)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"decided", "logits"}) | self.asked

    def query(self, canvas: Canvas, state: Any) -> Query:
        return Query(probe=canvas.tokens[..., None])

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        self.notes.append((canvas, output))
        first = canvas.eligible & (canvas.eligible.cumsum(-1) == 1)
        return Decision(output.top1, first), state


def noted(model: str, cache: str, *asked: str) -> tuple[list[tuple[Canvas, Output]], int]:
    sampler = Asking(asked=frozenset(asked))
    results = Decoder(MODELS[model], sampler, cache, debug=True).generate(REQUESTS)
    return sampler.notes, sum(r.trace.computed_positions for r in results)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("model", list(MODELS))
def test_real_outputs_are_those_without_shadows(model: str, cache: str) -> None:
    plain, cost = noted(model, cache)
    shadowed, more = noted(model, cache, "shadow")
    assert len(plain) == len(shadowed)
    for (canvas, theirs), (_, ours) in zip(plain, shadowed, strict=True):
        assert torch.equal(ours.valid, theirs.valid)
        for name, value in theirs.stats.items():
            torch.testing.assert_close(ours.stats[name], value, rtol=0, atol=1e-12, msg=name)
        assert ours.shadow_p1[canvas.eligible].min() > 0
    assert more == cost + sum(int(o.valid.sum()) for _, o in shadowed)


def by_hand(model: Backbone, row: Tensor, scored: Tensor) -> Tensor:
    """Log-probabilities of the row's own tokens in their shadows, by one masked attention."""
    n, s, shift = len(row), len(scored), model.info.shift
    at = (scored - shift).clamp(min=0)
    ids = torch.cat([row, torch.full_like(at, model.info.mask_id)])
    sees = torch.ones(n + s, n + s, dtype=torch.bool)
    sees[:n, n:] = False
    sees[n + torch.arange(s), scored] = False

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    hidden = model.forward(ids, torch.cat([torch.arange(n), at]), attend)
    logits = model.logits(hidden[n:])
    logits[:, model.info.mask_id] = -torch.inf
    return logits.log_softmax(-1).gather(-1, row[scored][:, None])[:, 0]


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("model", list(MODELS))
def test_a_shadow_sees_all_but_the_token_at_its_place(model: str, cache: str) -> None:
    """Against one masked attention over the whole row; cached ones in the turn of a refresh."""
    made, compared = MODELS[model], 0
    sampler = Asking(asked=frozenset({"shadow"}))
    request = replace(REQUESTS[0], block_length=8)
    options = {} if cache == "none" else {"refresh_every": 1}
    decoder = Decoder(made, sampler, cache, options=options, debug=True)
    decoder.generate(request)
    for canvas, output in sampler.notes:
        row = torch.cat([torch.tensor(request.prompt_ids), canvas.tokens[0]])
        scored = canvas.positions[0][output.valid[0]]
        decided = ~canvas.masked[0][output.valid[0]]
        found = (output.shadow_probed[0, :, 0] - output.shadow_lse[0])[output.valid[0]]
        expected = by_hand(made, row, scored)
        torch.testing.assert_close(found[decided], expected[decided], rtol=0, atol=1e-9)
        compared += int(decided.sum())
    assert compared == 28


def test_shadows_go_with_neither_guidance_nor_branches() -> None:
    with pytest.raises(CapabilityError, match="guidance"):
        Decoder(MODELS["llada"], "wino", cfg_scale=1.0).generate(REQUESTS)


# ----------------------------------------------------------------------------------------- rules


def turns(sampler: Sampler, logits: list[Tensor], shadows: list[list[float]]) -> list[Any]:
    """Commits and remasks of each turn, with the probabilities that shadows give the tokens."""
    width = logits[0].shape[1]
    canvas = make_canvas(width=width, vocab_size=logits[0].shape[2])
    state, found = sampler.init(canvas), []
    for given, q in zip(logits, shadows, strict=True):
        output = probed_output(sampler, canvas, given, state)
        shadow = {
            "shadow_lse": torch.zeros(1, width),
            "shadow_probed": torch.tensor([q])[..., None].log(),
        }
        output = Output({**output.stats, **shadow})
        decision, state = sampler.decide(canvas, output, state)
        settled = settle(canvas, output, decision)
        codes = settled.codes[0]
        found.append([(codes == code).nonzero().flatten().tolist() for code in (COMMIT, REMASK)])
        canvas = next_canvas(canvas, output, settled)
    return found


def test_wide_in_narrow_out() -> None:
    first = logits_with_top([0.99, 0.7, 0.65, 0.3, 0.2, 0.5], 16)
    second = logits_with_top([0.9, 0.9, 0.9, 0.7, 0.65, 0.5], 16)
    low = [0.95, 0.2, 0.5, 0.1, 0.1, 0.1]
    found = turns(SAMPLERS.create("wino"), [first, second], [low, low])
    assert found == [[[0, 1, 2], []], [[3, 4], [1, 2]]]


def test_no_more_go_back_than_one_less_than_came_the_turn_before() -> None:
    """Two came, so the least likely one of two doubtful ones goes; one commit takes none back."""
    first = logits_with_top([0.99, 0.7, 0.3, 0.3, 0.2, 0.5], 16)
    second = logits_with_top([0.9, 0.93, 0.9, 0.7, 0.65, 0.5], 16)
    q = [0.4, 0.2, 1.0, 1.0, 1.0, 1.0]
    found = turns(SAMPLERS.create("wino"), [first, second], [q, q])
    assert found == [[[0, 1], []], [[2, 3, 4], [1]]]
    alone = turns(SAMPLERS.create("wino", {"tau1": 0.95}), [first, second], [q, q])
    assert alone == [[[0], []], [[1], []]]


def test_a_turn_commits_a_limited_share() -> None:
    sure = logits_with_top([0.99 - 0.01 * i for i in range(12)], 16)
    found = turns(SAMPLERS.create("wino"), [sure, sure], [[1.0] * 12] * 2)
    assert [len(commit) for commit, _ in found] == [8, 4], "floor(.7 * 12), then at least five"


def test_without_narrowing_it_is_the_threshold_decoder() -> None:
    off = decode("wino", tau1=0.6, tau2=0.0, share=1.0, least=99, most=99)
    assert steps_of(off) == steps_of(decode("threshold", threshold=0.6))
    assert steps_of(decode("wino", tau1=0.3)) != steps_of(decode("threshold", threshold=0.3))


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("tau1", [0.0, 0.3])
def test_a_block_ends_within_as_many_turns_as_it_has_positions(cache: str, tau1: float) -> None:
    """Though every token that may go back does."""
    request = Request([3, 5, 7], gen_length=16, block_length=8, stop_at_eos=False)
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"tau1": tau1, "tau2": 2.0, "least": 2, "share": 0.2}
        (result,) = decode("wino", request, cache=cache, temperature=temperature, **options)
        assert result.finish_reason == "length" and result.forwards <= 16
        assert any(step.remasked for step in result.trace.steps)
