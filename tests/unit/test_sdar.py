"""SDAR: the published layout and loops, and exact caching under block-causal attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlm_decode.api import Decoder, default_schedule, load
from dlm_decode.caches import CACHES, RowView
from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.loading import find_family
from dlm_decode.models.sdar import SDAR, SDARMoE
from dlm_decode.models.toy import random_llada, random_sdar
from dlm_decode.samplers import Sampler
from dlm_decode.schedules import Window
from dlm_decode.types import Canvas, Decision, Output, Request
from tests.golden import Case, golden_cases, golden_path, requires_golden
from tests.support import attention, row_positions
from tests.unit.test_golden_decode import steps_of

NAME = "sdar-tiny-a"


def block_attend(length: int, block: int) -> Any:
    """One row of `length`, each position seeing its own block and those before it."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ends = [min((i // block + 1) * block, length) for i in range(length)]
        return torch.cat([attention(q[i : i + 1], k[:e], v[:e]) for i, e in enumerate(ends)])

    return attend


@requires_golden
@pytest.mark.parametrize("block", [4, 8])
def test_published_weights_give_the_published_logits(block: int) -> None:
    model = load(golden_path(NAME), dtype=torch.float32).model
    tensors = load_file(golden_path(NAME, "forward.safetensors"))
    for row, ids in enumerate(tensors[f"block{block}.input_ids"]):
        hidden = model.forward(ids, row_positions([len(ids)]), block_attend(len(ids), block))
        for ours, name in ((hidden, "final_hidden"), (model.logits(hidden), "logits")):
            expected = tensors[f"block{block}.{name}"][row]
            torch.testing.assert_close(ours, expected, atol=5e-4, rtol=0)


@requires_golden
@pytest.mark.parametrize("cache", ["none", "block_causal"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c["name"]) for c in golden_cases(NAME, "decode_sdar_generate")]
)
def test_sequential_strategy(case: Case, cache: str) -> None:
    """`sequential` is left_to_right with the block's length shared over its denoising steps.

    Our forwards are the denoising ones: prefill and storing are fused with them.
    """
    s = case["settings"]
    prompt, final = case["prompt_ids"][0], case["final_ids"][0]
    blocks = len(final) // s["block_length"] - len(prompt) // s["block_length"]
    options = {"steps": s["denoising_steps"] * blocks, "whole_blocks": True}
    check(case, "left_to_right", cache, options, stores=blocks)


@requires_golden
@pytest.mark.parametrize("cache", ["none", "block_causal"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c["name"])
        for c in golden_cases(NAME, "decode_freedave")
        if "draft_steps" not in c["settings"]
    ],
)
def test_freedave_plain_runs(case: Case, cache: str) -> None:
    """`low_confidence_static` is llada, `low_confidence_dynamic` threshold with a strict >."""
    s = case["settings"]
    blocks = len(case["final_ids"][0]) // s["block_length"] - (
        len(case["prompt_ids"][0]) // s["block_length"]
    )
    if s["confidence_threshold"] is not None:
        options = {"threshold": s["confidence_threshold"], "strict": True}
        check(case, "threshold", cache, options, stores=blocks)
    elif s["alg_temp"] == -1:
        check(case, "left_to_right", cache, {}, stores=blocks)
    else:
        check(case, "llada", cache, {}, stores=blocks)


@requires_golden
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c["name"])
        for c in golden_cases(NAME, "decode_freedave")
        if "draft_steps" in c["settings"]
    ],
)
def test_freedave_drafts_are_lossless(case: Case) -> None:
    """Speculation through the block-causal cache gives the published tokens, in fewer forwards."""
    prompt, final = case["prompt_ids"][0], case["final_ids"][0]
    request = request_of(case)
    options = {"max_states": case["settings"]["draft_steps"]}
    decoder = Decoder(
        load(golden_path(NAME), dtype=torch.float32),
        "self_speculative+llada",
        "block_causal",
        options=options,
        debug=True,
    )
    result = decoder.generate(request)[0]
    assert list(result.canvas) == final
    assert result.forwards < len(final) - len(prompt)
    assert result.forwards <= case["nfe"]


def request_of(case: Case) -> Request:
    prompt, final = case["prompt_ids"][0], case["final_ids"][0]
    block = case["settings"]["block_length"]
    return Request(
        prompt, gen_length=len(final) - len(prompt), block_length=block, stop_at_eos=False
    )


def check(case: Case, sampler: str, cache: str, options: dict[str, Any], *, stores: int) -> None:
    model = load(golden_path(NAME), dtype=torch.float32)
    decoder = Decoder(model, sampler, cache, options=options, debug=True)
    result = decoder.generate(request_of(case))[0]
    assert list(result.canvas) == case["final_ids"][0]
    prefill = 1
    assert result.forwards == case["nfe"] - prefill - stores
    if "trajectory_step_map" in case:
        first = len(case["prompt_ids"][0])
        written = {p - first: i for i, step in enumerate(steps_of(result)) for p, _ in step}
        assert [written[i] for i in range(len(written))] == case["trajectory_step_map"]


# ------------------------------------------------------------------------------- exact caching

