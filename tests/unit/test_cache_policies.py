"""What each policy computes and sees, turn by turn; the property tests of cached decoding."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.attention import PackedAttention
from dlm_decode.caches import CACHES, CachePolicy, RowPlan, RowView
from dlm_decode.caches.d2 import density, inflated, nucleus
from dlm_decode.caches.elastic import mean_attention
from dlm_decode.caches.sparse import Scoring
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.toy import random_dream, random_llada, random_sdar
from dlm_decode.samplers import Sampler
from dlm_decode.schedules import Window
from dlm_decode.scores import best, commit_candidates
from dlm_decode.types import Canvas, Decision, Generation, Output, Query, Request

SIZES: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 1, "vocab": 32}


@cache
def model(name: str) -> Backbone:
    made = {"llada": random_llada, "dream": random_dream, "sdar": random_sdar}[name]
    return made(2, dtype=torch.float64, **SIZES)


REQUESTS = [
    Request([3, 5, 7, 2], gen_length=9, block_length=4, id="a", stop_at_eos=False),
    Request([4, 8, 15, 1], gen_length=7, block_length=8, suffix_ids=[6], frozen={2: 5}, id="b"),
    Request([1, 2, 3], gen_length=6, id="c", stop_at_eos=False),
    Request([9], gen_length=5, block_length=2, id="d", stop_at_eos=False),
]
STORING = [name for name in CACHES.names() if CACHES.get(name).stores]
BY_MODEL = [
    (m, name)
    for m in ("llada", "dream", "sdar")
    for name in STORING
    if model(m).info.regime in CACHES.get(name).regimes
]


def decode(name: str, cache_name: str | CachePolicy, *, batch: int = 4, **more: Any) -> Any:
    requests = more.pop("requests", REQUESTS)
    sampler = more.pop("sampler", "llada")
    decoder = Decoder(model(name), sampler, cache_name, max_batch_size=batch, debug=True, **more)
    return decoder.generate(requests)


def outcome(result: Generation) -> tuple[Any, ...]:
    steps = [(s.positions, s.tokens) for s in result.trace.steps]
    return result.canvas, steps, result.trace.forwards_by_kind, result.trace.computed_positions


@dataclass(frozen=True)
class Drafting(Sampler):
    """Commits the best position of branch 0; branches 1 and 2 are full of a token (tests only)."""

    tokens: int = 1

    def query(self, canvas: Canvas, state: Any) -> Query:
        draft = torch.where(canvas.masked & canvas.editable, self.tokens, canvas.tokens)
        return Query(torch.stack([canvas.tokens, draft, draft], dim=1))

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        own = output.branch(0)
        chosen = best(own.p1, canvas.eligible)
        return commit_candidates(canvas, own, chosen, own.p1), state


# --------------------------------------------------------------------------- property tests (6.11)


@pytest.mark.parametrize(("name", "cache_name"), BY_MODEL)
def test_rows_are_the_same_alone_and_in_random_order(name: str, cache_name: str) -> None:
    """Rows at different blocks and refresh phases, entering and leaving, in one forward."""
    alone = {r.id: outcome(r) for q in REQUESTS for r in decode(name, cache_name, requests=[q])}
    order = random.Random(len(cache_name))
    for batch in (2, 3):
        requests = order.sample(REQUESTS, len(REQUESTS))
        for result in decode(name, cache_name, batch=batch, requests=requests):
            assert outcome(result) == alone[result.id]


@pytest.mark.parametrize("name", ["llada", "dream"])
@pytest.mark.parametrize(
    "cache_name", [n for n in STORING if "refresh_every" in {f.name for f in fields(CACHES.get(n))}]
)
def test_a_refresh_in_every_turn_is_no_cache(name: str, cache_name: str) -> None:
    cached = decode(name, cache_name, options={"refresh_every": 1})
    plain = decode(name, "none")
    assert [outcome(r)[:2] for r in cached] == [outcome(r)[:2] for r in plain]


class Deaf(PackedAttention):
    """Attention in which no query sees what lies outside its own row's window (tests only)."""

    def __init__(self, window: slice, length: int, positions: Tensor) -> None:
        self._window, self._positions = window, positions
        super().__init__(())

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inside = (self._positions >= self._window.start) & (self._positions < self._window.stop)
        scores = torch.einsum("qhk,nk->hqn", q, k[inside][:, 0]) * q.shape[-1] ** -0.5
        return torch.einsum("hqn,nk->qhk", scores.softmax(-1), v[inside][:, 0])


