"""SDAR and TraDo: Qwen3 turned into block diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, BackboneConfig, model_info
from dlm_decode.models.dream import Dream
from dlm_decode.models.published import Published, SpecialTokens, check_heads

SUPPORTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_scaling": None,
    "quantization_config": None,
}

TOKENS = SpecialTokens(
    mask="<|MASK|>",
    end="<|endoftext|>",
    turn="<|im_end|>",
    vocab_size=151936,
    mask_id=151669,
    end_id=151643,
    turn_id=151645,
)


@FAMILIES.register("sdar")
class SDAR(Backbone):
    """SDAR and TraDo: block-causal, blocks from position 0, position i predicts token i."""

    paper: ClassVar[str] = "SDAR, arXiv:2510.06303; TraDo, arXiv:2509.06949"
    names: ClassVar[Mapping[str, str]] = {
        **{part: name for part, name in Dream.names.items() if not part.endswith("_bias")},
        "q_norm": "model.layers.{}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Dense models only: the mixture of experts of SDAR-30B-A3B has other tensors."""
        return config.get("model_type") == "sdar" and not config.get("num_experts")

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> SDAR:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(SUPPORTED)
        config = backbone_config(files)
        info = replace(
            model_info(config, "sdar", files.special_ids(TOKENS, config.vocab_size)),
            regime="block_causal",
            block_length=files.number_or("block_size", 4),
            block_origin="absolute",
        )
        return cls(config, info, published=files.config, device=device, dtype=dtype)


def backbone_config(files: Published) -> BackboneConfig:
    """Qwen3's field names to ours."""
    width, heads = files.number("hidden_size"), files.number("num_attention_heads")
    kv_heads = files.number_or("num_key_value_heads", heads)
    return BackboneConfig(
        vocab_size=files.number("vocab_size"),
        embedding_rows=files.number("vocab_size"),
        hidden_size=width,
        layers=files.number("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=check_heads(files.number_or("head_dim", width // heads), heads, kv_heads),
        ffn_size=files.number("intermediate_size"),
        max_positions=files.number("max_position_embeddings"),
        rms_eps=files.real("rms_norm_eps", 1e-6),
        rope_theta=files.real("rope_theta", 1000000.0),
        qk_norm=True,
        rope_full_precision=False,
        tied=files.flag("tie_word_embeddings", False),
    )
