"""LLaDA-8B-Base, LLaDA-8B-Instruct and LLaDA-1.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dlm_decode.errors import CheckpointError
from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, BackboneConfig, model_info
from dlm_decode.models.published import MOST_PARTS, Published, SpecialTokens, head_size

SUPPORTED = {
    "block_type": "llama",
    "block_group_size": 1,
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "clip_qkv": None,
    "input_emb_norm": False,
    "scale_logits": False,
    "alibi": False,
    "rope": True,
    "rope_scaling": None,
    "quantization_config": None,
}

TOKENS = SpecialTokens(
    mask="<|mdm_mask|>",
    end="<|endoftext|>",
    turn="<|eot_id|>",
    vocab_size=126464,
    mask_id=126336,
    end_id=126081,
    turn_id=126348,
)


@FAMILIES.register("llada")
class LLaDA(Backbone):
    """LLaDA 8B and 1.5: full attention, position i predicts token i."""

    paper: ClassVar[str] = "Large Language Diffusion Models, arXiv:2502.09992"
    names: ClassVar[Mapping[str, str]] = {
        "embed": "model.transformer.wte.weight",
        "norm": "model.transformer.ln_f.weight",
        "head": "model.transformer.ff_out.weight",
        "attn_norm": "model.transformer.blocks.{}.attn_norm.weight",
        "q": "model.transformer.blocks.{}.q_proj.weight",
        "k": "model.transformer.blocks.{}.k_proj.weight",
        "v": "model.transformer.blocks.{}.v_proj.weight",
        "out": "model.transformer.blocks.{}.attn_out.weight",
        "ff_norm": "model.transformer.blocks.{}.ff_norm.weight",
        "gate": "model.transformer.blocks.{}.ff_proj.weight",
        "up": "model.transformer.blocks.{}.up_proj.weight",
        "down": "model.transformer.blocks.{}.ff_out.weight",
    }
    tiny: ClassVar[Mapping[str, Any]] = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rope": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 64,
        "max_sequence_length": 512,
        "vocab_size": 48,
        "embedding_size": 48,
        "mask_token_id": 44,
        "eos_token_id": 42,
        "pad_token_id": 42,
        "weight_tying": False,
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """LLaDA-MoE shares the `model_type`, but has Hugging Face's names for its sizes."""
        return config.get("model_type") == "llada" and "d_model" in config

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> LLaDA:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(SUPPORTED)
        config = backbone_config(files)
        info = model_info(config, "llada", files.special_ids(TOKENS, config.vocab_size))
        return cls(config, info, published=files.config, device=device, dtype=dtype)


def backbone_config(files: Published) -> BackboneConfig:
    """LLaDA's field names to ours."""
    width, heads = files.number("d_model"), files.number("n_heads")
    kv_heads, vocab_size = effective_kv_heads(files), files.number("vocab_size")
    embedding_rows = files.number_or("embedding_size", vocab_size)
    if embedding_rows < vocab_size:
        raise CheckpointError(
            f"config.json: embedding_size {embedding_rows} is below vocab_size {vocab_size}"
        )
    return BackboneConfig(
        vocab_size=vocab_size,
        embedding_rows=embedding_rows,
        hidden_size=width,
        layers=files.number("n_layers", MOST_PARTS),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size(width, heads, kv_heads),
        ffn_size=files.number_or("mlp_hidden_size", files.number_or("mlp_ratio", 4) * width),
        max_positions=files.number("max_sequence_length"),
        rms_eps=files.real("rms_norm_eps", 1e-5),
        rope_theta=files.real("rope_theta", 10000.0),
        rope_full_precision=files.flag("rope_full_precision", True),
        tied=files.flag("weight_tying", False),
    )


def effective_kv_heads(files: Published) -> int:
    """`n_kv_heads`; where that is null, 1 under `multi_query_attention` and else `n_heads`."""
    shared = files.flag("multi_query_attention", False)
    return files.number_or("n_kv_heads", 1 if shared else files.number("n_heads"))