MODEL = random_sdar(3, dtype=torch.float64, hidden=16, heads=2, kv_heads=1, vocab=32)
REQUESTS = [
    Request([3, 5, 7, 2, 9], gen_length=13, id="tail"),
    Request([1] * 9, gen_length=7, block_length=8, suffix_ids=[3, 4], id="suffix"),
    Request([4, 4], gen_length=10, block_length=3, stop_at_eos=False, id="short"),
    Request([6] * 8, gen_length=6, block_length=4, frozen={1: 5}, id="frozen"),
]


class Noting(Sampler):
    """Commits the best position and notes logits of all eligible ones (tests only)."""

    notes: list[tuple[Canvas, Output]]

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logits"})

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        self.notes.append((canvas, output))
        return Decision(output.top1, canvas.eligible & False), state


def noted(cache: str, schedule: str, model: Backbone, cfg_scale: float) -> list[Tensor]:
    sampler = Noting()
    object.__setattr__(sampler, "notes", [])
    decoder = Decoder(
        model, sampler, cache, schedule, cfg_scale=cfg_scale, max_batch_size=2, debug=True
    )
    decoder.generate(REQUESTS)
    return [output.logits[canvas.eligible] for canvas, output in sampler.notes]


@pytest.mark.parametrize("cfg_scale", [0.0, 1.0])
@pytest.mark.parametrize("schedule", ["absolute_aligned", "fixed"])
def test_cached_logits_are_those_of_full_block_causal_forwards(
    schedule: str, cfg_scale: float
) -> None:
    """In every turn of ragged rows, whether or not windows lie on the attention's blocks."""
    cached = noted("block_causal", schedule, MODEL, cfg_scale)
    full = noted("none", schedule, MODEL, cfg_scale)
    assert len(cached) == len(full) > 10
    for ours, theirs in zip(cached, full, strict=True):
        assert ours.shape == theirs.shape and len(ours)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_the_engine_forwards_what_the_plain_loop_does() -> None:
    """Logits of a full forward through the engine against one SDPA call per position."""
    request = REQUESTS[0]
    ids = torch.tensor([*request.prompt_ids, *[MODEL.info.mask_id] * request.gen_length])
    plain = MODEL.logits(MODEL.forward(ids, torch.arange(len(ids)), block_attend(len(ids), 4)))
    sampler = Noting()
    object.__setattr__(sampler, "notes", [])
    Decoder(MODEL, sampler, "none").generate(request)
    canvas, output = sampler.notes[0]
    expected = plain[canvas.positions[canvas.eligible]]
    kept = torch.arange(MODEL.info.vocab_size) != MODEL.info.mask_id
    ours = output.logits[canvas.eligible]
    torch.testing.assert_close(ours[:, kept], expected[:, kept], rtol=0, atol=1e-10)


def test_each_block_is_computed_while_open_and_once_more() -> None:
    """Positions per forward: the prompt comes with the first block, a finished block with the next;
    nothing right of the window is ever computed."""
    request = Request([3] * 8, gen_length=12, stop_at_eos=False)
    result = Decoder(MODEL, "llada", "block_causal", debug=True).generate(request)[0]
    assert result.forwards == 12
    assert result.trace.computed_positions == (8 + 4) + 3 * 4 + 2 * (8 + 3 * 4)


def test_the_plan_reaches_back_to_the_first_outdated_block() -> None:
    policy = CACHES.create("block_causal")
    blocks, stale = np.arange(20) // 4, np.zeros(20, dtype=bool)
    view = RowView(20, Window(12, 16), np.arange(20) >= 12, 0, -1, 0, (), blocks, stale)
    assert policy.plan(view).query.tolist() == list(range(12, 16))
    stale[9] = True
    assert policy.plan(view).query.tolist() == list(range(8, 16))
    assert policy.plan(view).stop == 16


def test_a_shifted_model_reads_one_position_earlier() -> None:
    policy = CACHES.create("block_causal")
    blocks, stale = np.arange(20) // 4, np.zeros(20, dtype=bool)
    view = RowView(20, Window(12, 16), np.arange(20) >= 12, 0, -1, 1, (), blocks, stale)
    assert policy.plan(view).query.tolist() == list(range(11, 16))


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("cache", ["dual", "prefix"])
def test_caches_for_full_attention_are_refused_with_the_exact_one_named(cache: str) -> None:
    with pytest.raises(CapabilityError, match="take cache block_causal, which is exact"):
        Decoder(MODEL, cache=cache)


def test_the_block_causal_cache_is_refused_for_full_attention() -> None:
    with pytest.raises(CapabilityError, match="its attention looks right"):
        Decoder(random_llada(0), cache="block_causal")


def test_blocks_from_position_0_are_the_default() -> None:
    assert default_schedule(MODEL.info) == "absolute_aligned"
    assert default_schedule(random_llada(0).info) == "fixed"
    decoder = Decoder(MODEL, "left_to_right")
    frames = list(decoder.stream(Request([1] * 6, gen_length=4, stop_at_eos=False)))
    assert len(frames) == 4


def test_the_mixture_of_experts_is_not_taken_for_the_dense_model() -> None:
    config = {"model_type": "sdar", "num_experts": 128, "architectures": ["SDARMoeForCausalLM"]}
    for kind in ("sdar", "sdar_moe"):
        assert find_family(config | {"model_type": kind}) is SDARMoE
    assert find_family(config | {"num_experts": None}) is SDAR


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(CheckpointError, match="multiple of 3"):
        random_sdar(0, heads=4, kv_heads=3)
