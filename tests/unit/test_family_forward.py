"""Families that transformers has as causal LMs: the same logits as its classes, once all is seen.

Each is written in its published layout and read by transformers' own class, so that the names of
the tensors are tested along with what is computed of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from dlm_decode.models.loading import save_model
from dlm_decode.models.toy import random_model
from tests.families import LLAMA3, logits_of

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "adapted": ("adapted", {}, "Llama"),
    "adapted-qwen2": ("adapted", {"model_type": "qwen2", "tie_word_embeddings": True}, "Qwen2"),
    "adapted-qwen3": ("adapted", {"model_type": "qwen3", "head_dim": 16}, "Qwen3"),
    "coda": ("coda", {}, "Qwen3"),
    "diffugpt": ("diffugpt", {}, "GPT2"),
    "diffugpt-inner": ("diffugpt", {"n_inner": 48, "tie_word_embeddings": False}, "GPT2"),
    "llama_diffusion": ("llama_diffusion", {"head_dim": 16, "rope_theta": 5e5}, "Llama"),
    "llama_diffusion-stretched": ("llama_diffusion", {"rope_scaling": LLAMA3}, "Llama"),
    "llama_diffusion-stretched5": (
        "llama_diffusion",
        {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
        "Llama",
    ),
    "qwen2_diffusion": ("qwen2_diffusion", {}, "Qwen2"),
    "rnd1": ("rnd1", {}, "Qwen3Moe"),
    "sdar_moe": ("sdar_moe", {}, "Qwen3Moe"),
    "sdar_moe-step": (
        "sdar_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False},
        "Qwen3Moe",
    ),
    "stable_diffcoder": ("stable_diffcoder", {"num_key_value_heads": 4}, "Llama"),
}
"""Name -> our family, changes to its `tiny`, and transformers' class."""


def theirs(kind: str, folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A folder's model as transformers' causal LM of a kind, whatever its config.json calls it."""
    unread = ("model_type", "architectures", "tie_word_embeddings")
    fields = {k: v for k, v in config.items() if k not in unread and v is not None}
    tied = "lm_head.weight" not in load_file(folder / "model.safetensors")
    settings = getattr(transformers, f"{kind}Config")(**fields, tie_word_embeddings=tied)
    name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    plain = {"attn_implementation": "eager"}
    plain |= {"experts_implementation": "eager"} if kind.endswith("Moe") else {}
    model, found = getattr(transformers, name).from_pretrained(
        folder, config=settings, dtype=dtype, output_loading_info=True, **plain
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def seen(length: int, block: int | None, dtype: torch.dtype) -> Tensor:
    """An additive mask `(1, 1, N, N)`: nothing hidden, or later blocks."""
    blocks = torch.zeros(length) if block is None else torch.arange(length) // block
    hidden = blocks[None, :] > blocks[:, None]
    least = torch.finfo(dtype).min
    return torch.zeros(length, length, dtype=dtype).masked_fill(hidden, least)[None, None]


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 5e-4), (torch.float64, 1e-4)])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_own_class(
    case: str, dtype: torch.dtype, off: float, tmp_path: Path
) -> None:
    """In fp64, too, the reference takes norms, angles and softmaxes in fp32."""
    family, changes, kind = CASES[case]
    model = random_model(family, 7, changes=changes, dtype=dtype)
    save_model(model, tmp_path)
    reference = theirs(kind, tmp_path, model.published, dtype)
    block = model.info.block_length
    ids = torch.randint(40, (22,), generator=torch.Generator().manual_seed(2))
    expected = reference(ids[None], attention_mask=seen(22, block, dtype)).logits[0]
    ours = logits_of(model, ids, block)
    torch.testing.assert_close(ours, expected, atol=off, rtol=0)
    causal = reference(ids[None]).logits[0]
    assert (causal - expected).abs().max() > 0.1, "the mask of the reference is not applied"
