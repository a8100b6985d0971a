"""Samplers over the reference network take the published decisions, turn by turn.

A plain loop over full forwards stands in for the engine, so a difference here is the sampler's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.types import Canvas, Draw
from tests.golden import Case, golden_cases, golden_json, golden_path, requires_golden
from tests.reference.network import Network
from tests.unit.sampler_cases import make_canvas, output_of

pytestmark = requires_golden
LLADA, DREAM = "llada-tiny-a", "dream-tiny-a"
TIED = ("entropy_top_p", "maskgit_top_p_margin")
"""Top-p leaves one token at several positions, so that their confidences are equal: the published
topk breaks the tie in no stated order, the samplers by position."""


@cache
def network(model: str) -> Network:
    return Network(golden_path(model))


def canvas_of(
    prompt: list[int], length: int, block: int, tail: list[int], mask_id: int, vocab: int
) -> Canvas:
    """The whole row as one window, with only the first block eligible."""
    ids = torch.tensor([[*prompt, *[mask_id] * length, *tail]])
    canvas = make_canvas(masked=ids == mask_id, start=0, mask_id=mask_id, vocab_size=vocab)
    return replace(
        canvas,
        tokens=ids,
        editable=canvas.masked,
        eligible=in_block(canvas, len(prompt), block),
        blocks=torch.tensor([length // block]),
        start=torch.tensor([len(prompt)]),
    )


def in_block(canvas: Canvas, start: int, block: int) -> Tensor:
    at = canvas.positions
    return canvas.masked & (at >= start) & (at < start + block)


def trace(
    sampler: Sampler, canvas: Canvas, net: Network, block: int, draw: Draw
) -> list[list[list[int]]]:
    """Commits `[position, token]` of each turn, block after block."""
    commits: list[list[list[int]]] = []
    start, state = int(canvas.start), None
    while canvas.masked.any():
        if not canvas.eligible.any():
            start += block
            canvas = replace(canvas, eligible=in_block(canvas, start, block), step=canvas.step * 0)
            state = None if sampler.scope == "block" else state
        state = sampler.init(window(canvas, start, block, sampler)) if state is None else state
        logits = net(canvas.tokens)
        if net.is_dream:
            logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
        seen = window(canvas, start, block, sampler)
        output = output_of(sampler, canvas, logits, draw)
        decision, state = sampler.decide(seen, output, state)
        commit = decision.commit & seen.eligible
        where = commit[0].nonzero().flatten().tolist()
        commits.append([[at, int(decision.tokens[0, at])] for at in where])
        tokens = torch.where(commit, decision.tokens, canvas.tokens)
        canvas = replace(
            canvas,
            tokens=tokens,
            masked=canvas.masked & ~commit,
            eligible=canvas.eligible & ~commit,
            step=canvas.step + 1,
        )
    return commits


def window(canvas: Canvas, start: int, block: int, sampler: Sampler) -> Canvas:
    """What the sampler sees: the block, unless its scope is the canvas."""
    if sampler.scope == "canvas":
        return canvas
    inside = (canvas.positions >= start) & (canvas.positions < start + block)
    return replace(canvas, masked=canvas.masked & inside)


def published() -> list[Any]:
    """Every greedy, unguided, uncached trace of one prompt whose rule is one of these samplers."""
    files = [
        (LLADA, "decode_official_generate"),
        (LLADA, "decode_fast_dllm"),
        (LLADA, "decode_dinfer"),
        (LLADA, "decode_klass"),
        (DREAM, "decode_klass"),
        (DREAM, "decode_diffusion_generate"),
        (DREAM, "decode_rnd1_sampler"),
    ]
    found = [(model, file, case) for model, file in files for case in golden_cases(model, file)]
    return [
        pytest.param(model, file, case, id=f"{model}-{file}-{case['name']}")
        for model, file, case in found
        if is_plain(case)
    ]


def is_plain(case: Case) -> bool:
    cached = "cache" in case["decoder"]
    guided = case["settings"].get("cfg_scale", 0.0) > 0
    other = "Credit" in case["decoder"] or "Hierarchy" in case["decoder"]
    batched = len(case["prompt_ids"]) > 1
    return not (cached or guided or other or batched or case["name"] in TIED)


def sampler_of(case: Case) -> Sampler:
    s, decoder = case["settings"], case["decoder"]
    steps = {"steps": s.get("steps", s.get("num_steps"))}
    if "rnd1" in decoder:
        bound = {"order_by": "confidence", "gamma": s["eb_gamma"]}
        return SAMPLERS.create(*(("entropy_bound", bound) if s["eb_gamma"] else ("entropy", steps)))
    if s.get("alg") == "klass":
        return klass(s, steps, "ge" if "dream" in decoder else "gt")
    if "klass" in decoder:
        return SAMPLERS.create("margin" if s["alg"] == "topk_margin" else "llada", steps)
    if "dream" in decoder:
        return SAMPLERS.create("dream", steps | {k: s[k] for k in ("alg", "alg_temp", "eps")})
    if s.get("factor"):
        return SAMPLERS.create("factor", {"factor": s["factor"], "last_rank_quirk": True})
    if s.get("threshold"):
        relative = "dinfer.Threshold" in decoder
        options = {"threshold": s["threshold"], "relative_to_best": relative}
        return SAMPLERS.create("threshold", options)
    return SAMPLERS.create("llada", steps)


def klass(settings: dict[str, Any], steps: dict[str, int], comparison: str) -> Sampler:
    names = ("conf_threshold", "kl_threshold", "kl_history_length", "unmask_strategy")
    options: dict[str, Any] = {name: settings[name] for name in names}
    # Dream's loop falls back to one token, whatever `steps` is.
    budget = steps if comparison == "gt" else {}
    return SAMPLERS.create(
        "klass", options | budget | {"comparison": comparison, "history": "canvas"}
    )


@pytest.mark.parametrize(("model", "file", "case"), published())
def test_published_trace(model: str, file: str, case: Case) -> None:
    """Same positions and tokens in every forward that decided something."""
    net, settings, prompt = network(model), case["settings"], case["prompt_ids"][0]
    mask_id = golden_json(model, file)["mask_token_id"]
    length = settings.get("gen_length") or settings.get("max_new_tokens")
    length = length or settings["seq_len"] - len(prompt) - 1
    # RND1's row ends in one more fixed position; it is not masked, and its id is given.
    tail = [settings["pad_token_id"]] if "seq_len" in settings else []
    block = settings.get("block_length", length)
    canvas = canvas_of(prompt, length, block, tail, mask_id, net.head.shape[0])
    draw = Draw(top_p=settings.get("top_p"), top_k=settings.get("top_k"))
    written = [commits for commits in case["commits"] if commits]
    ours = trace(sampler_of(case), canvas, net, block, draw)
    if case.get("masks_left"):
        ours = ours[: len(written)]
    assert ours == written
