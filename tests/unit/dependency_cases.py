"""What the tests of dependency-guided samplers share: outputs with attention, and engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_decode.api import Decoder
from dlm_decode.models import DiffusionLM
from dlm_decode.models.toy import random_dream, random_llada
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.types import Canvas, Draw, Generation, Output, Request
from tests.unit.sampler_cases import GREEDY, make_canvas, output_of, random_logits

HIDDEN = 16

REQUESTS = [
    Request([5, 6, 7], gen_length=12, block_length=6, id="a", stop_at_eos=False),
    Request([9, 8, 3, 2, 1], gen_length=7, block_length=4, id="b", stop_at_eos=False),
    Request([4] * 6, gen_length=9, block_length=9, id="c", suffix_ids=(7, 8), frozen={2: 11}),
]
"""Rows of different lengths, windows and frozen spans."""


def exact_llada(seed: int = 1) -> DiffusionLM:
    return random_llada(seed, dtype=torch.float64, layers=3)


def exact_dream(seed: int = 1) -> DiffusionLM:
    return random_dream(seed, dtype=torch.float64)


def ragged(vocab_size: int = 8) -> Canvas:
    """Rows that are fresh, half decided, nearly done, done, and narrower than the window."""
    masked = torch.tensor(
        [
            [1, 1, 1, 1, 1, 1, 1],
            [0, 1, 0, 1, 1, 0, 1],
            [0, 0, 0, 1, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0],
        ]
    ).bool()
    canvas = make_canvas(masked=masked, vocab_size=vocab_size)
    return replace(canvas, step=torch.zeros(5, dtype=torch.long))


def with_states(
    sampler: Sampler,
    canvas: Canvas,
    logits: Tensor,
    *,
    attention: Tensor | None = None,
    draw: Draw = GREEDY,
    seed: int = 0,
) -> Output:
    """An output that also has attention over 10 tokens before the window and it, and states."""
    output = output_of(sampler, canvas, logits, draw)
    generator = torch.Generator().manual_seed(seed)
    rows, width = canvas.tokens.shape
    if attention is None:
        scores = 3 * torch.randn(rows, width, 10 + width, generator=generator)
        attention = scores.softmax(-1)
    hidden = torch.randn(rows, width, HIDDEN, generator=generator)
    return Output({**output.stats, "attention": attention, "hidden": hidden})


def window_attention(pairs: dict[tuple[int, int], float], width: int, before: int = 10) -> Tensor:
    """Attention `(1, W, before + W)` of window positions, where `pairs` is {(query, key): value}.

    The rest of each row goes to the position before the window.
    """
    attention = torch.zeros(1, width, before + width)
    for (query, key), value in pairs.items():
        attention[0, query, before + key] = value
    attention[..., before - 1] = 1 - attention.sum(-1)
    return attention


def check_fake(sampler: Sampler) -> None:
    """`init` and `decide` read no value: with fake tensors any read raises."""
    for draw in (GREEDY, Draw(temperature=1.0)):
        with FakeTensorMode():
            canvas = ragged()
            rows, width = canvas.tokens.shape
            state = sampler.init(canvas)
            sampler.query(canvas, state)
            output = output_of(sampler, canvas, torch.randn(rows, width, 8), draw)
            extra = {
                "attention": torch.rand(rows, width, 10 + width),
                "hidden": torch.rand(rows, width, HIDDEN),
            }
            decision, _ = sampler.decide(canvas, Output({**output.stats, **extra}), state)
        assert decision.commit.shape == (rows, width)


def check_pure(sampler: Sampler) -> None:
    """Deciding twice gives the same and changes nothing that was handed in."""
    canvas = ragged()
    output, state = with_states(sampler, canvas, random_logits(canvas)), sampler.init(canvas)
    before = [t.clone() for t in leaves((vars(canvas), dict(output.stats), state))]
    first, second = (sampler.decide(canvas, output, state) for _ in range(2))
    for a, b in zip(leaves([vars(first[0]), first[1]]), leaves([vars(second[0]), second[1]])):  # noqa: B905
        assert torch.equal(a, b)
    for was, now in zip(before, leaves((vars(canvas), dict(output.stats), state)), strict=True):
        assert torch.equal(was, now)


def check_row_alone(sampler: Sampler) -> None:
    """Neighbours, padding and what stands outside eligible positions do not change a row."""
    canvas = ragged()
    output = with_states(sampler, canvas, random_logits(canvas))
    together, _ = sampler.decide(canvas, output, sampler.init(canvas))
    for row in range(5):
        one = replace(
            canvas,
            **{k: v[row : row + 1] for k, v in vars(canvas).items() if isinstance(v, Tensor)},
        )
        stats = {k: v[row : row + 1] for k, v in output.stats.items()}
        alone, _ = sampler.decide(one, Output(stats), sampler.init(one))
        assert torch.equal(alone.commit[0], together.commit[row])
        assert torch.equal(alone.commit[0].any(), canvas.eligible[row].any())
        assert not (alone.commit & ~one.eligible).any()


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in leaves(value)]
    return [t for value in tree for t in leaves(value)] if isinstance(tree, (tuple, list)) else []


def generate(
    model: DiffusionLM,
    sampler: Sampler,
    requests: Sequence[Request] = REQUESTS,
    *,
    cache: str = "none",
    temperature: float = 0.0,
) -> list[Generation]:
    """Decoded two at a time, so that the third enters when another leaves."""
    decoder = Decoder(
        model, sampler, cache, temperature=temperature, seed=3, debug=True, max_batch_size=2
    )
    return decoder.generate(list(requests))


def check_batched_is_alone(
    model: DiffusionLM, sampler: Sampler, cache: str, temperature: float
) -> None:
    """The same tokens in the same order, whatever shares the batch, and no mask is left."""
    together = generate(model, sampler, cache=cache, temperature=temperature)
    for request, result in zip(REQUESTS, together, strict=True):
        (alone,) = generate(model, sampler, [request], cache=cache, temperature=temperature)
        assert result.ids == alone.ids
        assert order_of(result) == order_of(alone)
        assert model.info.mask_id not in alone.ids
        assert alone.finish_reason in ("length", "eos")
        assert sorted(p for step in order_of(alone) for p in step) == open_positions(request)


def order_of(result: Generation) -> list[tuple[int, ...]]:
    return [step.positions for step in result.trace.steps]


def open_positions(request: Request) -> list[int]:
    start = len(request.prompt_ids)
    return [start + i for i in range(request.gen_length) if i not in request.frozen]


def make(name: str, **options: Any) -> Sampler:
    return SAMPLERS.create(name, options)


class Laws:
    """What holds of every sampler in these files: a test class of each derives from it, and the
    file's fixture `sampler` says of which ones."""

    def test_no_host_sync(self, sampler: Sampler) -> None:
        check_fake(sampler)

    def test_pure(self, sampler: Sampler) -> None:
        check_pure(sampler)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("cache", ["none", "dual"])
    def test_batched_is_alone(self, sampler: Sampler, cache: str, temperature: float) -> None:
        check_batched_is_alone(exact_llada(), sampler, cache, temperature)

    def test_batched_is_alone_with_a_shift(self, sampler: Sampler) -> None:
        check_batched_is_alone(exact_dream(), sampler, "prefix", 0.0)


class RowLaws(Laws):
    """Laws of samplers that ask for one forward a turn and no more."""

    def test_a_row_is_decided_as_if_alone(self, sampler: Sampler) -> None:
        check_row_alone(sampler)
