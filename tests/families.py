"""Tiny models of every family, and the golden fixtures of those beyond LLaDA, Dream and SDAR."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dlm_decode.models import FAMILIES, Attend
from dlm_decode.models.loading import check_tensors, fill, find_family, read_json, weight_shards
from dlm_decode.models.published import Family, Published
from dlm_decode.models.toy import random_model
from tests.golden import golden_path
from tests.support import attention, full_attend

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES.names()},
    "qwen3_diffusion-blocks": (
        "qwen3_diffusion",
        {"head_dim": 16, "block_size": 4, "tie_word_embeddings": True},
    ),
    "mdlm": ("bd3lm", {"cross_attn": False, "adaln": True}),
    "masked_lm-roberta": (
        "masked_lm",
        {
            "model_type": "roberta",
            "pad_token_id": 1,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
    ),
    "masked_lm-modernbert": (
        "masked_lm",
        {
            "model_type": "modernbert",
            "global_attn_every_n_layers": 3,
            "local_attention": 8,
            "cls_token_id": 41,
            "sep_token_id": 42,
            "bos_token_id": 41,
        },
    ),
}
"""Every registered family by its name, and variants: a family, and changes to its `tiny`."""


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""How a tiny Llama's RoPE may be stretched, as its config.json says it."""


def made(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Family:
    """A tiny model of a name in `TINY`, with random weights that are the same in every dtype."""
    family, own = TINY[name]
    return random_model(family, 3, changes=own | changes, dtype=dtype)


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
