"""What every cache policy guarantees, whatever it saves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.caches import CACHES, CachePolicy, RowPlan, RowView
from dlm_decode.caches.dual import Dual
from dlm_decode.caches.none import NoCache
from dlm_decode.engine import Engine
from dlm_decode.errors import CapabilityError
from dlm_decode.rows import make_row
from dlm_decode.samplers import SAMPLERS, Sampler, layers
from dlm_decode.schedules import SCHEDULES
from dlm_decode.types import Canvas, Decision, Draw, Generation, Output
from tests.contract.cases import (
    EVERY_CACHE,
    EVERY_MODEL,
    EVERY_SAMPLER,
    EVERY_SCHEDULE,
    fit,
    model_of,
    requests_of,
)

REFRESHING = [
    n for n in CACHES.names() if "refresh_every" in {f.name for f in fields(CACHES.get(n))}
]
EXACT = [name for name in CACHES.names() if CACHES.create(name).exactness == "exact"]


def decode(model: str, cache: str, *, temperature: float = 1.0, **more: Any) -> list[Generation]:
    decoder = Decoder(
        model_of(model), cache=cache, temperature=temperature, max_batch_size=3, debug=True, **more
    )
    return decoder.generate(requests_of(model))


def skip_unless_fit(sampler: str, cache_name: str, schedule: str, model: str) -> None:
    if not fit(sampler, cache_name, schedule, model):
        pytest.skip("these refuse each other")


def looks_ahead(sampler: str) -> bool:
    """Whether what the sampler decides depends on branches that it asks for."""
    return "branches" in layers(SAMPLERS.create(sampler))[-1].traits


def decided(results: list[Generation]) -> list[Any]:
    steps = [[(s.positions, s.tokens, s.remasked) for s in r.trace.steps] for r in results]
    return [steps, [r.canvas for r in results]]


@EVERY_MODEL
@EVERY_SAMPLER
@pytest.mark.parametrize("cache_name", REFRESHING)
def test_a_refresh_in_every_turn_is_no_cache(cache_name: str, sampler: str, model: str) -> None:
    """Tokens, their order and the number of forwards, of which a sampler may look ahead over some.

    It cannot look beyond a refresh, so that with one in every turn each step is a forward.
    """
    skip_unless_fit(sampler, cache_name, "fixed", model)
    if looks_ahead(sampler):
        pytest.skip("it chooses among branches, and no turn with a refresh has any")
    try:
        plain = decode(model, "none", sampler=sampler)
    except CapabilityError as error:
        assert model == "tabular" and "not embeddings" in str(error)
        pytest.skip("a tabular model has no embeddings")
    cached = decode(model, cache_name, sampler=sampler, options={"refresh_every": 1})
    assert decided(cached) == decided(plain)
    assert all(r.trace.forwards_by_kind == {"refresh": len(r.trace.steps)} for r in cached)
    assert all(r.forwards <= len(r.trace.steps) for r in plain)


@pytest.mark.parametrize("cache_name", REFRESHING)
def test_without_refreshes_an_approximate_cache_does_differ(cache_name: str) -> None:
    """Negative control: stored K/V do become stale in these models."""
    models = ("llada", "dream")
    cached = [decided(decode(model, cache_name, sampler="llada")) for model in models]
    assert cached != [decided(decode(model, "none", sampler="llada")) for model in models]


@EVERY_MODEL
@EVERY_SCHEDULE
@pytest.mark.parametrize("cache_name", EXACT)
def test_an_exact_cache_is_no_cache(cache_name: str, schedule: str, model: str) -> None:
    skip_unless_fit("threshold", cache_name, schedule, model)
    cached = decode(model, cache_name, schedule=schedule)
    assert decided(cached) == decided(decode(model, "none", schedule=schedule))


# ------------------------------------------------------------------------- right after a refresh


@dataclass(frozen=True)
class Waiting(Sampler):
    """Commits nothing in the first two turns of a block and everything in the third.

    Notes all logits, so that an unchanged canvas is seen in a refresh and from the cache.
    """

    notes: list[tuple[Canvas, Output]] = None  # type: ignore[assignment]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logits"})

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        self.notes.append((canvas, output))
        waits = canvas.step < 2
        return Decision(output.top1, canvas.eligible & ~waits[:, None], hold=waits), state


def watched(model: str, cache: CachePolicy, schedule: str) -> list[tuple[Canvas, Output]]:
    notes: list[tuple[Canvas, Output]] = []
    timetable = SCHEDULES.create(schedule)
    engine = Engine(model_of(model), Waiting(notes=notes), cache, timetable, Draw(), debug=True)
    info = model_of(model).info
    rows = [make_row(r, info, timetable, seed=0) for r in requests_of(model)]
    for _ in engine.run(rows):
        pass
    return notes


@dataclass(frozen=True)
class Cropped(CachePolicy):
    """Keeps nothing, computes the row up to the window's end in every turn (tests only)."""

    def plan(self, row: RowView) -> RowPlan:
        return RowPlan(np.arange(row.window.stop), "window", stop=row.window.stop)


