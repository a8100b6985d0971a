"""What the contract tests run: combinations of the registries over tiny models and ragged rows.

The lists are read from the registries, so that a new file is tested the day it appears.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.caches import CACHES
from dlm_decode.errors import CapabilityError
from dlm_decode.models import Attend, DiffusionLM, toy
from dlm_decode.models.toy import Tabular
from dlm_decode.rows import Row, make_row
from dlm_decode.samplers import SAMPLERS
from dlm_decode.schedules import SCHEDULES, Window
from dlm_decode.types import Generation, Request, Step
from tests.families import TINY, made

OFFSET, CELLS, TOKENS = 4, 9, 5
"""Of the tabular task: where its canvas begins, its positions, and its tokens without the mask."""

MOST_COMBINATIONS = 700
"""Of how many the greedy part of the suite is made at most, see `combinations`."""


def tabular() -> Tabular:
    """Forty random sequences with random weights; id 0 is the end id and often ends them."""
    draw = random.Random(5)
    joint: dict[tuple[int, ...], float] = {}
    while len(joint) < 40:
        length = draw.randint(4, CELLS)
        body = [draw.randrange(1, TOKENS) for _ in range(length)]
        joint[tuple(body + [0] * (CELLS - length))] = draw.random()
    return Tabular(joint, vocab_size=TOKENS + 1, offset=OFFSET, end_ids=(0,))


SMALL: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 1, "vocab": 32}

MODELS: dict[str, Callable[[], DiffusionLM]] = {
    "dream": lambda: toy.random_dream(2, **SMALL, dtype=torch.float64),
    "llada": lambda: toy.random_llada(2, **SMALL, dtype=torch.float64),
    "sdar": lambda: toy.random_sdar(2, **SMALL, dtype=torch.float64),
    "tabular": tabular,
}
"""Tiny models; in fp64, so that neither batches nor caches round differently."""

FAMILY_MODELS: dict[str, Callable[[], DiffusionLM]] = {
    name: partial(made, name, torch.float64) for name in TINY if name not in MODELS
}
"""One of each other family, for the shorter suite over all families."""


@cache
def model_of(name: str) -> DiffusionLM:
    return (MODELS | FAMILY_MODELS)[name]()


@cache
def requests_of(name: str) -> tuple[Request, ...]:
    """Rows of different shapes, policies and block lengths; tiny, for they run thousands of times.

    Prompt only; blocks of one; a suffix and frozen tokens; holes in the prompt; one long block.
    """
    mask = model_of(name).info.mask_id
    if name == "tabular":
        return (
            Request([1, 2, 1, 3], gen_length=9, block_length=4, id="plain"),
            Request([1, 2, 1, 3, 2, 4], gen_length=5, block_length=1, id="ones"),
            Request(
                [2, 2, 3, 3],
                gen_length=6,
                block_length=8,
                suffix_ids=[0, 0],
                frozen={1: 3},
                id="given",
            ),
            Request(
                [3, 1, 2, 4, mask, 1, mask], gen_length=3, block_length=2, infill=True, id="holes"
            ),
            Request([4, 3, 2, 1], gen_length=7, block_length=32, stop_at_eos=False, id="long"),
        )
    return (
        Request([3, 5, 7, 2], gen_length=9, block_length=4, id="plain"),
        Request([9], gen_length=4, block_length=1, eos="banned", id="ones"),
        Request(
            [4, 8, 15, 16, 23, 1, 2],
            gen_length=7,
            block_length=8,
            suffix_ids=[6, 11],
            frozen={2: 5, 3: 6},
            id="given",
        ),
        Request(
            [7, mask, 12, mask, mask, 3],
            gen_length=3,
            block_length=3,
            infill=True,
            eos="no_confidence",
            id="holes",
        ),
        Request([1, 2, 3], gen_length=6, block_length=32, stop_at_eos=False, id="long"),
    )


class Combination(NamedTuple):
    """One choice on every axis, by name."""

    sampler: str
    cache: str
    schedule: str
    model: str
    temperature: float = 0.0
    steps: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        given = {"temperature": self.temperature}
        return given if self.steps is None else given | {"sampler.steps": self.steps}

    @property
    def revokes(self) -> bool:
        return "revokes" in SAMPLERS.create(self.sampler).traits

    @property
    def label(self) -> str:
        return "-".join(str(part) for part in self if part is not None)


def combinations() -> list[Combination]:
    """Sampler x cache x schedule x model, greedy; sampler x cache at temperature 1.

    All of them while they are few. Beyond `MOST_COMBINATIONS` the models alternate, and if that is
    not enough each two parts still meet, the third one alternating. The sampled ones have few
    steps, where a sampler counts them, and so several tokens in a step. Parts that refuse each
    other by name are left out.
    """
    samplers, caches, schedules = SAMPLERS.names(), CACHES.names(), SCHEDULES.names()
    parts = list(product(samplers, caches, schedules))
    if len(parts) > MOST_COMBINATIONS:
        met = [(a, b, schedules[i % len(schedules)]) for i, (a, b) in pairs(samplers, caches)]
        met += [(a, caches[i % len(caches)], c) for i, (a, c) in pairs(samplers, schedules)]
        met += [(samplers[i % len(samplers)], b, c) for i, (b, c) in pairs(caches, schedules)]
        parts = sorted(set(met))
    greedy = [Combination(*part, model) for part in parts for model in MODELS if fit(*part, model)]
    if len(greedy) > MOST_COMBINATIONS:
        greedy = [
            Combination(*part, fitting[i % len(fitting)])
            for i, part in enumerate(parts)
            if (fitting := [model for model in MODELS if fit(*part, model)])
        ]
    sampled = [
        Combination(sampler, cache, "fixed", fitting[i % len(fitting)], 1.0, few_steps(sampler))
        for i, (sampler, cache) in pairs(samplers, caches)
        if (fitting := [model for model in MODELS if fit(sampler, cache, "fixed", model)])
    ]
    return greedy + sampled


def pairs(first: list[str], second: list[str]) -> list[tuple[int, tuple[str, str]]]:
    return list(enumerate(product(first, second)))


@cache
def fit(sampler: str, cache_name: str, schedule: str, model: str) -> bool:
    """Whether a decoder can be made of these; one that cannot says so when it is made."""
    try:
        Decoder(model_of(model), sampler, cache_name, schedule)
    except CapabilityError:
        return False
    return True


def few_steps(sampler: str) -> int | None:
    """A budget of steps for the samplers that have one."""
    return 4 if "steps" in {f.name for f in fields(SAMPLERS.get(sampler))} else None


EVERY_COMBINATION = pytest.mark.parametrize("case", combinations(), ids=lambda case: case.label)
EVERY_SAMPLER = pytest.mark.parametrize("sampler", SAMPLERS.names())
EVERY_CACHE = pytest.mark.parametrize("cache_name", CACHES.names())
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES.names())
EVERY_MODEL = pytest.mark.parametrize("model", list(MODELS))


class Counting:
    """A model that notes how many tokens each of its forwards had."""

    def __init__(self, inner: DiffusionLM) -> None:
        self.inner, self.info = inner, inner.info
        self.calls: list[int] = []

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, **more: Any) -> Tensor:
        assert ids.shape == positions.shape
        self.calls.append(len(ids))
        return self.inner.forward(ids, positions, attend, **more)

    def embedding(self, ids: Tensor) -> Tensor:
        return self.inner.embedding(ids)

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        return self.inner.logits(hidden, start, stop)


@dataclass(frozen=True)
class Turn:
    """A row before and after one turn, copied: `(N,)` arrays, the window it was in, its steps.

    A turn is one forward; samplers that look ahead may take several steps in it.
    """

    steps: tuple[Step, ...]
    window: Window
    tokens: np.ndarray
    masked: np.ndarray
    tokens_after: np.ndarray
    masked_after: np.ndarray

    @property
    def touched(self) -> np.ndarray:
        """Positions that its steps wrote, repeated if written twice."""
        written = [p for step in self.steps for p in step.positions + step.remasked]
        return np.array(written, dtype=int)


@dataclass
class Observed:
    """Everything seen from outside of one row's run."""

    row: Row
    tokens: np.ndarray
    turns: list[Turn] = field(default_factory=list)
    result: Generation | None = None

    @property
    def generation(self) -> Generation:
        assert self.result is not None, "the row never finished"
        return self.result


