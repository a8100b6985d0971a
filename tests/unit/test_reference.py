"""The reference loops reproduce every golden trace: tokens, commits, forwards and their number.

That makes them oracles: the toolkit is compared with them where no fixture exists, and the speed
benchmark takes its baseline from them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.golden import Case, golden_cases, golden_json, golden_path, requires_golden
from tests.reference import dinfer, dream, llada, lopa
from tests.reference.network import KVCache, Network, Trace, crop

pytestmark = requires_golden


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Logits of the fixtures are those of one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def network(model: str) -> Network:
    return Network(golden_path(model))


def cases(model: str, file: str) -> pytest.MarkDecorator:
    """Parametrise over a file's cases; without fixtures one stand-in, which is skipped."""
    found = golden_cases(model, file)
    names = [case.get("name", f"set{case.get('set')}") for case in found] or ["-"]
    return pytest.mark.parametrize("case", found or [{}], ids=names)


def settings_of(case: Case, *dropped: str) -> dict[str, Any]:
    return {name: value for name, value in case["settings"].items() if name not in dropped}


def prompt_of(case: Case) -> Tensor:
    return torch.tensor(case["prompt_ids"])


def mask_of(case: Case) -> Tensor | None:
    return torch.tensor(case["attention_mask"]) if "attention_mask" in case else None


def assert_reproduces(trace: Trace, case: Case) -> None:
    one_row = len(case["prompt_ids"]) == 1
    commits = [[list(c[1:] if one_row else c) for c in step] for step in trace.commits]
    assert commits == case["commits"]
    assert [list(call) for call in trace.forwards] == case["forwards"]
    assert trace.tokens.tolist() == case["final_ids"]
    assert trace.nfe == case["nfe"]


# ----------------------------------------------------------------- forwards


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", ["llada-tiny-a", "dream-tiny-a"])
def test_network_computes_the_published_logits(model: str, dtype: torch.dtype) -> None:
    tensors = load_file(golden_path(model, "forward.safetensors"))
    net = Network(golden_path(model), dtype)
    for name in [n.removesuffix(".logits") for n in tensors if n.endswith(".logits")]:
        mask = tensors.get(f"{name}.attention_mask")
        got = net(tensors[f"{name}.input_ids"], attention_mask=mask).float()
        error = (got - tensors[f"{name}.logits"]).abs()
        assert error[mask.bool() if mask is not None else ...].max() < 5e-4, name


@pytest.mark.parametrize("model", ["llada-tiny-a", "dream-tiny-a"])
def test_network_computes_the_published_cached_logits(model: str) -> None:
    """Prefix and dual calls, and the log of calls."""
    tensors = load_file(golden_path(model, "forward.safetensors"))
    net = Network(golden_path(model))
    kv: KVCache = []
    net(tensors["cached.warm_input_ids"], cache=kv)
    ids = tensors["cached.second_input_ids"]
    prefix = net(ids[:, 12:], cache=crop(kv, 12), start=12)
    dual = net(ids[:, 12:20], cache=kv, start=12)
    assert (prefix - tensors["cached.prefix_logits"]).abs().max() < 5e-4
    assert (dual - tensors["cached.dual_logits"]).abs().max() < 5e-4
    assert net.calls == [(1, 0, 36), (1, 12, 24), (1, 12, 8)]


# ----------------------------------------------------------------- LLaDA


@cases("llada-tiny-a", "decode_official_generate")
def test_llada_official_generate(case: Case) -> None:
    trace = llada.official_generate(
        network("llada-tiny-a"),
        prompt_of(case),
        attention_mask=mask_of(case),
        **settings_of(case, "batch"),
    )
    assert_reproduces(trace, case)


def llada_fast_dllm(case: Case, **changed: Any) -> Trace:
    kinds = [kind for kind in ("prefix", "dual") if f"with_{kind}" in case["decoder"]]
    options = {
        "cache": kinds[0] if kinds else "none",
        "idle_forward_quirk": "NVlabs" in case["decoder"],
        **settings_of(case),
        **changed,
    }
    return llada.fast_dllm_generate(network("llada-tiny-a"), prompt_of(case), **options)


@cases("llada-tiny-a", "decode_fast_dllm")
def test_llada_fast_dllm(case: Case) -> None:
    assert_reproduces(llada_fast_dllm(case), case)


def test_factor_fixtures_need_the_last_rank_quirk() -> None:
    """Negative control: without the flag some trace differs, so the fixtures do test it."""
    factor = [c for c in golden_cases("llada-tiny-a", "decode_fast_dllm") if "factor" in c["name"]]
    repaired = [llada_fast_dllm(case, last_rank_quirk=False) for case in factor]
    assert any(t.nfe != case["nfe"] for t, case in zip(repaired, factor, strict=True))


