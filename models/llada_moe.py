"""LLaDA-MoE-7B-A1B: LLaDA with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.errors import CheckpointError
from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, BackboneConfig, model_info
from dlm_decode.models.decoder_config import (
    QWEN3_MOE_NAMES,
    QWEN3_SUPPORTED,
    TINY,
    decoder_config,
    rotary_size,
)
from dlm_decode.models.feed_forward import ExpertsConfig
from dlm_decode.models.published import MOST_PARTS, Published, SpecialTokens

SUPPORTED = {
    **QWEN3_SUPPORTED,
    "clip_qkv": None,
    "qk_layernorm": True,
    "moe_router_enable_expert_bias": False,
    "shared_expert_intermediate_size": None,
}

TOKENS = SpecialTokens(
    mask="<|mask|>",
    end="<|endoftext|>",
    turn="<|role_end|>",
    vocab_size=157184,
    mask_id=156895,
    end_id=156892,
    turn_id=None,
)


@FAMILIES.register("llada_moe")
class LLaDAMoE(Backbone):
    """LLaDA-MoE: full attention, position i predicts token i, 8 of 64 experts a token.

    The published code weighs experts by a softmax over all of them and neither makes the chosen
    weights sum to 1 nor scales them, whatever config.json says; so does this one.
    """

    paper: ClassVar[str] = "LLaDA-MoE, arXiv:2509.24389"
    names: ClassVar[Mapping[str, str]] = QWEN3_MOE_NAMES
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "llada",
        "qk_layernorm": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_intermediate_size": 8,
        "dense_intermediate_size": 64,
        "moe_layer_freq": [0, 1],
        "partial_rotary_factor": 1,
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """LLaDA 8B shares the `model_type` "llada", but has its own names for its sizes."""
        kind = config.get("model_type")
        return kind == "lladamoe" or (kind == "llada" and "hidden_size" in config)

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> LLaDAMoE:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(SUPPORTED)
        config = backbone_config(files)
        info = model_info(config, "llada_moe", files.special_ids(TOKENS, config.vocab_size))
        return cls(config, info, published=files.config, device=device, dtype=dtype)


def backbone_config(files: Published) -> BackboneConfig:
    """Sizes, with the feed-forward ones of dense layers and of experts told apart."""
    config = decoder_config(files, rope_theta=50000.0, ffn_key="dense_intermediate_size")
    experts = ExpertsConfig(
        count=files.number("num_experts", MOST_PARTS),
        active=files.number("num_experts_per_tok"),
        size=files.number("expert_intermediate_size"),
        dense_layers=dense_layers(files, config.layers),
    )
    return replace(
        config, qk_norm=True, rope_size=rotary_size(files, config.head_size), experts=experts
    )


def dense_layers(files: Published, layers: int) -> frozenset[int]:
    """The layers where `moe_layer_freq`, a 0 or 1 for each, has a 0; none if it is absent."""
    flags = files.config.get("moe_layer_freq")
    if flags is None:
        return frozenset()
    if not isinstance(flags, list) or len(flags) != layers:
        raise CheckpointError(
            f"config.json: moe_layer_freq must have a 0 or 1 for each of {layers} layers, "
            f"got {flags!r}"
        )
    return frozenset(layer for layer, flag in enumerate(flags) if not flag)