@dataclass(frozen=True)
class Run:
    """Rows in the order of their requests, and the tokens of each forward that served them."""

    rows: list[Observed]
    calls: list[int]


def decoder_of(case: Combination, *, seed: int = 0, batch: int = 3, **more: Any) -> Decoder:
    """A decoder with its checks on, over a model that counts its forwards."""
    return Decoder(
        Counting(model_of(case.model)),
        case.sampler,
        case.cache,
        case.schedule,
        options=case.options,
        seed=seed,
        max_batch_size=batch,
        debug=True,
        **more,
    )


def observe(decoder: Decoder, requests: Sequence[Request]) -> Run:
    """Decode through the engine itself, copying every row before and after each of its turns."""
    model = decoder.model
    calls: list[int] = []
    if isinstance(model, Counting):
        model.calls = calls
    rows = [make_row(r, model.info, decoder.parts.schedule, decoder.seed) for r in requests]
    seen = {id(row): Observed(row, row.tokens.copy()) for row in rows}
    before = {id(row): _copied(row) for row in rows}
    for row, result in decoder.engine.run(rows):
        watched, (window, tokens, masked) = seen[id(row)], before[id(row)]
        before[id(row)] = _copied(row)
        steps = tuple(row.steps[sum(len(turn.steps) for turn in watched.turns) :])
        after = row.tokens.copy(), row.masked.copy()
        watched.turns.append(Turn(steps, window, tokens, masked, *after))
        watched.result = result
    return Run([seen[id(row)] for row in rows], calls)


def _copied(row: Row) -> tuple[Window, np.ndarray, np.ndarray]:
    return row.window, row.tokens.copy(), row.masked.copy()


@cache
def together(case: Combination) -> Run:
    """All requests of the model at once, in a batch smaller than their number.

    Rows leave and others enter while the rest go on.
    """
    return _tried(case, requests_of(case.model), 3)


@cache
def alone(case: Combination) -> tuple[Run, ...]:
    """Each request by itself."""
    return tuple(_tried(case, [request], 1) for request in requests_of(case.model))


def _tried(case: Combination, requests: Sequence[Request], batch: int) -> Run:
    try:
        return observe(decoder_of(case, batch=batch), requests)
    except CapabilityError as error:
        if case.model == "tabular" and "not embeddings" in str(error):
            pytest.skip("a tabular model has no embeddings")
        raise


def outcome(result: Generation) -> tuple[Any, ...]:
    """What must not depend on the batch: ids, tokens and places of every step, forwards, cost."""
    trace = result.trace
    steps = [(step.positions, step.tokens, step.remasked) for step in trace.steps]
    costs = dict(trace.forwards_by_kind), trace.computed_positions
    return result.ids, result.canvas, result.finish_reason, result.tokens, steps, costs


def text_of(run: Run) -> list[tuple[int, ...]]:
    """The decoded rows, whole."""
    return [seen.generation.canvas for seen in run.rows]