def test_where_nothing_outside_the_block_counts_its_own_forward_is_exact() -> None:
    """A model that attends to the window only: what `dual` computes is all there is."""
    made, ids = model("llada"), torch.tensor([3, 5, 7, 2, 28, 28, 28, 28, 28])
    window = slice(4, 8)
    at = torch.arange(9)
    whole = made.forward(ids, at, Deaf(window, 9, at))
    part = made.forward(ids[window], at[window], Deaf(window, 9, at[window]))
    torch.testing.assert_close(part, whole[window], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "cache_name"), BY_MODEL)
def test_branches_leave_no_trace(name: str, cache_name: str) -> None:
    """Two drafts that are never accepted store nothing: tokens and costs of the row are the same
    with the branches' contents replaced by anything."""
    first = decode(name, cache_name, sampler=Drafting(tokens=1), requests=REQUESTS[:2])
    other = decode(name, cache_name, sampler=Drafting(tokens=7), requests=REQUESTS[:2])
    assert [outcome(r) for r in first] == [outcome(r) for r in other]


def test_a_shifted_models_first_row_is_exact_right_after_a_refresh() -> None:
    """The block's first token is read one position before the block, which is computed too."""
    plain, cached = decode("dream", "none")[0], decode("dream", "dual")[0]
    assert cached.trace.steps[0] == plain.trace.steps[0]


# ---------------------------------------------------------------------------------- single policies


def view(**changes: Any) -> RowView:
    """A row of 20 with a prompt of 8, in its second block of 4, right after a refresh."""
    masked = np.arange(20) >= 13
    age = np.where(masked, 0, 9)
    stale = np.zeros(20, dtype=bool)
    made = RowView(20, Window(12, 16, 1), masked, 3, 2, 0, (12,), None, stale, 8, age)
    return replace(made, scores=np.linspace(0.1, 0.9, 20), **changes)


def plan_of(name: str, row: RowView, **options: Any) -> RowPlan:
    return CACHES.create(name, options).plan(row)


def test_delayed_computes_what_is_masked_or_new() -> None:
    """dKV-Cache: not committed at the end of step i - 2."""
    age = view().age
    assert age is not None
    age = age.copy()
    age[[11, 12]] = 2, 1
    row = view(age=age)
    assert plan_of("delayed", row).query.tolist() == [12, *range(13, 20)]
    assert plan_of("delayed", row, delay=3).query.tolist() == [11, 12, *range(13, 20)]
    assert plan_of("delayed", replace(row, step=1)).kind == "refresh"
    assert plan_of("delayed", replace(row, step=8)).kind == "refresh"
    prefill = plan_of("delayed", replace(row, step=8), variant="prefill")
    assert prefill.kind == "region" and prefill.query.tolist() == list(range(8, 20))
    greedy = plan_of("delayed", row, variant="greedy", local_window=1)
    assert greedy.query.tolist() == [10, 11, 12, 13, 14, 15]


