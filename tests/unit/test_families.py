"""Families beyond LLaDA, Dream and SDAR: published logits, round trips, refusals, decoding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.models.backbone import Backbone, RopeScaling
from dlm_decode.models.feed_forward import Experts, ExpertsConfig, coreset, grouped_linear, route
from dlm_decode.models.llada import LLaDA
from dlm_decode.models.llada_moe import LLaDAMoE
from dlm_decode.models.loading import find_family, load_model, save_model
from dlm_decode.types import Request
from tests.families import LLAMA3, TINY, blocks_from, golden_forward, golden_model, logits_of, made
from tests.golden import requires_golden
from tests.support import full_attend, row_positions

TOLERANCE = 5e-4

EVERY = pytest.mark.parametrize("name", TINY)
MASKED = pytest.mark.parametrize("name", [name for name in TINY if name != "diffusion_gemma"])
"""Without the one that has no mask, knows no forward without windows and reads images too."""


# --------------------------------------------------------------------------- published logits


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours.float(), expected, atol=TOLERANCE, rtol=0)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@requires_golden
@DTYPES
def test_converted_qwen3_under_full_attention(dtype: torch.dtype) -> None:
    model = golden_model("a2d-qwen3-tiny-a", dtype)
    t = golden_forward("a2d-qwen3-tiny-a")
    for ids, mask, expected in zip(
        *(t[f"full.{k}"] for k in ("input_ids", "attention_mask", "logits")), strict=True
    ):
        close(logits_of(model, ids[mask.bool()]), expected[mask.bool()])


@requires_golden
@DTYPES
def test_converted_qwen3_under_block_causal_attention(dtype: torch.dtype) -> None:
    """Five pads on the left of row 0 shorten its first block."""
    model = golden_model("a2d-qwen3-tiny-a", dtype, block=8)
    assert (model.info.regime, model.info.block_origin) == ("block_causal", "prompt")
    t = golden_forward("a2d-qwen3-tiny-a")
    for pads, ids, expected in zip((5, 0), t["block8.input_ids"], t["block8.logits"], strict=True):
        close(logits_of(model, ids[pads:], 8, (8 - pads) % 8), expected[pads:])


@requires_golden
@DTYPES
@pytest.mark.parametrize(
    ("name", "case", "block"),
    [
        ("lladamoe-tiny-a", "full", None),
        ("llada2-tiny-a", "block8", 8),
        ("llada2-tiny-a", "block16", 16),
    ],
)
def test_mixtures_of_experts(name: str, case: str, block: int | None, dtype: torch.dtype) -> None:
    model, t = golden_model(name, dtype), golden_forward(name)
    for ids, hidden, logits in zip(
        *(t[f"{case}.{k}"] for k in ("input_ids", "final_hidden", "logits")), strict=True
    ):
        attend = full_attend([len(ids)]) if block is None else blocks_from(len(ids), block, 0)
        ours = model.forward(ids, torch.arange(len(ids)), attend)
        close(ours, hidden)
        close(model.logits(ours), logits)


@requires_golden
@DTYPES
def test_fast_dllm_v2(dtype: torch.dtype) -> None:
    """Raw logits: row i predicts token i + 1; the second block of 16 also over a stored first."""
    model = golden_model("fastdllm2-tiny-a", dtype, mask=312)
    t = golden_forward("fastdllm2-tiny-a")
    assert (model.info.shift, model.info.regime) == (1, "block_causal")
    for ids, whole, second in zip(
        *(t[k] for k in ("full.input_ids", "full.logits", "cached.logits")), strict=True
    ):
        ours = logits_of(model, ids, 16)
        close(ours, whole)
        close(ours[16:32], second)


@requires_golden
@DTYPES
@pytest.mark.parametrize(
    ("name", "case", "block"),
    [
        ("bd3lm-tiny-a", "sample", 4),
        ("bd3lm-tiny-b", "sample", 8),
        ("mdlm-tiny-a", "full", None),
    ],
)
def test_diffusion_transformers(
    name: str, case: str, block: int | None, dtype: torch.dtype
) -> None:
    model, t = golden_model(name, dtype, mask=200), golden_forward(name)
    assert model.info.regime == ("full" if block is None else "block_causal")
    for ids, expected in zip(t[f"{case}.input_ids"], t[f"{case}.logits"], strict=True):
        close(logits_of(model, ids, block), expected)


@requires_golden
@DTYPES
@pytest.mark.parametrize(("name", "block"), [("bd3lm-tiny-a", 4), ("bd3lm-tiny-b", 8)])
def test_noised_blocks_after_clean_ones_give_the_training_logits(
    name: str, block: int, dtype: torch.dtype
) -> None:
    """The training input is [noised | clean]: a noised block sees itself and clean ones before."""
    model, t = golden_model(name, dtype, mask=200), golden_forward(name)
    for ids, expected in zip(t["train.input_ids"], t["train.logits"], strict=True):
        noised, clean = ids.chunk(2)
        for start in range(0, len(noised), block):
            row = torch.cat((clean[:start], noised[start : start + block]))
            close(logits_of(model, row, block)[start:], expected[start : start + block])


# ------------------------------------------------------------------------ what every family does


def refused(name: str, folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_models_load_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = made(name, dtype)
    save_model(model, tmp_path, max_shard_bytes=20_000)
    loaded = load_model(tmp_path).model
    assert (type(loaded), loaded.dtype, loaded.info) == (type(model), dtype, model.info)
    ours, theirs = model.weights(), loaded.weights()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@EVERY
def test_wrong_tensors_are_refused(name: str, tmp_path: Path) -> None:
    save_model(made(name), tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    key = sorted(whole)[len(whole) // 2]
    for tensors, message in (
        ({k: v for k, v in whole.items() if k != key}, f"1 missing: {key}"),
        (whole | {"extra.weight": torch.zeros(2)}, "1 unexpected: extra.weight"),
        (whole | {key: torch.zeros(3, 7, 2)}, f"1 misshapen: {key}"),
        (whole | {key: torch.full_like(whole[key], torch.nan)}, f"{key} has NaN"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        refused(name, tmp_path, message)


@MASKED
def test_every_weight_counts_in_the_output(name: str) -> None:
    """No stored tensor is left out of the forward; the experts of a layer are taken together."""
    ids = torch.randint(40, (24,), generator=torch.Generator().manual_seed(0))
    model = made(name, torch.float64)
    before = logits_of(model, ids)
    groups: dict[str, list[Tensor]] = {}
    for key, view in model.weights().items():
        groups.setdefault(re.sub(r"experts\.\d+", "experts", key), []).append(view)
    for key, views in groups.items():
        kept = [view.clone() for view in views]
        for view in views:
            view.copy_(view.flip(0) + 0.1 * view.abs() if view.ndim else view)
        changed = not torch.equal(logits_of(model, ids), before)
        assert changed != key.startswith("sampling_eps"), key
        for view, old in zip(views, kept, strict=True):
            view.copy_(old)


@MASKED
def test_the_fp64_path_is_fp64_throughout(name: str) -> None:
    """Nudging a weight by a fp64 epsilon shows, which a fp32 step on the way would hide."""
    ids = torch.arange(12)
    model = made(name, torch.float64)
    before = logits_of(model, ids)
    view = next(iter(model.weights().values()))
    view.mul_(1 + 1e-11)
    change = (logits_of(model, ids) - before).abs().max()
    assert 0 < change < 1e-8
    close(logits_of(made(name), ids), before.float())


@MASKED
def test_packed_rows_equal_rows_alone(name: str) -> None:
    model = made(name, torch.float64)
    rows = [torch.arange(5), torch.arange(20, 37), torch.tensor([7])]
    lengths = [len(row) for row in rows]
    together = model.forward(torch.cat(rows), row_positions(lengths), full_attend(lengths))
    alone = torch.cat([logits_of(model, row) for row in rows])
    torch.testing.assert_close(model.logits(together), alone, atol=1e-11, rtol=0)


REQUESTS = (
    Request([3, 5, 7, 2, 9], gen_length=9, block_length=4, id="tail"),
    Request([4], gen_length=4, block_length=2, stop_at_eos=False, id="short"),
    Request([6] * 8, gen_length=6, block_length=4, suffix_ids=[3, 4], frozen={1: 5}, id="given"),
)


@MASKED
def test_tiny_models_decode_the_same_alone_and_together(name: str) -> None:
    """Under no cache, and under those that fit the attention; the exact one changes nothing."""
    model = made(name, torch.float64)
    cached = "block_causal" if model.info.regime == "block_causal" else "dual"
    for cache_name in ("none",) if model.info.whole_rows else ("none", cached):
        decoder = Decoder(model, "threshold", cache_name, max_batch_size=2, debug=True)
        together = decoder.generate(REQUESTS)
        for request, result in zip(REQUESTS, together, strict=True):
            assert model.info.mask_id not in result.canvas
            assert decoder.generate(request)[0].ids == result.ids
    if cached == "block_causal":
        plain = Decoder(model, "threshold", "none").generate(REQUESTS)
        assert [r.canvas for r in plain] == [r.canvas for r in together]


@EVERY
def test_caches_for_the_other_regime_are_refused(name: str) -> None:
    model = made(name)
    other = "dual" if model.info.regime == "block_causal" else "block_causal"
    sampler = "threshold" if model.info.has_mask else "renoise"
    with pytest.raises(CapabilityError, match="does not fit"):
        Decoder(model, sampler, cache=other)


# --------------------------------------------------------------------------------------- experts


def plain_experts(x: Tensor, layer: Experts) -> Tensor:
    """One token and one expert at a time, from the published equations."""
    c, rows = layer.config, []
    for token in x:
        logits = layer.router @ token
        scores = logits.softmax(0) if c.score == "softmax" else logits.sigmoid()
        ranked = scores if layer.bias is None else scores + layer.bias
        groups = ranked.view(c.groups, -1)
        worth = {g: sum(sorted(groups[g].tolist())[-2:]) for g in range(c.groups)}
        kept = sorted(worth, key=lambda g: -worth[g])[: c.active_groups]
        size = c.count // c.groups
        allowed = [e for e in range(c.count) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -float(ranked[e]))[: c.active]
        total = scores[chosen].sum() if c.renormalise else 1.0
        out = torch.zeros_like(token) if layer.shared is None else layer.shared(token[None])[0]
        for e in chosen:
            gate, up = (layer.gate_up[e] @ token).chunk(2)
            out = out + scores[e] / total * c.scale * (
                layer.down[e] @ (gate / (1 + (-gate).exp()) * up)
            )
        rows.append(out)
    return torch.stack(rows)


SIGMOID = ExpertsConfig(
    12,
    3,
    5,
    shared_size=7,
    score="sigmoid",
    renormalise=True,
    scale=2.5,
    groups=4,
    active_groups=2,
    selection_bias=True,
    router_full_precision=True,
)


def random_experts(config: ExpertsConfig, dtype: torch.dtype = torch.float64) -> Experts:
    layer = Experts(config, 6, device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for weight in layer.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return layer


@pytest.mark.parametrize(
    "config", [ExpertsConfig(6, 2, 5), ExpertsConfig(6, 6, 5, renormalise=True), SIGMOID]
)
def test_experts_give_the_sum_of_the_chosen_ones(config: ExpertsConfig) -> None:
    layer = random_experts(config)
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(layer(x), plain_experts(x, layer), atol=1e-12, rtol=1e-12)


def test_the_bias_counts_in_the_choice_and_not_in_the_weight() -> None:
    config = ExpertsConfig(4, 1, 5, score="sigmoid", selection_bias=True)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, chosen = route(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), config)
    assert chosen.tolist() == [[3]]
    torch.testing.assert_close(weights, logits[:, 3:].sigmoid())


def test_no_tokens_go_through_no_experts() -> None:
    """A cache may leave a layer nothing to compute."""
    assert random_experts(ExpertsConfig(6, 2, 5))(torch.zeros(0, 6).double()).shape == (0, 6)


def test_experts_that_no_token_uses_are_not_computed() -> None:
    """Their weights may be anything: a NaN would show in a sum that multiplies them by 0."""
    layer = random_experts(ExpertsConfig(6, 2, 5))
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = layer(x)
    _, chosen = route(layer.router_logits(x), None, layer.config)
    unused = [e for e in range(6) if e not in chosen[0].tolist()]
    layer.gate_up[unused] = layer.down[unused] = torch.nan
    assert torch.equal(layer(x), before)


def test_the_grouped_kernel_multiplies_as_the_loop_does() -> None:
    x, weights = torch.randn(10, 16), torch.randn(4, 8, 16)
    ends = torch.tensor([3, 3, 7, 10])
    kernel = F.grouped_mm(x, weights.transpose(1, 2), offs=ends.to(torch.int32))
    torch.testing.assert_close(grouped_linear(x, weights, ends), kernel, atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------- experts of a block


def plain_coreset(scores: Tensor, chosen: Tensor, share: float, least: int) -> set[int]:
    """The coreset of one block, expert by expert."""
    votes = dict.fromkeys(range(scores.shape[1]), 0.0)
    for token, experts in enumerate(chosen.tolist()):
        for e in experts:
            votes[e] += float(scores[token, e])
    kept: set[int] = set()
    held = 0.0
    for e in sorted(votes, key=lambda e: -votes[e]):
        if held >= share * sum(votes.values()) and len(kept) >= least:
            break
        kept.add(e)
        held += votes[e]
    return kept


@pytest.mark.parametrize("least", [1, 7])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_a_coreset_holds_the_share_of_its_blocks_votes(share: float, least: int) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(11, 20, generator=generator, dtype=torch.float64)
    chosen = scores.topk(4, dim=-1).indices
    blocks = torch.tensor([5] * 6 + [2] * 5)
    allowed = coreset(scores, chosen, blocks, share=share, least=least)
    for block in (5, 2):
        rows = blocks == block
        expected = plain_coreset(scores[rows], chosen[rows], share, least)
        for row in allowed[rows]:
            assert set(row.nonzero()[:, 0].tolist()) == expected


def test_tokens_choose_again_in_their_coreset() -> None:
    """Fewer experts the smaller the share; weights are those of the chosen, renormalised."""
    logits = torch.randn(32, 64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    blocks, used = torch.zeros(32, dtype=torch.int64), []
    for share in (0.3, 0.6, 0.8, 1.0):
        config = ExpertsConfig(
            64, 8, 5, score="sigmoid", renormalise=True, scale=2.5, block_share=share
        )
        weights, chosen = route(logits, None, config, blocks)
        used.append(len(chosen.unique()))
        torch.testing.assert_close(weights.sum(-1), torch.full((32,), 2.5, dtype=torch.float64))
        scores = logits.sigmoid().gather(-1, chosen)
        torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))
    assert 16 <= used[0] < used[1] < used[2] < used[3]
    plain = route(logits, None, ExpertsConfig(64, 8, 5, score="sigmoid"))
    assert torch.equal(chosen, plain[1]), "the whole share is the router as it is"


def test_blocks_that_choose_together_are_rows_apart() -> None:
    """Rows that meet at a position of one block decode as they do alone."""
    model = made("llada2", torch.float64, dmoe_share=0.3, dmoe_least=1)
    decoder = Decoder(model, "llada", "block_causal", max_batch_size=3, debug=True)
    together = decoder.generate(REQUESTS)
    assert [decoder.generate(r)[0].canvas for r in REQUESTS] == [r.canvas for r in together]
    plain = Decoder(made("llada2", torch.float64), "llada").generate(REQUESTS)
    assert [r.canvas for r in plain] != [r.canvas for r in together]


@pytest.mark.parametrize("groups", [3, 8])
def test_experts_that_do_not_divide_into_groups_are_refused(groups: int) -> None:
    with pytest.raises(CheckpointError, match=f"of {groups} equal groups of 8 experts"):
        made("llada2", n_group=groups)
    with pytest.raises(CheckpointError, match="5 experts a token"):
        made("llada_moe", num_experts_per_tok=5)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llada_moe", "moe_layer_freq", [1]),
        ("llada_moe", "moe_router_enable_expert_bias", True),
        ("llada_moe", "shared_expert_intermediate_size", 8),
        ("llada_moe", "qk_layernorm", False),
        ("llada_moe", "partial_rotary_factor", 0.4),
        ("llada2", "score_function", "softmax"),
        ("llada2", "use_qkv_bias", True),
        ("llada2", "partial_rotary_factor", 2.0),
        ("llada2", "first_k_dense_replace", -1),
        ("qwen3_diffusion", "attention_bias", True),
        ("qwen3_diffusion", "rope_parameters", {"rope_type": "yarn"}),
        ("qwen3_diffusion", "head_dim", 7),
        ("qwen2_diffusion", "rope_scaling", {"type": "yarn"}),
        ("qwen2_diffusion", "num_attention_heads", 5),
        ("fast_dllm_v2", "bd_size", 0),
        ("rnd1", "attention_bias", True),
        ("sdar_moe", "block_size", None),
        ("sdar_moe", "norm_topk_prob", None),
        ("sdar_moe", "norm_topk_prob", "yes"),
        ("sdar_moe", "mlp_only_layers", 1),
        ("sdar_moe", "mlp_only_layers", ["1"]),
        ("sdar_moe", "decoder_sparse_step", 0),
        ("sdar_moe", "num_experts", None),
        ("sdar_moe", "moe_intermediate_size", 0),
        ("llama_diffusion", "mlp_bias", True),
        ("llama_diffusion", "attention_bias", True),
        ("llama_diffusion", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("llama_diffusion", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("llama_diffusion", "rope_scaling", {**LLAMA3, "high_freq_factor": 1.0}),
        ("llama_diffusion", "rope_scaling", ["llama3"]),
        ("llama_diffusion", "rope_scaling", "llama3"),
        ("llama_diffusion", "rope_scaling", {"rope_type": None, "type": "linear", "factor": 2.0}),
        ("llama_diffusion", "rope_parameters", "llama3"),
        ("qwen3_diffusion", "rope_parameters", "default"),
        ("llama_diffusion", "rope_parameters", {"rope_type": "yarn"}),
        ("qwen3_diffusion", "rope_parameters", LLAMA3),
        ("stable_diffcoder", "mlp_bias", True),
        ("stable_diffcoder", "block_size", "4"),
        ("stable_diffcoder", "mask_token_id", None),
        ("coda", "attention_bias", True),
        ("coda", "use_sliding_window", True),
        ("adapted", "diffusion_shift", None),
        ("adapted", "diffusion_shift", 2),
        ("adapted", "diffusion_shift", True),
        ("adapted", "mask_token_id", None),
        ("adapted", "mlp_bias", True),
        ("diffugpt", "diffusion_shift", "1"),
        ("diffugpt", "activation_function", "relu"),
        ("diffugpt", "scale_attn_by_inverse_layer_idx", True),
        ("diffugpt", "n_head", 5),
        ("bd3lm", "time_conditioning", True),
        ("bd3lm", "n_heads", 5),
        ("mdlm", "cond_dim", None),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_field(name: str, field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: ") as raised:
        made(name, **{field: value})
    assert field in str(raised.value) or "heads" in str(raised.value)


def test_a_scaling_of_the_default_kind_hides_no_other() -> None:
    plain = {"rope_type": "default"}
    for older, newer in ((plain, LLAMA3), (LLAMA3, plain)):
        model = made("llama_diffusion", rope_scaling=older, rope_parameters=newer)
        assert isinstance(model, Backbone) and model.config.rope_scaling is not None


def test_rotary_settings_are_read_where_transformers_5_puts_them() -> None:
    moved = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    model = made("qwen3_diffusion", **moved)
    assert isinstance(model, Backbone) and model.config.rope_theta == 500.0


def test_layers_without_experts_are_those_that_config_names() -> None:
    """`mlp_only_layers`, and all but every `decoder_sparse_step`-th; [1] in the tiny model."""
    for changes, dense in (
        ({}, {1}),
        ({"mlp_only_layers": [0, 2, 9]}, {0, 2}),
        ({"mlp_only_layers": None, "decoder_sparse_step": 2}, {0, 2}),
        ({"mlp_only_layers": [], "decoder_sparse_step": 1}, set()),
    ):
        model = made("sdar_moe", **changes)
        assert isinstance(model, Backbone)
        names = set(model.weights())
        for layer in range(3):
            start = f"model.layers.{layer}.mlp"
            assert (f"{start}.up_proj.weight" in names) == (layer in dense)
            assert (f"{start}.gate.weight" in names) == (layer not in dense)
            assert (f"{start}.experts.3.down_proj.weight" in names) == (layer not in dense)


def test_codas_head_is_its_own_whatever_config_says() -> None:
    model = made("coda", tie_word_embeddings=True)
    assert "lm_head.weight" in model.weights() and not model.aliases()


def test_diffugpts_own_tensor_names_are_read(tmp_path: Path) -> None:
    """Its class stores GPT-2 as `denoise_model`, the embeddings apart, and causal masks."""
    model = made("diffugpt")
    save_model(model, tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    stored = {
        "embed_tokens.weight"
        if key == "transformer.wte.weight"
        else key.replace("transformer.", "denoise_model."): value
        for key, value in plain.items()
    }
    stored |= {
        "denoise_model.h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "denoise_model.h.1.attn.masked_bias": torch.tensor(-1e4),
        "lm_head.weight": stored["embed_tokens.weight"].clone(),
    }
    assert "denoise_model.h.1.attn.c_attn.bias" in stored
    save_file(stored, tmp_path / "model.safetensors")
    ours, theirs = model.weights(), load_model(tmp_path).model.weights()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", ["adapted", "diffugpt"])
@pytest.mark.parametrize("shift", [0, 1])
def test_adapted_models_predict_what_config_says(name: str, shift: int) -> None:
    assert made(name, diffusion_shift=shift).info.shift == shift


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_causal_lms_are_refused_until_config_says_how_they_were_adapted(kind: str) -> None:
    with pytest.raises(CheckpointError, match=r'loads with "diffusion_shift" in its config\.json'):
        find_family({"model_type": kind})
    assert find_family({"model_type": kind, "diffusion_shift": 1}).tiny["diffusion_shift"] == 1
    with pytest.raises(CheckpointError) as raised:
        find_family({"model_type": "mistral"})
    assert "diffusion_shift" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "wedlm", "architectures": ["WeDLMForCausalLM"]}, "causal over tokens"),
        ({"model_type": "nemotron_labs_diffusion"}, "under causal attention"),
        ({"model_type": "nemotron_labs_diffusion_vlm"}, "under causal attention"),
        ({"model_type": "steerling"}, "concepts"),
        ({"model_type": "udlm"}, "random tokens"),
        ({"model_type": "gidd", "architectures": ["GiddForDiffusionLM"]}, "random tokens"),
        ({"model_type": "edlm", "architectures": ["EfficientDLM"]}, "where its blocks begin"),
        ({"model_type": "lfm2", "architectures": ["Lfm2ForBlockDiffusion"]}, "convolutions"),
        ({"model_type": "Dream", "expand_token_id": 151667}, "DreamOn"),
    ],
)
def test_diffusion_lms_of_another_kind_are_refused_with_the_reason(
    config: dict[str, Any], why: str
) -> None:
    with pytest.raises(CheckpointError, match=f"can't be decoded: .*{why}"):
        find_family(config)


def test_long_waves_are_stretched_and_short_ones_kept() -> None:
    """Of 64 positions: waves of 8 (more than 4 of them) stay, of 128 (less than 1) are divided."""
    scaling = RopeScaling(factor=8.0, low=1.0, high=4.0, original=64)
    waves = torch.tensor([8.0, 16.0, 32.0, 64.0, 128.0], dtype=torch.float64)
    expected = [8.0, 16.0, 1 / ((1 / 3) / 32 + (2 / 3) / (8 * 32)), 512.0, 1024.0]
    found = 2 * torch.pi / scaling.stretched(2 * torch.pi / waves)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_both_llada_layouts_are_told_apart() -> None:
    for family in (LLaDA, LLaDAMoE):
        assert find_family(family.tiny) is family


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": ["llada"]}, r"model_type must be a name, got \['llada'\]"),
        ({"model_type": "llada", "architectures": 5}, "architectures must be a list of names: 5"),
        ({"architectures": [None]}, r"architectures must be a list of names: \[None\]"),
        ({}, "model_type None with architectures None is of no known family"),
    ],
)
def test_a_config_that_names_no_family_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_family(config)
