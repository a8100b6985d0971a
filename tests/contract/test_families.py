"""Every sampler and every cache over a tiny model of every family: what the parts promise, shortly.

The full suite runs over LLaDA, Dream and SDAR; here each family meets each part at least once, with
the parts that refuse it left out. Families are read from the registry.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from dlm_decode.api import default_schedule
from dlm_decode.caches import CACHES
from dlm_decode.errors import CapabilityError
from dlm_decode.samplers import SAMPLERS
from dlm_decode.types import Request
from tests.contract.cases import (
    FAMILY_MODELS,
    Combination,
    Observed,
    Run,
    decoder_of,
    fit,
    model_of,
    observe,
    outcome,
)
from tests.contract.test_caches import fresh_logits, watched, yardstick

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILY_MODELS)


REQUESTS = [
    Request([3, 5, 7, 2], gen_length=5, block_length=4, id="plain"),
    Request([4, 8, 15], gen_length=3, block_length=4, suffix_ids=[6], frozen={1: 5}, id="given"),
    Request([9], gen_length=2, block_length=1, stop_at_eos=False, id="ones"),
]
"""Over two blocks; with given tokens inside and behind; in blocks of one, never stopping."""


@cache
def plain_samplers(family: str) -> tuple[str, ...]:
    """Samplers with nothing special about them; those for masks, if the model has one."""
    masks = ("threshold", "llada", "entropy_bound")
    return masks if model_of(family).info.has_mask else ("renoise",)


@cache
def fitting_caches(family: str) -> list[str]:
    schedule, sampler = default_schedule(model_of(family).info), plain_samplers(family)[0]
    return [name for name in CACHES.names() if fit(sampler, name, schedule, family)]


def sampler_cases() -> list[Combination]:
    """Each sampler over each family; caches and temperatures alternate."""
    found = []
    for f, family in enumerate(FAMILY_MODELS):
        caches, schedule = fitting_caches(family), default_schedule(model_of(family).info)
        for s, sampler in enumerate(SAMPLERS.names()):
            tried = [caches[(f + s) % len(caches)], "none"] if caches else ["none"]
            fits = [name for name in tried if fit(sampler, name, schedule, family)]
            if fits:
                case = Combination(sampler, fits[0], schedule, family, float((f + s) % 2))
                found.append(case)
    return found


def cache_cases() -> list[Combination]:
    """Each cache that fits a family; plain samplers alternate."""
    return [
        Combination(plain[c % len(plain)], name, default_schedule(model_of(family).info), family)
        for family in FAMILY_MODELS
        for plain in [plain_samplers(family)]
        for c, name in enumerate(fitting_caches(family))
    ]


def decoded(case: Combination, requests: list[Request], batch: int) -> Run:
    return observe(decoder_of(case, batch=batch), requests)


def commits(seen: Observed) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(step.positions, step.tokens) for step in seen.generation.trace.steps]


@pytest.mark.parametrize("case", sampler_cases() + cache_cases(), ids=lambda case: case.label)
def test_rows_are_filled_and_the_same_alone_and_together(case: Combination) -> None:
    """No mask is left or emitted, nothing given changes, and a run can be repeated."""
    model = model_of(case.model)
    for request, seen in zip(REQUESTS, decoded(case, REQUESTS, 2).rows, strict=True):
        assert model.info.mask_id not in seen.generation.canvas
        given = ~seen.row.editable
        assert np.array_equal(seen.row.tokens[given], seen.tokens[given])
        alone = decoded(case, [request], 1).rows[0]
        assert outcome(alone.generation) == outcome(seen.generation)


@pytest.mark.parametrize(
    "case", [case for case in cache_cases() if case.cache != "none"], ids=lambda case: case.label
)
def test_an_exact_cache_changes_nothing_and_any_nothing_after_a_refresh(case: Combination) -> None:
    if CACHES.create(case.cache).exactness == "exact":
        plain, cached = (
            decoded(case._replace(cache=name), REQUESTS, 2) for name in ("none", case.cache)
        )
        for ours, theirs in zip(cached.rows, plain.rows, strict=True):
            assert commits(ours) == commits(theirs)
    notes = [
        watched(case.model, cache, case.schedule)[:2]
        for cache in (yardstick(case.cache), CACHES.create(case.cache))
    ]
    for ours, theirs in zip(*map(fresh_logits, notes), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


@EVERY_FAMILY
def test_a_family_refuses_a_part_by_name_or_takes_it(family: str) -> None:
    """Nothing above is left out silently: what does not fit is refused when a decoder is made."""
    schedule = default_schedule(model_of(family).info)
    assert "none" in fitting_caches(family)
    taken = {case.sampler for case in sampler_cases() if case.model == family}
    for sampler in set(SAMPLERS.names()) - taken:
        with pytest.raises(CapabilityError, match=family.partition("-")[0]):
            decoder_of(Combination(sampler, "none", schedule, family))
