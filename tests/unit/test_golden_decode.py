"""The engine reproduces the published decode loops on tiny checkpoints, commit by commit.

Forwards equal the reference's minus its idle ones (calls after which nothing was written).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from dlm_decode.api import Decoder, load
from dlm_decode.models.loading import LoadedModel
from dlm_decode.types import Generation, Request
from tests.golden import golden_cases, golden_path, requires_golden

Case = dict[str, Any]
pytestmark = requires_golden


@cache
def model(name: str) -> LoadedModel:
    return load(golden_path(name), dtype=torch.float32)


def cases(name: str, what: str) -> list[Any]:
    found = golden_cases(name, f"decode_{what}")
    return [pytest.param(case, id=case["name"]) for case in found]


def rows_of(case: Case) -> list[list[int]]:
    """The prompts without their padding, one list a row."""
    rows = case["prompt_ids"]
    rows = rows if isinstance(rows[0], list) else [rows]
    masks = case.get("attention_mask") or [[1] * len(row) for row in rows]
    return [
        [token for token, keep in zip(row, mask, strict=True) if keep]
        for row, mask in zip(rows, masks, strict=True)
    ]


def decode(
    name: str,
    case: Case,
    length: int,
    block: int,
    *,
    cfg_scale: float = 0.0,
    frozen: Mapping[int, int] | None = None,
    **method: Any,
) -> list[Generation]:
    decoder = Decoder(model(name), cfg_scale=cfg_scale, debug=True, **method)
    requests = [
        Request(row, gen_length=length, block_length=block, stop_at_eos=False, frozen=frozen or {})
        for row in rows_of(case)
    ]
    return decoder.generate(requests)


def written(case: Case) -> list[list[list[int]]]:
    """What each forward wrote, idle forwards left out."""
    return [sorted(commits) for commits in case["commits"] if commits]


def steps_of(result: Generation) -> list[list[list[int]]]:
    return [
        sorted([p, t] for p, t in zip(step.positions, step.tokens, strict=True))
        for step in result.trace.steps
    ]


def check(case: Case, results: list[Generation], length: int) -> None:
    final = case["final_ids"]
    final = final if isinstance(final[0], list) else [final]
    assert [list(r.ids) for r in results] == [row[-length:] for row in final]
    if len(results) == 1:
        assert steps_of(results[0]) == written(case)
    assert results[0].forwards == len(written(case))


@pytest.mark.parametrize("case", cases("llada-tiny-a", "official_generate"))
def test_llada_official_generate(case: Case) -> None:
    s = case["settings"]
    options = {"steps": s["steps"], "remasking": s["remasking"]}
    length, block = s["gen_length"], s["block_length"]
    results = decode(
        "llada-tiny-a",
        case,
        length,
        block,
        cfg_scale=s["cfg_scale"],
        sampler="llada",
        options=options,
    )
    check(case, results, length)


@pytest.mark.parametrize("case", cases("llada-tiny-a", "fast_dllm"))
def test_fast_dllm_on_llada(case: Case) -> None:
    s = case["settings"]
    cache_name = case["name"].split("_")[0].replace("generate", "none")
    if s.get("threshold") is not None:
        method = {"sampler": "threshold", "options": {"threshold": s["threshold"]}}
    elif s.get("factor") is not None:
        options = {"factor": s["factor"], "last_rank_quirk": True}
        method = {"sampler": "factor", "options": options}
    else:
        method = {"sampler": "llada", "options": {"steps": s["steps"]}}
    results = decode(
        "llada-tiny-a", case, s["gen_length"], s["block_length"], cache=cache_name, **method
    )
    check(case, results, s["gen_length"])


TIED = {"entropy_top_p", "maskgit_top_p_margin"}
"""Cases whose certainties tie exactly (top-p leaves one token): the reference's order among them is
that of torch.topk, which promises none. Ours is position ascending, see the test below."""


@pytest.mark.parametrize("case", cases("dream-tiny-a", "diffusion_generate"))
def test_dream_diffusion_generate(case: Case) -> None:
    s = case["settings"]
    names = ("steps", "alg", "eps", "alg_temp", "top_p", "top_k", "temperature")
    options = {name: s[name] for name in names if s[name] is not None}
    length = s["max_new_tokens"]
    results = decode("dream-tiny-a", case, length, length, sampler="dream", options=options)
    if case["name"] not in TIED:
        check(case, results, length)
        return
    assert results[0].forwards == len(written(case))
    ours, theirs = steps_of(results[0])[0], written(case)[0]
    assert len(ours) == len(theirs)
    assert ours[0][0] < theirs[0][0], "the first of the tied positions comes first"
    certainty = results[0].trace.steps[0].confidence[0]
    assert certainty == pytest.approx(0.0 if s["alg"] == "entropy" else 1.0, abs=1e-6)


@pytest.mark.parametrize("case", cases("dream-tiny-a", "fast_dllm"))
def test_fast_dllm_on_dream(case: Case) -> None:
    s = case["settings"]
    cache_name = case["name"].split("_")[0].replace("nocache", "none")
    length = s["max_new_tokens"]
    if s["alg"] == "entropy":
        method: dict[str, Any] = {"sampler": "dream", "options": {"steps": s["steps"]}}
    else:
        method = {"sampler": "threshold", "options": {"threshold": s["threshold"]}}
        if cache_name == "none":
            method["options"]["steps"] = s["steps"]
    if cache_name != "none":
        method["options"]["compat"] = "fast-dllm"
    block = s.get("block_length", length)
    results = decode("dream-tiny-a", case, length, block, cache=cache_name, **method)
    check(case, results, length)


@pytest.mark.parametrize("case", cases("dream-tiny-a", "klass"))
def test_klass_on_dream(case: Case) -> None:
    s = case["settings"]
    names = ("steps", "conf_threshold", "kl_threshold", "kl_history_length", "unmask_strategy")
    options = {name: s[name] for name in names} | {"comparison": "ge"}
    options["steps"] = None  # the published fallback is one token, whatever the steps
    length = s["max_new_tokens"]
    results = decode("dream-tiny-a", case, length, length, sampler="klass", options=options)
    if case["masks_left"]:
        # The published loop stops when its steps run out and leaves masks: only its steps compare.
        assert steps_of(results[0])[: len(written(case))] == written(case)
        assert len(results[0].ids) == length
        return
    check(case, results, length)


@pytest.mark.parametrize("case", cases("llada-tiny-a", "klass"))
def test_klass_on_llada(case: Case) -> None:
    s = case["settings"]
    sampler = {"klass": "klass", "default": "llada", "topk_margin": "margin"}[s["alg"]]
    options: dict[str, Any] = {"steps": s["steps"]}
    if sampler == "klass":
        names = ("conf_threshold", "kl_threshold", "kl_history_length", "unmask_strategy")
        options |= {name: s[name] for name in names} | {"comparison": "gt", "history": "canvas"}
    results = decode(
        "llada-tiny-a", case, s["gen_length"], s["block_length"], sampler=sampler, options=options
    )
    check(case, results, s["gen_length"])


@pytest.mark.parametrize("case", cases("dream-tiny-a", "rnd1_sampler"))
def test_rnd1_sampler(case: Case) -> None:
    """RND1 keeps one trailing pad outside the region to fill: a frozen suffix here."""
    s = case["settings"]
    prompt = rows_of(case)[0]
    length = s["seq_len"] - len(prompt) - 1
    if s["eb_gamma"] is None:
        method: dict[str, Any] = {"sampler": "entropy", "options": {"steps": s["num_steps"]}}
    else:
        options = {"gamma": s["eb_gamma"], "order_by": "confidence"}
        method = {"sampler": "entropy_bound", "options": options}
    request = Request(
        prompt,
        gen_length=length,
        block_length=length,
        suffix_ids=[s["pad_token_id"]],
        stop_at_eos=False,
    )
    result = Decoder(model("dream-tiny-a"), debug=True, **method).generate(request)[0]
    assert steps_of(result) == written(case)
