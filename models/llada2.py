"""LLaDA2.0 and LLaDA2.1, mini and flash: block diffusion with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, BackboneConfig, model_info
from dlm_decode.models.decoder_config import (
    EXPERT_NAMES,
    NAMES,
    TINY,
    decoder_config,
    rotary_size,
)
from dlm_decode.models.decoder_config import SUPPORTED as DECODER_SUPPORTED
from dlm_decode.models.feed_forward import ExpertsConfig
from dlm_decode.models.llada_moe import TOKENS
from dlm_decode.models.published import MOST_PARTS, Published

SUPPORTED = {
    **DECODER_SUPPORTED,
    "score_function": "sigmoid",
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "norm_head": False,
    "tie_word_embeddings": False,
}

BLOCK_LENGTH = 32
"""What all published checkpoints are trained with; their config.json does not say it."""


@FAMILIES.register("llada2")
class LLaDA2(Backbone):
    """LLaDA2.0 and 2.1: block-causal, blocks of 32 from position 0, position i predicts token i."""

    paper: ClassVar[str] = "LLaDA2.0, arXiv:2512.15745; LLaDA2.1, arXiv:2602.08676"
    names: ClassVar[Mapping[str, str]] = {
        **{part: name for part, name in NAMES.items() if part not in "qkv"},
        **EXPERT_NAMES,
        "embed": "model.word_embeddings.weight",
        "qkv": "model.layers.{}.attention.query_key_value.weight",
        "q_norm": "model.layers.{}.attention.query_layernorm.weight",
        "k_norm": "model.layers.{}.attention.key_layernorm.weight",
        "out": "model.layers.{}.attention.dense.weight",
        "router_bias": "model.layers.{}.mlp.gate.expert_bias",
        "shared_gate": "model.layers.{}.mlp.shared_experts.gate_proj.weight",
        "shared_up": "model.layers.{}.mlp.shared_experts.up_proj.weight",
        "shared_down": "model.layers.{}.mlp.shared_experts.down_proj.weight",
    }
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "score_function": "sigmoid",
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5,
        "block_size": 4,
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "llada2_moe"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> LLaDA2:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(SUPPORTED)
        config = backbone_config(files)
        info = replace(
            model_info(config, "llada2", files.special_ids(TOKENS, config.vocab_size)),
            regime="block_causal",
            block_length=files.number_or("block_size", BLOCK_LENGTH),
            block_origin="absolute",
        )
        return cls(config, info, published=files.config, device=device, dtype=dtype)


def backbone_config(files: Published) -> BackboneConfig:
    """The field names of Bailing-MoE v2 to ours."""
    config = decoder_config(files, rope_theta=600000.0)
    return replace(
        config,
        qk_norm=True,
        fused_qkv=True,
        rope_size=rotary_size(files, config.head_size),
        experts=experts_config(files),
    )


def experts_config(files: Published) -> ExpertsConfig:
    """The mixture of experts of all layers but the first `first_k_dense_replace`.

    `dmoe_share` and `dmoe_least` are not published fields: added to a config.json they have each
    block choose its experts in common, as models trained for that do (dMoE, arXiv:2605.30876).
    """
    size = files.number("moe_intermediate_size")
    return ExpertsConfig(
        count=files.number("num_experts", MOST_PARTS),
        active=files.number("num_experts_per_tok"),
        size=size,
        shared_size=size * files.count_or("num_shared_experts", 0),
        dense_layers=frozenset(range(files.count_or("first_k_dense_replace", 0))),
        score="sigmoid",
        renormalise=files.flag("norm_topk_prob", True),
        scale=files.real("routed_scaling_factor", 1.0),
        groups=files.number_or("n_group", 1),
        active_groups=files.number_or("topk_group", 1),
        selection_bias=files.flag("moe_router_enable_expert_bias", True),
        router_full_precision=True,
        block_share=files.real("dmoe_share", 1.0),
        block_least=files.number_or("dmoe_least", 16),
    )