def test_greedy_without_neighbours_packs_the_active_queries() -> None:
    """The window's masks and the tokens of the last two turns, whatever else the row holds; at each
    block one refresh, so that it computes less than `dual`."""
    options = {"variant": "greedy", "local_window": 0, "delay": 1, "refresh_every": None}
    age = np.where(np.arange(20) >= 13, 0, 9)
    age[[10, 11, 12]] = 3, 2, 1
    assert plan_of("delayed", view(age=age), **options).query.tolist() == [11, 12, 13, 14, 15]
    ours = decode("llada", "delayed", options=options)
    dual = decode("llada", "dual")
    assert sum(r.trace.computed_positions for r in ours) < sum(
        r.trace.computed_positions for r in dual
    )
    kinds = [r.trace.forwards_by_kind for r in ours]
    assert [k["refresh"] for k in kinds] == [r.trace.forwards_by_kind["refresh"] for r in dual]


def test_free_freezes_a_block_once_it_was_computed_on_its_tokens() -> None:
    stale = np.zeros(20, dtype=bool)
    stale[10] = True
    assert plan_of("free", view(step=0, stale=stale)).query.tolist() == [10, *range(12, 20)]
    assert plan_of("free", view()).query.tolist() == list(range(12, 20))
    assert plan_of("free", view(since_refresh=-1)).kind == "refresh"


def test_refresh_regions_of_prefix_and_dual() -> None:
    start = view(step=0)
    assert plan_of("dual", start).kind == "refresh"
    part = plan_of("dual", start, refresh_region="generation")
    assert part.kind == "region" and part.query.tolist() == list(range(8, 20))
    near = plan_of("dual", start, refresh_region="window", vicinity=2)
    assert near.kind == "region" and near.query.tolist() == list(range(10, 18))
    later = plan_of("dual", start, refresh_blocks=2)
    assert later.kind == "window" and later.query.tolist() == list(range(12, 16))
    assert plan_of("dual", replace(start, decided_since=3), refresh_tokens=3).kind == "refresh"
    assert plan_of("dual", replace(start, decided_since=2), refresh_tokens=3).kind == "window"
    assert plan_of("prefix", view(), vicinity=3).query.tolist() == list(range(9, 20))


def test_sparse_keeps_the_best_outside_positions() -> None:
    """score_j = mean over heads of q_mean . k_j, pooled over neighbours, the same for all heads."""
    scoring = Scoring(np.arange(3, 5), 8, 0.5, 1)
    q = torch.zeros(2, 8, 1)
    q[:, 3:5] = 1.0
    k = torch.tensor([0.0, 5.0, 1.0, 9.0, 9.0, 4.0, 2.0, 3.0])[None, :, None]
    scoring.see(0, q, k, k)
    assert scoring.chosen[0].tolist() == [1, 5, 7]
    pooled = Scoring(np.arange(3, 5), 8, 0.5, 3)
    pooled.see(0, q, k, k)
    assert pooled.chosen[0].tolist() == [0, 1, 2]


def test_sparse_attends_to_what_was_kept() -> None:
    """Keeping everything is `dual` refreshed in the first two turns."""
    all_kept = decode("llada", "sparse", options={"keep": 1.0})
    few_kept = decode("llada", "sparse", options={"keep": 0.2})
    sure = [[s.confidence for s in r.trace.steps] for r in all_kept]
    assert sure != [[s.confidence for s in r.trace.steps] for r in few_kept]
    kinds = all_kept[0].trace.forwards_by_kind
    assert kinds["window"] > 0 and kinds["refresh"] >= 2


def test_elastic_refreshes_by_drift() -> None:
    """No pattern is ever below cosine -1; every one is below 1."""
    never = decode("llada", "elastic", options={"gamma": -1.0}, requests=REQUESTS[:1])[0]
    assert never.trace.forwards_by_kind["refresh"] == 1
    often = decode("llada", "elastic", options={"gamma": 1.0}, requests=REQUESTS[:1])[0]
    assert often.trace.forwards_by_kind["refresh"] > 2


def test_elastic_computes_the_leftmost_masks() -> None:
    row = view()
    assert plan_of("elastic", row, beta=2).query.tolist() == [13, 14]
    age = row.age
    assert age is not None
    age = age.copy()
    age[12] = 1
    assert plan_of("elastic", replace(row, age=age), beta=2).query.tolist() == [12, 13, 14]


