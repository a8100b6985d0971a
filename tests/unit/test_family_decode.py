"""The published decode loops of the families beyond LLaDA, Dream and SDAR, on tiny checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from dlm_decode.api import Decoder
from dlm_decode.caches import RowPlan, RowView
from dlm_decode.caches.sub_block import SubBlock
from dlm_decode.models.published import Family
from dlm_decode.types import Generation, Request
from tests.families import golden_model
from tests.golden import Case, golden_cases, requires_golden
from tests.unit.test_golden_decode import rows_of, steps_of, written

pytestmark = requires_golden


def cases(name: str, what: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in golden_cases(name, f"decode_{what}")]


def canvases(result: Generation, prompt: list[int], length: int, mask: int) -> list[list[int]]:
    """The row before the first step and after each one, whole."""
    row = [*prompt, *[mask] * length]
    states = [list(row)]
    for step in steps_of(result):
        for position, token in step:
            row[position] = token
        states.append(list(row))
    return states


# ------------------------------------------------------------------------------------------ a2d

A2D = "a2d-qwen3-tiny-a"


def decode_a2d(model: Family, case: Case, steps: int, cache: str = "none") -> list[Generation]:
    s = case["settings"]
    options = {"steps": steps, "split": "rounded"}
    decoder = Decoder(model, "llada", cache, options=options, cfg_scale=s["cfg_scale"], debug=True)
    length, block = s["max_new_tokens"], s["block_size"]
    return decoder.generate(
        [
            Request(prompt, gen_length=length, block_length=block, stop_at_eos=False)
            for prompt in case["prompts"]
        ]
    )


@pytest.mark.parametrize("case", cases(A2D, "dllm_mdlm"))
def test_dllm_mdlm(case: Case) -> None:
    """Short rows are padded on the right with ends of text, which nothing attends to."""
    results = decode_a2d(golden_model(A2D), case, case["settings"]["steps"])
    for row, (prompt, result) in enumerate(zip(case["prompts"], results, strict=True)):
        states = canvases(result, prompt, len(result.canvas) - len(prompt), 310)
        assert states == [canvas[row][: len(states[0])] for canvas in case["canvases"]]
    assert results[0].forwards == case["nfe"]


@pytest.mark.parametrize("cache", ["none", "block_causal"])
@pytest.mark.parametrize("case", cases(A2D, "dllm_bd3lm"))
def test_dllm_bd3lm(case: Case, cache: str) -> None:
    """Prompts are padded on the left to whole blocks: blocks that end where the prompt does.

    The published loop computes what lies before a block in a forward of its own; ours with it.
    """
    s = case["settings"]
    block, length = s["block_size"], s["max_new_tokens"]
    blocks = length // block
    steps = s.get("steps_per_block", block) * blocks
    results = decode_a2d(golden_model(A2D, block=block), case, steps, cache)
    for row, (prompt, result) in enumerate(zip(case["prompts"], results, strict=True)):
        states = canvases(result, prompt, length, 310)
        pads = len(case["final_ids"][row]) - len(states[0])
        theirs = [canvas[row][pads:] for canvas in case["canvases"]]
        assert states[-1] == case["final_ids"][row][pads:]
        for ours, canvas in zip(states[1:], theirs[1:], strict=True):
            assert ours[: len(canvas)] == canvas
    lanes = 2 if s["cfg_scale"] else 1
    assert results[0].forwards == case["nfe"] // lanes - blocks


# ------------------------------------------------------------------------------------ LLaDA-MoE


@pytest.mark.parametrize("case", cases("lladamoe-tiny-a", "official_generate"))
def test_llada_moe_official_generate(case: Case) -> None:
    s = case["settings"]
    decoder = Decoder(
        golden_model("lladamoe-tiny-a"), "llada", options={"steps": s["steps"]}, debug=True
    )
    length, block = s["gen_length"], s["block_length"]
    results = decoder.generate(
        [
            Request(prompt, gen_length=length, block_length=block, stop_at_eos=False)
            for prompt in rows_of(case)
        ]
    )
    assert [list(result.canvas) for result in results] == case["final_ids"]
    if len(results) == 1:
        assert steps_of(results[0]) == written(case)
    assert results[0].forwards == case["nfe"]


# --------------------------------------------------------------------------------------- LLaDA2


def decode_llada2(case: Case, cache: str, sampler: str, options: dict[str, Any]) -> Generation:
    """The published loop decodes whole blocks and then cuts off what is beyond `gen_length`."""
    s, (prompt,) = case["settings"], case["prompt_ids"]
    whole = -(-(len(prompt) + s["gen_length"]) // s["block_length"]) * s["block_length"]
    request = Request(
        prompt,
        gen_length=whole - len(prompt),
        block_length=s["block_length"],
        stop_at_eos=False,
    )
    decoder = Decoder(golden_model("llada2-tiny-a"), sampler, cache, options=options, debug=True)
    return decoder.generate(request)[0]


@pytest.mark.parametrize("cache", ["none", "block_causal"])
@pytest.mark.parametrize("case", cases("llada2-tiny-a", "llada2_generate"))
def test_llada2_generate(case: Case, cache: str) -> None:
    s = case["settings"]
    options = {"threshold": s["threshold"], "strict": True, "denoising_steps": s["steps"]}
    result = decode_llada2(case, cache, "threshold", options)
    assert generated(case, result) == case["final_ids"][0]
    assert result.forwards == case["nfe"]
    assert_canvases(case, result)


def generated(case: Case, result: Generation) -> list[int]:
    start = len(case["prompt_ids"][0])
    return list(result.canvas[start : start + case["settings"]["gen_length"]])


def assert_canvases(case: Case, result: Generation) -> None:
    """What each published forward was given of the generated region, up to the window's end."""
    prompt = case["prompt_ids"][0]
    states = canvases(result, prompt, len(result.canvas) - len(prompt), 310)
    for ours, theirs in zip(states, case["canvases"], strict=False):
        assert ours[len(prompt) :][: len(theirs)] == theirs


