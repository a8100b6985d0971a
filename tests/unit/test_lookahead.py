"""LoPA's branches, the Metropolis chain's law, and LRD's soft inputs: rules and identities."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode import engine, packing
from dlm_decode.api import Decoder, load
from dlm_decode.attention import Choice, Group, PackedAttention
from dlm_decode.errors import CapabilityError
from dlm_decode.kv import KVStore
from dlm_decode.models import forced as force
from dlm_decode.models.toy import copy_task, from_table, random_dream
from dlm_decode.rows import make_row
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.schedules import SCHEDULES
from dlm_decode.types import Output, Request
from tests.golden import Case, golden_cases, golden_path, requires_golden
from tests.reference import lopa
from tests.reference.network import Network
from tests.unit.sampler_cases import chosen, make_canvas
from tests.unit.test_golden_decode import rows_of
from tests.unit.wrapper_cases import decode, ragged_requests, steps_of, toy

CPU = torch.device("cpu")


def published_cases(decoder: str) -> list[Any]:
    found = golden_cases("dream-tiny-a", "decode_lopa_d2f")
    return [pytest.param(c, id=c["name"]) for c in found if c["decoder"] == decoder]


def make(name: str, **options: Any) -> Sampler:
    return SAMPLERS.create(name, options)


# ------------------------------------------------------------------------------------------ lopa


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_branches_lopa_is_the_threshold_decoder(cache: str, temperature: float) -> None:
    ours = decode("lopa", lookahead=0, threshold=0.6, cache=cache, temperature=temperature)
    plain = decode("threshold", threshold=0.6, cache=cache, temperature=temperature)
    assert [r.canvas for r in ours] == [r.canvas for r in plain]
    assert steps_of(ours) == steps_of(plain)
    costs = [[r.trace.computed_positions for r in results] for results in (ours, plain)]
    assert costs[0] == costs[1]


def branches(p: list[list[float]]) -> Output:
    """Confidences of each branch; branch r names token 10 r + i at position i."""
    c = torch.tensor([p], dtype=torch.float64)
    ids = torch.arange(c.shape[1])[:, None] * 10 + torch.arange(c.shape[2])
    valid = torch.ones_like(ids, dtype=torch.bool)[None]
    return Output({"top1": ids[None], "p1": c, "lse": c * 0, "valid": valid})


def test_the_branch_with_the_surest_rest_wins() -> None:
    canvas, sampler = make_canvas(width=4, vocab_size=100), make("lopa", lookahead=2)
    one = [[0.95, 0.5, 0.4, 0.3]]
    plain = branches(one + [[0.0] * 4] * 2)
    unused = torch.tensor([[[True], [False], [False]]])
    first = Output({**plain.stats, "valid": plain.valid & unused})
    decision, state = sampler.decide(canvas, first, sampler.init(canvas))
    assert chosen(decision) == [0] and int(decision.branches[0]) == 3
    assert state["place"].equal(canvas.positions[:, 1:3]), "the two surest masks left"
    assert decision.ahead is state["place"]
    assert state["token"][0].tolist() == [1, 2]
    after = replace(canvas, eligible=torch.tensor([[False, True, True, True]]))
    query = sampler.query(after, state)
    assert query is not None and query.adaptive and query.tokens is not None
    assert (query.tokens[0, 1:] != query.tokens[0, :1]).nonzero().tolist() == [[0, 1], [1, 2]]
    for rows, winner, commits in (
        ([[0, 0.5, 0.5, 0.5], [0, 0, 0.9, 0.2], [0, 0.7, 0, 0.6]], 2, {2: 2, 1: 21}),
        ([[0, 0.5, 0.5, 0.5], [0, 0, 0.3, 0.2], [0, 0.2, 0, 0.6]], 0, {1: 1}),
        ([[0, 0.5, 0.5, 0.5], [0, 0, 0.8, 0.2], [0, 0.4, 0, 0.4]], 1, {1: 1, 2: 12}),
    ):
        decision, _ = sampler.decide(after, branches(rows), state)
        assert chosen(decision) == sorted(commits)
        assert int(decision.winner[0]) == winner
        assert all(int(decision.tokens[0, p]) == t for p, t in commits.items())


def test_a_row_that_would_be_full_is_as_sure_as_can_be() -> None:
    sampler = make("lopa", lookahead=1)
    canvas = make_canvas(masked=torch.tensor([[False, False, True]]), vocab_size=100)
    state = sampler.init(canvas)
    state = state | {"place": canvas.positions[:, 2:], "token": torch.tensor([[7]])}
    decision, _ = sampler.decide(canvas, branches([[0, 0, 0.999], [0, 0, 0.2]]), state)
    assert int(decision.tokens[0, 2]) == 7 and int(decision.branches[0]) == 1


def test_looking_ahead_takes_fewer_forwards_and_tells_what_they_cost() -> None:
    requests = [replace(r, gen_length=16, block_length=16) for r in ragged_requests()]
    plain = decode("lopa", requests, lookahead=0, threshold=0.6)
    ahead = decode("lopa", requests, lookahead=3, threshold=0.6)
    assert sum(r.forwards for r in ahead) < sum(r.forwards for r in plain)
    assert all(r.trace.drafted is None for r in ahead), "branches are no drafts of the row's future"
    costs = [sum(r.trace.computed_positions for r in results) for results in (ahead, plain)]
    assert costs[0] > costs[1]


def test_a_branch_can_be_judged_by_its_least_confident_masks_and_its_token() -> None:
    canvas = make_canvas(width=5, vocab_size=100)
    after = replace(canvas, eligible=canvas.positions > canvas.positions[:, :1])
    rows = [[0, 0.6, 0.6, 0.6, 0.6], [0, 0, 0.99, 0.9, 0.1], [0, 0.5, 0, 0.5, 0.5]]
    state = {
        "place": canvas.positions[:, 1:3],
        "token": torch.tensor([[1, 2]]),
        "sure": torch.tensor([[0.5, 0.9]], dtype=torch.float64),
    }
    for options, winner in (
        ({}, 1),  # 0.6, 0.663 and 0.5
        ({"lowest": 0.7}, 0),  # of 4 and 3 masks the lowest 2: 0.6, 0.5 and 0.5
        ({"lowest": 0.0}, 0),  # one of them
        ({"token_weight": 0.5}, 0),  # beside 1, 0.5 and 0.9: 0.8, 0.582 and 0.7
        ({"token_weight": 1.0}, 0),
    ):
        decision, _ = make("lopa", lookahead=2, **options).decide(after, branches(rows), state)
        assert int(decision.winner[0]) == winner, options


# ------------------------------------------------------------------- windows of a branch's own


def test_a_branch_opens_the_next_block_for_itself() -> None:
    """Half of a block opens the next one; what a branch fills counts in that branch alone."""
    pipeline = SCHEDULES.create("pipeline", {"add": 0.5})
    row = make_row(Request([1] * 4, gen_length=8, block_length=4), toy().info, pipeline, seed=0)
    row.masked[4] = False
    row.ahead = 6, 9
    row.advance(pipeline)
    assert row.window.stop == 8 and row.stops == (8, 12, 8)
    row.advance(SCHEDULES.create("fixed"))
    assert row.stops == (), "most schedules never look beyond the window in use"


def pipelined(sampler: str, cache: str, *, forced: bool, batch: int = 8, **options: Any) -> Any:
    model = random_dream(2, hidden=16, heads=2, kv_heads=1, vocab=32, dtype=torch.float64)
    if forced:
        model.info = force(model.info, 4)
    requests = [replace(r, gen_length=12, block_length=4) for r in ragged_requests()]
    given = {"schedule.add": 1.0} | {k.replace("__", "."): v for k, v in options.items()}
    decoder = Decoder(
        model, sampler, cache, "pipeline", options=given, max_batch_size=batch, debug=True
    )
    return [r for group in batches(requests, batch) for r in decoder.generate(group)]


def batches(requests: list[Request], size: int) -> list[list[Request]]:
    return [requests[i : i + size] for i in range(0, len(requests), size)]


LOOKING: dict[str, Any] = {"lopa.lookahead": 3, "lopa.threshold": 0.95, "lopa.activation": 0.9}


@pytest.mark.parametrize("sampler", ["lopa", "prophet+lopa"])
@pytest.mark.parametrize("cache", ["block_causal", "in_flight", "in_flight-kept"])
def test_rows_whose_branches_differ_in_length_decode_alone_as_in_a_batch(
    sampler: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: set[int] = set()
    packed = packing.pack

    def noting(rows: Any, scored: Any, scope: packing.Scope, **rest: Any) -> Any:
        lengths.update(len({len(plan.query) for plan in plans}) for plans in scope.plans)
        return packed(rows, scored, scope, **rest)

    monkeypatch.setattr(engine, "pack", noting)
    name, _, lead = cache.partition("-")
    options = LOOKING | ({"cache.lead": lead} if lead else {})
    given: dict[str, Any] = {"forced": name == "block_causal", **options}
    together, alone = (pipelined(sampler, name, batch=batch, **given) for batch in (8, 1))
    assert steps_of(together) == steps_of(alone)
    costs = [[r.trace.computed_positions for r in results] for results in (together, alone)]
    assert costs[0] == costs[1] and 2 in lengths


def test_an_exact_cache_changes_no_branch() -> None:
    """Sequential against packed: without a cache each branch is a row of its own."""
    runs = [pipelined("lopa", cache, forced=True, **LOOKING) for cache in ("none", "block_causal")]
    assert steps_of(runs[0]) == steps_of(runs[1])
    none = pipelined("lopa", "none", forced=True, **LOOKING | {"lopa.lookahead": 0})
    assert steps_of(none) != steps_of(runs[0])
    plain = pipelined("d2f", "none", forced=True, d2f__threshold=0.95, d2f__activation=0.9)
    assert steps_of(none) == steps_of(plain), "without branches it is D2F"


def test_the_winners_keys_are_stored() -> None:
    store = KVStore(toy().info, pages=1, page_length=8, dtype=torch.float64, device=CPU)
    versions = Choice(*(torch.tensor(x) for x in ([0, 0, 1], [2, 5, 7], [[0, 1], [2, 3], [4, 4]])))
    attend = PackedAttention((Group(0, 1, 5, own=True),), store, choice=versions)
    heads, size = toy().info.kv_heads, toy().info.head_size
    k, v = torch.randn(2, 5, heads, size, dtype=torch.float64)
    attend(0, k, k, v)
    attend.choose(torch.tensor([1, 0]))
    assert torch.equal(store.keys[0].data[[2, 5, 7]], k[[1, 3, 4]])
    assert torch.equal(store.values[0].data[[2, 5, 7]], v[[1, 3, 4]])
    assert not store.keys[0].data[[0, 1, 3, 4, 6]].any()


def test_a_kept_output_is_not_read_beside_its_forward() -> None:
    for sampler, what in (("dos", "attention"), ("wino", "shadows")):
        with pytest.raises(CapabilityError, match=rf"{what}.*lead computed"):
            pipelined(sampler, "in_flight", forced=False, cache__lead="kept")


@requires_golden
@pytest.mark.parametrize("case", published_cases("lopa.enhanced_speculative"))
def test_the_published_branches_over_d2f(case: Case) -> None:
    """Turn by turn what the code commits, with branches of different length in three of the four.

    With full attention the winner's K/V are kept, and the output before the window too.
    """
    s, (prompt,) = case["settings"], rows_of(case)
    full = s["use_full_attention"]
    loaded = load(
        golden_path("dream-tiny-a"), dtype="float32", forcing=None if full else s["block_size"]
    )
    options = {
        "lopa.lookahead": s["branching_factor"],
        "lopa.threshold": s["skip_threshold"],
        "lopa.activation": s["decoded_token_threshold"],
        "lopa.lowest": float(s["branch_topp"]),
        "lopa.token_weight": float(s["selection_conf_alpha"]),
        "schedule.add": s["block_add_threshold"],
    } | ({"cache.lead": "kept"} if full else {})
    cache = "in_flight" if full else "block_causal"
    decoder = Decoder(loaded.model, "lopa", cache, "pipeline", options=options, debug=True)
    request = Request(
        prompt,
        gen_length=s["max_new_tokens"],
        block_length=s["block_size"],
        stop_at_eos=False,
    )
    (result,) = decoder.generate([request])
    ids, turns = lopa.generate(Network(golden_path("dream-tiny-a")), case)
    assert list(result.ids) == case["final_ids"][0] == ids
    assert steps_of([result])[0] == [sorted(turn.commits) for turn in turns]
    assert result.forwards == case["parallel_steps"] - 1, "the last turn there only finds the end"
    fed = sum(length for _, _, length in case["forwards"])
    leads = result.trace.computed_positions - fed
    assert leads == 0 if full else 0 < leads < case["nfe"]
    other = Request(prompt[2:], gen_length=8, block_length=s["block_size"], stop_at_eos=False)
    among = decoder.generate([other, request])[1]
    assert steps_of([among]) == steps_of([result])


# ------------------------------------------------------------------------------------------- imh

JOINT = torch.tensor([[0.30, 0.02, 0.02, 0.01], [0.06, 0.06, 0.07, 0.06], [0.01, 0.18, 0.2, 0.01]])
DRAWS = 1500


def power_law(alpha: float) -> Tensor:
    return JOINT**alpha / (JOINT**alpha).sum()


def local_law(alpha: float) -> Tensor:
    """Each position sharpened by itself; the first one is the surer one, position 1 or 0."""
    first = 0 if JOINT.sum(1).max() >= JOINT.sum(0).max() else 1
    table = JOINT if first == 0 else JOINT.T
    marginal = table.sum(1) ** alpha
    rest = (table / table.sum(1, keepdim=True)) ** alpha
    law = (marginal / marginal.sum())[:, None] * rest / rest.sum(1, keepdim=True)
    return law if first == 0 else law.T


def drawn(**options: Any) -> Counter[tuple[int, ...]]:
    model = from_table(JOINT, offset=1)
    decoder = Decoder(model, "imh", options=options, max_batch_size=250)
    request = Request([0], gen_length=2, block_length=2, stop_at_eos=False)
    return Counter(tuple(r.ids) for r in decoder.generate([request] * DRAWS))


def chi_square(counts: Counter[tuple[int, ...]], law: Tensor) -> float:
    cells = [(i, j) for i in range(law.shape[0]) for j in range(law.shape[1])]
    return sum(
        (counts[cell] - DRAWS * float(law[cell])) ** 2 / (DRAWS * float(law[cell]))
        for cell in cells
        if float(law[cell]) * DRAWS >= 1
    )


LIMIT = 31.3
"""The 0.1% point of the chi-square of 11 degrees of freedom."""


def test_the_chain_draws_from_the_global_power_law() -> None:
    """And not from the law of positions sharpened one by one, nor the other way round."""
    globally = drawn(alpha=2.0, proposals=16)
    assert chi_square(globally, power_law(2.0)) < LIMIT < chi_square(globally, local_law(2.0))
    locally = drawn(alpha=2.0, proposals=0)
    assert chi_square(locally, local_law(2.0)) < LIMIT < chi_square(locally, power_law(2.0))


def test_a_power_of_one_is_the_model_itself() -> None:
    plain = drawn(alpha=1.0, proposals=3)
    assert chi_square(plain, power_law(1.0)) < LIMIT < chi_square(plain, power_law(2.0))


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_the_chain_decides_one_token_a_turn(cache: str) -> None:
    for result in decode("imh", cache=cache):
        assert all(len(step.positions) <= 1 for step in result.trace.steps)
        assert result.finish_reason == "length"


# ------------------------------------------------------------------------------------------- lrd


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_without_feedback_it_is_the_entropy_decoder(cache: str) -> None:
    for refine in (0, 3):
        ours = decode(
            "lrd", r_f=0.0, tau_refine=0.0, tau_decode=0.0, refine_steps=refine, cache=cache
        )
        plain = decode("entropy", cache=cache)
        committed = [[step for step in steps if step] for steps in steps_of(ours)]
        if cache == "none" or refine == 0:
            assert committed == steps_of(plain)
        blocks = [-(-r.gen_length // (r.block_length or 1)) for r in ragged_requests()]
        extra = [a.forwards - b.forwards for a, b in zip(ours, plain, strict=True)]
        assert extra == [refine * n for n in blocks]
    mixed = decode("lrd", r_f=0.9, tau_refine=0.0, tau_decode=0.0, refine_steps=3)
    assert [[s for s in steps if s] for steps in steps_of(mixed)] != steps_of(plain)


def test_an_unlimited_divergence_fills_the_block_at_once() -> None:
    request = Request([3, 5, 7], gen_length=12, block_length=6, stop_at_eos=False)
    (result,) = decode("lrd", request, tau_refine=1e9, tau_decode=1e9)
    # one forward has nothing to compare with, the second decides a token, the third the rest
    assert [len(s.positions) for s in result.trace.steps] == [0, 1, 5, 0, 1, 5]


def test_beliefs_are_the_renormalised_nucleus_and_the_mask() -> None:
    canvas = make_canvas(width=1, vocab_size=8)
    p = torch.tensor([[[1e-9, 0.5, 0.3, 0.15, 0.03, 0.01, 0.01, 1e-9]]])
    entropy = -(p * p.log()).sum(-1)
    output = Output({"entropy": entropy})
    sampler = make("lrd", r_f=0.2, nucleus=0.9)
    ids, weights = sampler._beliefs(canvas, output, p.log())  # type: ignore[attr-defined]
    share = 0.2 * (1 - float(entropy) / torch.tensor(8.0).log())
    kept = torch.tensor([0.5, 0.3, 0.15]) / 0.95
    assert ids[0, 0, :3].tolist() == [1, 2, 3] and ids[0, 0, -1] == canvas.mask_id
    assert torch.allclose(weights[0, 0, :3].float(), share * kept, atol=1e-6)
    assert float(weights[0, 0, -1]) == pytest.approx(1 - float(share), abs=1e-6)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert (weights[0, 0, 3:-1] == 0).all()


def test_a_model_without_embeddings_is_refused() -> None:
    with pytest.raises(CapabilityError, match="not embeddings"):
        decode("lrd", Request([0], gen_length=3), model=copy_task([0, 1, 2], offset=1))