@pytest.mark.parametrize("kind", ["prefix", "dual"])
def test_idle_forward_quirk_adds_one_empty_call_a_block(kind: str) -> None:
    """No fixture has such a call: threshold 0 fills each block in its refresh."""
    case = golden_cases("llada-tiny-a", "decode_fast_dllm")[2]
    options = {"cache": kind, "threshold": 0.0, "block_length": 16}
    later = llada_fast_dllm(case, **options, idle_forward_quirk=False)
    first = llada_fast_dllm(case, **options, idle_forward_quirk=True)
    assert [len(step) for step in later.commits] == [16, 16]
    assert [len(step) for step in first.commits] == [16, 0, 16, 0]
    assert torch.equal(first.tokens, later.tokens)


@cases("llada-tiny-a", "decode_klass")
def test_llada_klass(case: Case) -> None:
    trace = llada.klass_generate(
        network("llada-tiny-a"),
        prompt_of(case),
        mask_id=network("llada-tiny-a").mask_id,
        **settings_of(case, "temperature"),
    )
    assert_reproduces(trace, case)
    assert case["used_steps"] == trace.nfe


def dinfer_decoder(case: Case) -> Callable[[], dinfer.Decide]:
    options = settings_of(case, "gen_length", "block_length", "mask_id")
    name = case["decoder"]
    if "Hierarchy" in name:
        return lambda: dinfer.hierarchy_decoder(**options)
    if "Credit" in name:
        return lambda: dinfer.credit_decoder(**options)
    return lambda: dinfer.threshold_decoder(**options)


@cases("llada-tiny-a", "decode_dinfer")
def test_llada_dinfer(case: Case) -> None:
    loop = {name: case["settings"][name] for name in ("gen_length", "block_length", "mask_id")}
    trace = dinfer.generate(network("llada-tiny-a"), prompt_of(case), dinfer_decoder(case), **loop)
    assert_reproduces(trace, case)


# ----------------------------------------------------------------- Dream


@cases("dream-tiny-a", "decode_diffusion_generate")
def test_dream_diffusion_generate(case: Case) -> None:
    trace = dream.diffusion_generate(
        network("dream-tiny-a"),
        prompt_of(case),
        attention_mask=mask_of(case),
        **settings_of(case),
    )
    assert_reproduces(trace, case)


@cases("dream-tiny-a", "decode_fast_dllm")
def test_dream_fast_dllm(case: Case) -> None:
    net, prompt = network("dream-tiny-a"), prompt_of(case)
    if "block" in case["decoder"]:
        options = settings_of(case, "temperature", "alg_temp")
        trace = dream.fast_dllm_generate_block(net, prompt, **options)
    elif case["settings"]["alg"] == "entropy":
        trace = dream.diffusion_generate(net, prompt, **settings_of(case))
    else:
        options = settings_of(case, "temperature", "alg_temp", "alg", "eps")
        trace = dream.fast_dllm_generate(net, prompt, **options)
    assert_reproduces(trace, case)


@cases("dream-tiny-a", "decode_klass")
def test_dream_klass(case: Case) -> None:
    """`used_steps` is not compared: the reference reports 256 when its loop runs to the end."""
    options = settings_of(case, "temperature", "alg")
    trace = dream.klass_generate(network("dream-tiny-a"), prompt_of(case), **options)
    assert_reproduces(trace, case)


@cases("dream-tiny-a", "decode_rnd1_sampler")
def test_rnd1_sampler(case: Case) -> None:
    options = settings_of(case, "temperature", "greedy", "top_k", "eos_token_id")
    trace = dream.rnd1_generate(network("dream-tiny-a"), prompt_of(case), **options)
    assert_reproduces(trace, case)


# ----------------------------------------------------------------- rules on given logits


def positions(chosen: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in chosen]


def entropy_bound(logits: Tensor, masked: Tensor, gamma: float) -> list[list[int]]:
    """Positions by ascending entropy while the sum without the largest stays within `gamma`."""
    found = []
    for row, mask in zip(logits, masked, strict=True):
        entropies = torch.distributions.Categorical(logits=row).entropy()
        count = dream.entropy_bound_count(-entropies[mask], entropies[mask], gamma)
        order = entropies.masked_fill(~mask, torch.inf).argsort()
        found.append(sorted(order[:count].tolist()))
    return found


