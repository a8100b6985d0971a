"""The sizes of a config.json with transformers' usual names, as Llama, Qwen and OLMoE have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dlm_decode.errors import CheckpointError
from dlm_decode.models.backbone import BackboneConfig, RopeScaling
from dlm_decode.models.feed_forward import ExpertsConfig
from dlm_decode.models.published import MOST_PARTS, Published, check_heads, head_size

SUPPORTED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "rope_scaling": None,
    "quantization_config": None,
}
"""What every family with these names asks of its config.json."""

QWEN3_SUPPORTED: Mapping[str, Any] = {**SUPPORTED, "attention_bias": False}

LLAMA_SUPPORTED: Mapping[str, Any] = {
    **{key: only for key, only in QWEN3_SUPPORTED.items() if key != "rope_scaling"},
    "mlp_bias": False,
}
"""Without `rope_scaling`, which `llama_config` reads."""

TINY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "vocab_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "mask_token_id": 44,
    "eos_token_id": 42,
    "pad_token_id": 42,
}
"""What the tiny models of these families have in their config.json, see `published.Family`."""

NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "out": "model.layers.{}.self_attn.o_proj.weight",
    "ff_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}

QWEN2_NAMES: Mapping[str, str] = {
    **NAMES,
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
}

QWEN3_NAMES: Mapping[str, str] = {
    **NAMES,
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
}

EXPERT_NAMES: Mapping[str, str] = {
    "router": "model.layers.{}.mlp.gate.weight",
    "expert_gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "expert_up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "expert_down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}

QWEN3_MOE_NAMES: Mapping[str, str] = {**QWEN3_NAMES, **EXPERT_NAMES}


def decoder_config(
    files: Published,
    *,
    rope_theta: float,
    ffn_key: str = "intermediate_size",
    rope_kinds: tuple[str, ...] = ("default",),
) -> BackboneConfig:
    """The sizes; what a family does otherwise is to be replaced.

    `rope_theta` is the family's own, where config.json has none. `ffn_key` names the size of its
    dense feed-forward layers. `rope_kinds` are the kinds of RoPE that it knows.
    """
    width, heads = files.number("hidden_size"), files.number("num_attention_heads")
    vocab_size, kv_heads = files.number("vocab_size"), files.number_or("num_key_value_heads", heads)
    stated = files.config.get("head_dim") is not None
    size = files.number("head_dim") if stated else head_size(width, heads, kv_heads)
    return BackboneConfig(
        vocab_size=vocab_size,
        embedding_rows=vocab_size,
        hidden_size=width,
        layers=layer_count(files),
        heads=heads,
        kv_heads=kv_heads,
        head_size=check_heads(size, heads, kv_heads),
        ffn_size=files.number(ffn_key),
        max_positions=files.number("max_position_embeddings"),
        rms_eps=files.real("rms_norm_eps", 1e-6),
        rope_theta=files.rope_field("rope_theta", rope_theta, rope_kinds),
        rope_full_precision=False,
        tied=files.flag("tie_word_embeddings", False),
    )


def layer_count(files: Published) -> int:
    """How many layers there are."""
    return files.number("num_hidden_layers", MOST_PARTS)


def qwen2_config(files: Published, *, rope_theta: float = 10000.0) -> BackboneConfig:
    """Qwen2's: biases on q, k and v."""
    return replace(decoder_config(files, rope_theta=rope_theta), qkv_bias=True)


def qwen3_config(files: Published) -> BackboneConfig:
    """Qwen3's: a norm over each head of q and k."""
    return replace(decoder_config(files, rope_theta=1000000.0), qk_norm=True)


def llama_config(files: Published) -> BackboneConfig:
    """Llama's: no biases, no norms over heads; RoPE may be stretched as Llama 3.1 does."""
    config = decoder_config(files, rope_theta=10000.0, rope_kinds=("default", "llama3"))
    return replace(config, rope_scaling=llama3_scaling(files))


def llama3_scaling(files: Published) -> RopeScaling | None:
    """What `rope_scaling`, or in transformers 5 `rope_parameters`, says; None: nothing."""
    both = (files.config.get(key) for key in ("rope_scaling", "rope_parameters"))
    return next((found for found in map(_scaling, both) if found is not None), None)


def _scaling(stated: Any) -> RopeScaling | None:
    told = isinstance(stated, Mapping)
    kind = stated.get("rope_type") or stated.get("type") if told else stated
    if kind in (None, "default"):
        return None
    if kind != "llama3" or not told:
        raise CheckpointError(
            f"config.json: rope_scaling is of type {kind!r}, only llama3 with its factors is known"
        )
    inner, keys = Published(stated), ("factor", "low_freq_factor", "high_freq_factor")
    absent = [key for key in keys if stated.get(key) is None]
    if absent:
        raise CheckpointError(f"config.json: rope_scaling has no {absent[0]}")
    factor, low, high = (inner.real(key, 0.0) for key in keys)
    return RopeScaling(factor, low, high, inner.number("original_max_position_embeddings"))


def qwen3_moe_config(files: Published, *, renormalise: bool) -> BackboneConfig:
    """Qwen3-MoE's: mixtures in all layers but some; `renormalise` as in `ExpertsConfig`."""
    dense = dense_layers(files)
    key = "intermediate_size" if dense else "moe_intermediate_size"
    experts = ExpertsConfig(
        count=files.number("num_experts", MOST_PARTS),
        active=files.number("num_experts_per_tok"),
        size=files.number("moe_intermediate_size"),
        dense_layers=dense,
        renormalise=renormalise,
    )
    config = decoder_config(files, rope_theta=1000000.0, ffn_key=key)
    return replace(config, qk_norm=True, experts=experts)


def dense_layers(files: Published) -> frozenset[int]:
    """The layers without experts: those of `mlp_only_layers`, and all but every
    `decoder_sparse_step`-th (Qwen3-MoE's)."""
    layers, step = layer_count(files), files.number_or("decoder_sparse_step", 1)
    stated = files.config.get("mlp_only_layers")
    if not isinstance(stated, list | None) or not all(type(n) is int for n in stated or []):
        raise CheckpointError(
            f"config.json: mlp_only_layers must be a list of layers, got {stated!r}"
        )
    skipped = (layer for layer in range(layers) if (layer + 1) % step)
    return frozenset((*skipped, *(stated or ()))) & frozenset(range(layers))


def rotary_size(files: Published, size: int) -> int:
    """How many entries of a head of `size` RoPE turns: `partial_rotary_factor` of them, evenly."""
    turned = round(size * files.rope_field("partial_rotary_factor", 1.0))
    if turned % 2 or not 0 < turned <= size:
        raise CheckpointError(
            f"config.json: partial_rotary_factor must leave an even number of a head's {size} "
            f"entries to turn, not {turned}"
        )
    return turned
