"""Decoding with wrapped samplers on tiny models, for the tests of wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dlm_decode.api import Decoder, load
from dlm_decode.models import DiffusionLM
from dlm_decode.models.loading import LoadedModel
from dlm_decode.models.toy import random_llada
from dlm_decode.samplers import Sampler
from dlm_decode.types import Canvas, Draw, Generation, Output, Request
from tests.golden import Case, golden_path
from tests.unit.sampler_cases import GREEDY, output_of


@cache
def golden_model() -> LoadedModel:
    return load(golden_path("llada-tiny-a"), dtype=torch.float32)


@cache
def toy(seed: int = 0) -> DiffusionLM:
    """A random LLaDA in fp64, where a row's numbers are the same alone and in any batch."""
    return random_llada(seed, hidden=16, heads=2, vocab=32, dtype=torch.float64)


def ragged_requests(*, stop_at_eos: bool = False) -> list[Request]:
    """Rows of different prompts, lengths and blocks."""
    return [
        Request([3, 5, 7, 2], gen_length=9, block_length=4, stop_at_eos=stop_at_eos),
        Request([9, 1], gen_length=8, block_length=8, stop_at_eos=stop_at_eos),
        Request([4, 8, 15], gen_length=7, block_length=3, frozen={1: 5}, stop_at_eos=stop_at_eos),
    ]


def decode(
    sampler: str | Sampler,
    requests: Request | Sequence[Request] | None = None,
    *,
    model: DiffusionLM | None = None,
    cache: str = "none",
    schedule: str = "fixed",
    batch: int = 8,
    **options: Any,
) -> list[Generation]:
    decoder = Decoder(
        model or toy(),
        sampler,
        cache,
        schedule,
        options={name.replace("__", "."): value for name, value in options.items()},
        max_batch_size=batch,
        debug=True,
    )
    return decoder.generate(ragged_requests() if requests is None else requests)


def steps_of(results: Sequence[Generation]) -> list[list[list[tuple[int, int]]]]:
    """Positions and tokens of every turn of every row."""
    return [
        [sorted(zip(step.positions, step.tokens, strict=True)) for step in result.trace.steps]
        for result in results
    ]


def check_golden(case: Case, sampler: str, options: dict[str, Any]) -> None:
    """The engine takes the published decisions, forward by forward."""
    s = case["settings"]
    frozen = {int(place): token for place, token in (s.get("constraints") or {}).items()}
    request = Request(
        case["prompt_ids"][0],
        gen_length=s["gen_length"],
        block_length=s["block_length"],
        frozen=frozen,
        stop_at_eos=False,
    )
    decoder = Decoder(golden_model(), sampler, options=options, debug=True)
    result = decoder.generate(request)[0]
    published = [sorted(map(tuple, commits)) for commits in case["commits"] if commits]
    assert steps_of([result])[0] == published
    assert list(result.canvas) == case["final_ids"][0]


def probed_output(
    sampler: Sampler, canvas: Canvas, logits: Tensor, state: Any, draw: Draw = GREEDY
) -> Output:
    """What the engine would hand a sampler for these `logits (B, W, V)`, its probe included."""
    canvas = replace(canvas, draw=draw)
    output = output_of(sampler, canvas, logits, draw)
    query = sampler.query(canvas, state)
    if query is None or query.probe is None:
        return output
    banned = logits.clone()
    banned[..., canvas.mask_id] = -torch.inf
    return Output({**output.stats, "probed": banned.gather(-1, query.probe)})
