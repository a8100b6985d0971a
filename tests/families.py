"""Tiny models of the families beyond LLaDA, Dream and SDAR, and the golden fixtures of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dlm_decode.models import Attend
from dlm_decode.models.loading import check_tensors, fill, find_family, read_json, weight_shards
from dlm_decode.models.published import Family, Published
from tests.golden import golden_path
from tests.support import attention, full_attend

IDS = {"mask_token_id": 44, "eos_token_id": 42, "pad_token_id": 42}
DECODER = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "vocab_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    **IDS,
}
DIT = {
    "model_type": "bd3lm",
    "block_size": 4,
    "vocab_size": 48,
    "model_length": 128,
    "hidden_dim": 32,
    "cond_dim": 8,
    "n_blocks": 2,
    "n_heads": 4,
    "time_conditioning": False,
    "causal": False,
}
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "vocab_size": 48,
    **IDS,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_diffusion": {**DECODER, "model_type": "a2d-qwen3", "head_dim": 8},
    "qwen3_diffusion-blocks": {
        **DECODER,
        "model_type": "a2d-qwen3",
        "head_dim": 16,
        "block_size": 4,
        "tie_word_embeddings": True,
    },
    "qwen2_diffusion": {**DECODER, "model_type": "a2d-qwen2"},
    "llada_moe": {
        **DECODER,
        "model_type": "llada",
        "architectures": ["LLaDAMoEModelLM"],
        "qk_layernorm": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_intermediate_size": 8,
        "dense_intermediate_size": 64,
        "moe_layer_freq": [0, 1],
        "partial_rotary_factor": 1,
    },
    "llada2": {
        **DECODER,
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
    },
    "fast_dllm_v2": {**DECODER, "model_type": "Fast_dLLM_Qwen", "bd_size": 4},
    "rnd1": {
        **DECODER,
        "model_type": "rnd1",
        "head_dim": 16,
        "intermediate_size": None,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    },
    "bd3lm": {**DIT, "cross_attn": True, "adaln": False},
    "mdlm": {**DIT, "cross_attn": False, "adaln": True},
    "sedd": {
        "tokens": 47,
        "graph": {"type": "absorb"},
        "noise": {"type": "loglinear"},
        "model": {
            "type": "ddit",
            "hidden_size": 32,
            "cond_dim": 8,
            "length": 128,
            "n_blocks": 2,
            "n_heads": 4,
            "scale_by_sigma": True,
        },
    },
    "masked_lm": {**ENCODER, "model_type": "bert"},
    "masked_lm-roberta": {
        **ENCODER,
        "model_type": "roberta",
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    },
    "masked_lm-modernbert": {
        **ENCODER,
        "model_type": "modernbert",
        "global_attn_every_n_layers": 3,
        "local_attention": 8,
        "cls_token_id": 41,
        "sep_token_id": 42,
        "bos_token_id": 41,
    },
}


def made(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Family:
    """A tiny model of a config, with random weights that are the same in every dtype."""
    config = CONFIGS[name] | changes
    model = find_family(config).from_published(Published(config), device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    for view in model.weights().values():
        noise = torch.randn(view.shape, generator=generator, dtype=torch.float64)
        gain = 1.5 / view.shape[-1] ** 0.5 if view.ndim > 1 else 0.2
        view.copy_(gain * noise + (view.ndim == 1))
    return model


@cache
@torch.no_grad()
def golden_model(
    name: str, dtype: torch.dtype = torch.float32, *, block: int | None = None, mask: int = 310
) -> Family:
    """A fixture's model; its config.json lacks the mask id, which published tokenizers have."""
    path = golden_path(name)
    blocks = {} if block is None else {"block_size": block}
    config = read_json(path / "config.json") | {"mask_token_id": mask} | blocks
    model = find_family(config).from_published(Published(config), device="cpu", dtype=dtype)
    shards = weight_shards(path)
    check_tensors(model, shards)
    fill(model, shards)
    return model


def golden_forward(name: str) -> Mapping[str, Tensor]:
    return load_file(golden_path(name, "forward.safetensors"))


def logits_of(model: Family, ids: Tensor, block: int | None = None, start: int = 0) -> Tensor:
    """Logits of one row; with `block`, blocks are counted from position `start`."""
    length = len(ids)
    attend = full_attend([length]) if block is None else blocks_from(length, block, start)
    return model.logits(model.forward(ids, torch.arange(length), attend))


def blocks_from(length: int, block: int, start: int) -> Attend:
    """One row of `length` under block-causal attention, blocks counted from `start` both ways."""
    lead = -start % block

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ends = [min(((i + lead) // block + 1) * block - lead, length) for i in range(length)]
        return torch.cat([attention(q[i : i + 1], k[:e], v[:e]) for i, e in enumerate(ends)])

    return attend
