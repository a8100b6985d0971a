"""Dream-v0, Dream-Coder and DiffuCoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, BackboneConfig, model_info
from dlm_decode.models.published import Published, SpecialTokens, head_size

SUPPORTED = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "rope_scaling": None,
    "quantization_config": None,
}

TOKENS = SpecialTokens(
    mask="<|mask|>",
    end="<|endoftext|>",
    turn="<|im_end|>",
    vocab_size=152064,
    mask_id=151666,
    end_id=151643,
    turn_id=151645,
)


@FAMILIES.register("dream")
class Dream(Backbone):
    """Dream, Dream-Coder and DiffuCoder: full attention, position i predicts token i + 1."""

    paper: ClassVar[str] = "Dream 7B: Diffusion Large Language Models, arXiv:2508.15487"
    names: ClassVar[Mapping[str, str]] = {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
        "attn_norm": "model.layers.{}.input_layernorm.weight",
        "q": "model.layers.{}.self_attn.q_proj.weight",
        "k": "model.layers.{}.self_attn.k_proj.weight",
        "v": "model.layers.{}.self_attn.v_proj.weight",
        "q_bias": "model.layers.{}.self_attn.q_proj.bias",
        "k_bias": "model.layers.{}.self_attn.k_proj.bias",
        "v_bias": "model.layers.{}.self_attn.v_proj.bias",
        "out": "model.layers.{}.self_attn.o_proj.weight",
        "ff_norm": "model.layers.{}.post_attention_layernorm.weight",
        "gate": "model.layers.{}.mlp.gate_proj.weight",
        "up": "model.layers.{}.mlp.up_proj.weight",
        "down": "model.layers.{}.mlp.down_proj.weight",
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "Dream"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> Dream:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(SUPPORTED)
        config = backbone_config(files)
        info = model_info(config, "dream", files.special_ids(TOKENS, config.vocab_size), shift=1)
        return cls(config, info, published=files.config, device=device, dtype=dtype)


def backbone_config(files: Published) -> BackboneConfig:
    """Qwen2's field names to ours."""
    width, heads = files.number("hidden_size"), files.number("num_attention_heads")
    kv_heads = files.number_or("num_key_value_heads", heads)
    return BackboneConfig(
        vocab_size=files.number("vocab_size"),
        embedding_rows=files.number("vocab_size"),
        hidden_size=width,
        layers=files.number("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size(width, heads, kv_heads),
        ffn_size=files.number("intermediate_size"),
        max_positions=files.number("max_position_embeddings"),
        rms_eps=files.real("rms_norm_eps", 1e-6),
        rope_theta=files.real("rope_theta", 10000.0),
        qkv_bias=True,
        rope_full_precision=False,
        tied=files.flag("tie_word_embeddings", False),
    )
