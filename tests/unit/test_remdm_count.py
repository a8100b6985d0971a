"""ReMDM on LLaDA: the authors' loop over whole forwards, position by position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.attention import Group, PackedAttention
from dlm_decode.models import DiffusionLM
from dlm_decode.models.toy import random_llada
from dlm_decode.samplers.remdm_count import RemdmCount
from dlm_decode.types import Draw
from tests.unit.sampler_cases import logits_with_top, make_canvas, output_of

PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8], [9, 9]]


def forward(model: DiffusionLM, ids: Tensor) -> Tensor:
    """Probabilities `(N, V)` of one row."""
    attend = PackedAttention((Group(0, 1, len(ids), own=True),))
    hidden = model.forward(ids, torch.arange(len(ids)), attend)
    return model.logits(hidden).double().softmax(-1)


def published(
    model: DiffusionLM, prompt: list[int], length: int, block: int, steps: int, number: int
) -> tuple[list[int], int]:
    """The authors' loop with the most probable tokens; ids and forwards that could change them."""
    x = torch.tensor([*prompt, *[model.info.mask_id] * length])
    forwards, a_step = 0, length // steps
    of_block = steps // (length // block)
    for first in range(len(prompt), len(x), block):
        inside = torch.zeros(len(x), dtype=torch.bool)
        inside[first : first + block] = True
        sure = torch.full((len(x),), torch.inf, dtype=torch.float64)
        for i in range(2 * of_block):
            extra = min(block * 7 // 8, of_block) <= i < min(block * 7 // 8, of_block) + of_block
            if extra:
                weakest = sure.topk(number, largest=False).indices
                sure[weakest], x[weakest] = torch.inf, model.info.mask_id
            masked = (x == model.info.mask_id) & inside
            p, token = forward(model, x).max(-1)
            forwards += 1
            p = p.masked_fill(~masked, -torch.inf)
            count = min(number if extra else a_step, int(masked.sum()))
            found = p.topk(count).indices
            x[found], sure[found] = token[found], p[found]
    return x[len(prompt) :].tolist(), forwards


@pytest.mark.parametrize(("block", "steps", "number"), [(8, 16, 1), (8, 16, 2), (16, 8, 3)])
def test_it_decodes_as_the_authors_loop_does(block: int, steps: int, number: int) -> None:
    model = random_llada(3, dtype=torch.float64)
    options = {"steps": steps, "remdm_number": number}
    decoder = Decoder(model, "remdm_count", options=options, max_batch_size=2)
    found = decoder.generate(PROMPTS, gen_length=16, block_length=block, stop_at_eos=False)
    for prompt, result in zip(PROMPTS, found, strict=True):
        ids, forwards = published(model, prompt, 16, block, steps, number)
        assert (list(result.ids), result.forwards) == (ids, forwards)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_extra_turns_it_is_llada(temperature: float) -> None:
    model = random_llada(5)
    plain, same = (
        Decoder(model, name, options=options, temperature=temperature).generate(
            PROMPTS, gen_length=12, block_length=6, stop_at_eos=False
        )
        for name, options in (("llada", {"steps": 8}), ("remdm_count", {"steps": 8, "extra": 0}))
    )
    assert [(r.ids, r.trace.steps) for r in plain] == [(r.ids, r.trace.steps) for r in same]


def test_a_token_taken_back_at_once_still_counts_for_the_noise() -> None:
    """Its turn commits nothing, but the next one must not draw the very same token again."""
    sampler = RemdmCount(remdm_number=2, extra=9)
    masked = torch.tensor([[True, True, False, False, False, False]])
    canvas = make_canvas(masked=masked, step=5)
    state = {"masks": torch.tensor([6]), "sure": torch.full((1, 6), 0.9, dtype=torch.float64)}
    state["sure"][masked] = torch.inf
    output = output_of(sampler, canvas, logits_with_top([0.3, 0.4, 0, 0, 0, 0]), Draw())
    decision, after = sampler.decide(canvas, output, state)
    assert not decision.commit.any() and decision.remask is not None and not decision.remask.any()
    assert decision.hold is not None and decision.hold.all()
    assert decision.commits is not None and decision.commits.tolist() == [2]
    assert after["sure"][masked].isinf().all()