@pytest.mark.parametrize("cache", ["none", "block_causal"])
@pytest.mark.parametrize("case", cases("llada2-tiny-a", "llada21_generate"))
def test_llada21_generate(case: Case, cache: str) -> None:
    """Edits among masks and, turn by turn, those of full blocks.

    The published loop looks once at every full block even if it may edit nothing; ours does not.
    """
    s = case["settings"]
    names = ("threshold", "editing_threshold", "max_post_steps", "num_to_transfer")
    result = decode_llada2(case, cache, "edit", {name: s[name] for name in names if name in s})
    assert generated(case, result) == case["final_ids"][0]
    if s["editing_threshold"] >= 1:
        assert result.forwards < case["nfe"]
        return
    assert result.forwards == case["nfe"]
    assert_canvases(case, result)


# --------------------------------------------------------------------------------- Fast-dLLM v2

V2 = "fastdllm2-tiny-a"


def decode_v2(case: Case, cache: str) -> list[Generation]:
    """The published loop decodes whole blocks, and one token more from the last of them."""
    s = case["settings"]
    block, prompts = s["block_size"], case["prompts"]
    blocks = s["max_new_tokens"] // block + max(map(len, prompts)) // block
    requests = [
        Request(prompt, gen_length=blocks * block + 1 - len(prompt), block_length=block)
        for prompt in prompts
    ]
    options = {
        "threshold": s["threshold"],
        "strict": True,
        "schedule.sub_length": s["small_block_size"],
    }
    model = golden_model(V2, block=block, mask=s["mask_id"])
    decoder = Decoder(model, "threshold", cache, "sub_blocks", options=options, debug=True)
    return decoder.generate(requests)


@pytest.mark.parametrize("case", cases(V2, "fast_dllm_v2"))
def test_fast_dllm_v2_batch_sample(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published forward that stores the prompt and decides nothing is part of ours."""
    s, prompts = case["settings"], case["prompts"]
    computed: list[int] = []
    plain = SubBlock.plan

    def noted(self: SubBlock, row: RowView) -> RowPlan:
        plan = plain(self, row)
        computed.append(len(plan.query))
        return plan

    monkeypatch.setattr(SubBlock, "plan", noted)
    caches = ("sub_block",) if s["use_block_cache"] else ("none", "block_causal")
    for cache in caches:
        results = decode_v2(case, cache)
        stopped = False
        for result, final in zip(results, case["final_ids"], strict=True):
            stopped = s["stop_token"] in final
            until = final.index(s["stop_token"]) + 1 if stopped else len(final)
            assert list(result.canvas[:until]) == final[:until]
        if len(prompts) > 1 or stopped:
            assert max(r.forwards for r in results) < case["nfe"]
            continue
        length, block = len(prompts[0]), s["block_size"]
        assert results[0].forwards == case["nfe"] - (length > block and length % block > 0)
        if cache == "sub_block":
            short = sum(query < block for _, query in case["forwards"])
            assert sum(count < block for count in computed) == short > 0


def test_the_sub_block_cache_is_an_approximation() -> None:
    """Negative control: the same rows decoded without it differ in some of the fixtures."""
    cached = [
        c for c in golden_cases(V2, "decode_fast_dllm_v2") if c["settings"]["use_block_cache"]
    ]
    made = [
        [decode_v2(case, cache)[0].canvas for case in cached] for cache in ("none", "sub_block")
    ]
    assert made[0] != made[1]