def test_attention_is_averaged_over_grouped_heads() -> None:
    q, k = torch.randn(4, 3, 5), torch.randn(2, 6, 5)
    expected = torch.stack([(q[h] @ k[h // 2].T / 5**0.5).softmax(-1) for h in range(4)]).mean(0)
    torch.testing.assert_close(mean_attention(q, k), expected)


def test_d2_takes_certain_masks_new_tokens_and_the_nucleus() -> None:
    age = view().age
    assert age is not None
    age = age.copy()
    age[12] = 1
    importance = np.zeros(20)
    importance[2] = 5.0
    row = view(age=age, memory=importance)
    chosen = plan_of("d2", row, current_k=1, inflate=0).query.tolist()
    assert 12 in chosen and 2 in chosen and sum(13 <= i < 16 for i in chosen) == 1
    whole = plan_of("d2", row, inflate=10).query.tolist()
    assert whole == list(range(2, 16))


def test_d2_parts() -> None:
    assert inflated(np.array([1, 0, 0, 1, 0, 0, 0, 1], dtype=bool), 3).tolist() == [
        *[True] * 4,
        *[False] * 3,
        True,
    ]
    importance = np.array([4.0, 1.0, 3.0, 2.0])
    allowed = np.array([True, True, True, False])
    assert np.flatnonzero(nucleus(importance, allowed, 0.5)).tolist() == [0]
    assert np.flatnonzero(nucleus(importance, allowed, 0.8)).tolist() == [0, 2]
    assert not nucleus(importance, allowed, 0.0).any()
    near, far = density(np.arange(20) < 10, 0, 2.0, np.array([9, 15]))
    assert near > far


def test_a_long_prompt_far_from_the_answer_weighs_nothing() -> None:
    decided = np.ones(1000, dtype=bool)
    decided[900:] = False
    assert (density(decided, 800, 2.0, np.arange(900, 1000))[50:] < 1e-9).all()


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_interval_computing_every_response_token_is_computing_the_response(name: str) -> None:
    """rho = 1 goes through the layers token by token, K_r = 1 through a plain forward."""
    part = decode(name, "interval", options={"ratio": 1.0})
    whole = decode(name, "interval", options={"response_interval": 1})
    assert [outcome(r)[:2] for r in part] == [outcome(r)[:2] for r in whole]
    for ours, theirs in zip(part, whole, strict=True):
        sure = [s.confidence for r in (ours, theirs) for s in r.trace.steps]
        half = len(sure) // 2
        assert all(a == pytest.approx(b) for a, b in zip(sure[:half], sure[half:], strict=True))


def test_interval_refreshed_in_every_turn_is_no_cache() -> None:
    cached = decode("dream", "interval", options={"prompt_interval": 1})
    assert [outcome(r)[:2] for r in cached] == [outcome(r)[:2] for r in decode("dream", "none")]


def test_interval_reuses_what_it_does_not_compute() -> None:
    """With rho = 0 only layer 0 follows the canvas, so that a turn's outputs hardly move."""
    none, some = (decode("llada", "interval", options={"ratio": r}) for r in (0.0, 0.5))
    assert [outcome(r) for r in none] != [outcome(r) for r in some]


def test_a_policy_without_a_hook_pays_for_none() -> None:
    assert type(CACHES.create("dual")).hook is CachePolicy.hook
    assert type(CACHES.create("sparse")).hook is not CachePolicy.hook


@pytest.mark.parametrize("cache_name", ["sparse", "elastic", "d2"])
def test_hooks_serve_guidance_too(cache_name: str) -> None:
    """The second lane is stored and attended like the first; the hook looks at the first only."""
    guided = decode("llada", cache_name, cfg_scale=0.5)
    alone = [decode("llada", cache_name, cfg_scale=0.5, requests=[q])[0] for q in REQUESTS]
    assert [outcome(r) for r in guided] == [outcome(r) for r in alone]