def select(rule: str, logits: Tensor, masked: Tensor) -> list[list[int]]:
    """A rule of `selection.json` by its name, e.g. "fast_dllm.factor=0.5"."""
    value = float(rule.split("=")[1].split()[0]) if "=" in rule else 0.0
    probs = logits.double().softmax(-1).amax(-1).masked_fill(~masked, -torch.inf)
    if rule.startswith("fast_dllm.topk"):
        return positions(llada.select_quota(probs, [int(value)] * len(probs)))
    if rule.startswith("fast_dllm.threshold"):
        return positions(llada.select_threshold(probs, value))
    if rule.startswith("fast_dllm.factor"):
        return positions(llada.select_factor(probs, value))
    if rule.startswith("transformers.entropy_bound"):
        return entropy_bound(logits, masked, value)
    assert rule.startswith("dinfer.threshold"), rule
    decide = dinfer.threshold_decoder(value)
    rows = zip(logits, masked, strict=True)
    return positions(torch.stack([decide(row, mask)[0] for row, mask in rows]))


@cases("unit", "selection")
def test_selection_rules(case: Case) -> None:
    tensors = load_file(golden_path("unit", "selection.safetensors"))
    logits = tensors[f"set{case['set']}.logits"]
    x = tensors[f"set{case['set']}.x"]
    masked = x == case["mask_token_id"]
    for rule, expected in case["selected"].items():
        if rule == "argmax":
            assert logits.argmax(-1).where(masked, x).tolist() == expected
        elif "hierarchy" in rule:
            high, low, row = (float(part.split("=")[1]) for part in rule.split()[1:])
            decide = dinfer.hierarchy_decoder(high, low)
            chosen, _ = decide(logits[int(row)], masked[int(row)])
            assert chosen.nonzero().flatten().tolist() == expected, rule
        else:
            assert select(rule, logits, masked) == expected, rule


@cases("unit", "selection")
def test_dream_sample_tokens(case: Case) -> None:
    tensors = load_file(golden_path("unit", "selection.safetensors"))
    name = f"set{case['set']}"
    rows = tensors[f"{name}.logits"][tensors[f"{name}.x"] == case["mask_token_id"]]
    stem = f"{name}.dream."
    keys = [key for key in tensors if key.startswith(stem) and key.endswith(".token")]
    assert len(keys) == 12
    for key in keys:
        alg, top_p, top_k = key.removeprefix(stem).removesuffix(".token").split(".top_")
        confidence, tokens = dream.sample_tokens(
            rows,
            alg,  # type: ignore[arg-type]
            top_p=None if "None" in top_p else float(top_p.removeprefix("p=")),
            top_k=None if "None" in top_k else int(top_k.removeprefix("k=")),
        )
        assert tokens.tolist() == tensors[key].tolist(), key
        expected = tensors[key.replace(".token", ".confidence")]
        torch.testing.assert_close(confidence, expected, atol=1e-5, rtol=1e-5, msg=key)


def test_credit_over_steps() -> None:
    tensors = load_file(golden_path("unit", "selection.safetensors"))
    content = golden_json("unit", "selection")
    for run in content["credit"]:
        x = torch.full((16,), content["mask_token_id"])
        decide = dinfer.credit_decoder(**run["settings"])
        for logits, canvas in zip(tensors["credit.logits"], run["canvases"], strict=False):
            chosen, tokens = decide(logits, x == content["mask_token_id"])
            x[chosen] = tokens[chosen]
            assert x.tolist() == canvas


def test_schedules() -> None:
    tables = golden_json("unit", "schedules")
    for row in tables["llada.get_num_transfer_tokens"]:
        assert llada.quotas(row["masks"], row["steps"]) == row["out"]
    for row in tables["dream.quota"]:
        assert dream.dream_quotas(row["masks"], row["steps"], row["eps"]) == row["out"]


# ----------------------------------------------------------- LoPA over D2F

LOPA = golden_cases("dream-tiny-a", "decode_lopa_d2f")
LOPA = [case for case in LOPA if case["decoder"] == "lopa.enhanced_speculative"]


@pytest.mark.parametrize("case", LOPA or [{}], ids=[case["name"] for case in LOPA] or ["-"])
def test_lopa_over_d2f(case: Case) -> None:
    net = Network(golden_path("dream-tiny-a"))
    ids, turns = lopa.generate(net, case)
    assert [ids] == case["final_ids"] and len(net.calls) == case["nfe"]
    assert [length for turn in turns for length in turn.fed] == [q for _, _, q in case["forwards"]]
    assert len(turns) == case["parallel_steps"] - 1