def yardstick(cache_name: str) -> CachePolicy:
    """The policy without stored K/V that one sees as much as, right after a refresh."""
    return NoCache() if CACHES.get(cache_name).sees_behind else Cropped()


def fresh_logits(notes: list[tuple[Canvas, Output]]) -> list[Tensor]:
    """Logits of the eligible positions of every turn before anything was committed there."""
    picked = []
    for canvas, output in notes:
        unchanged = canvas.eligible & (canvas.step < 2)[:, None]
        picked.append(output.logits[unchanged])
    return picked


@EVERY_MODEL
@EVERY_SCHEDULE
@EVERY_CACHE
def test_right_after_a_refresh_logits_are_those_without_a_cache(
    cache_name: str, schedule: str, model: str
) -> None:
    """In all of the window, its first position included, which a shifted model reads outside it.

    Only the first block's turns compare: what is committed later is decided alike, but from K/V
    that a policy may keep for longer. Nor does the second turn where a window that has grown shows
    more than was seen in the first.
    """
    skip_unless_fit("threshold", cache_name, schedule, model)
    grows = SCHEDULES.get(schedule).opens_ahead and not CACHES.get(cache_name).sees_behind
    turns = 1 if grows else 2
    cached = watched(model, CACHES.create(cache_name), schedule)[:turns]
    plain = watched(model, yardstick(cache_name), schedule)[:turns]
    assert len(cached) == len(plain) == turns
    for ours, theirs in zip(fresh_logits(cached), fresh_logits(plain), strict=True):
        assert ours.shape == theirs.shape and len(ours)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_a_stale_store_is_noticed() -> None:
    """Negative control: with K/V from before the last commits, the comparison fails."""

    @dataclass(frozen=True)
    class Late(Dual):
        def _is_due(self, row: RowView) -> bool:
            return row.since_refresh < 0

    late, plain = watched("llada", Late(), "fixed"), watched("llada", NoCache(), "fixed")
    assert len(late) == len(plain)
    pairs = list(zip(fresh_logits(late), fresh_logits(plain), strict=True))
    assert all(torch.allclose(a, b) for a, b in pairs[:2])
    assert not all(torch.allclose(a, b) for a, b in pairs[2:])


# ------------------------------------------------------------------------------------ the plans


@EVERY_MODEL
@EVERY_SCHEDULE
@EVERY_CACHE
def test_a_plan_computes_what_the_window_needs(
    cache_name: str, schedule: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorted positions inside the row; a logit row for every masked position of the window.

    Planning twice gives the same; a full forward or refresh, not of a region, computes all.
    """
    skip_unless_fit("llada", cache_name, schedule, model)
    cls = CACHES.get(cache_name)
    plain = cls.plan
    planned = 0

    def checked(self: CachePolicy, row: RowView) -> RowPlan:
        nonlocal planned
        planned += 1
        plan, again = plain(self, row), plain(self, row)
        assert np.array_equal(plan.query, again.query) and plan.kind == again.kind
        assert plan.query.dtype == np.int64 and (np.diff(plan.query) > 0).all()
        assert plan.query[0] >= 0 and plan.query[-1] < row.length
        assert plan.kind in ("window", "region") or len(plan.query) == row.length
        inside = np.arange(row.window.start, row.window.stop)
        wanted = inside[row.masked[inside]]
        if plan.only is not None:
            wanted = wanted[(wanted >= plan.only[0]) & (wanted < plan.only[1])]
        assert len(wanted)
        assert np.isin(np.maximum(wanted - row.shift, 0), plan.query).all()
        return plan

    monkeypatch.setattr(cls, "plan", checked)
    results = decode(model, cache_name, sampler="llada", schedule=schedule)
    assert planned == sum(result.forwards for result in results)
