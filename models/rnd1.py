"""RND1: Qwen3-30B-A3B, a mixture of experts, turned into masked diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, model_info
from dlm_decode.models.decoder_config import (
    QWEN3_MOE_NAMES,
    QWEN3_SUPPORTED,
    TINY,
    qwen3_moe_config,
)
from dlm_decode.models.published import Published, SpecialTokens

TOKENS = SpecialTokens(
    mask="<|mask|>",
    end="<|im_end|>",
    turn="<|endoftext|>",
    vocab_size=151936,
    mask_id=151669,
    end_id=151645,
    turn_id=151643,
)


@FAMILIES.register("rnd1")
class RND1(Backbone):
    """RND1: full attention, position i predicts token i + 1, 8 of 128 experts a token."""

    paper: ClassVar[str] = "RND1, github.com/RadicalNumerics/RND1"
    names: ClassVar[Mapping[str, str]] = QWEN3_MOE_NAMES
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "model_type": "rnd1",
        "head_dim": 16,
        "intermediate_size": None,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "rnd1"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> RND1:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(QWEN3_SUPPORTED)
        config = qwen3_moe_config(files, renormalise=files.flag("norm_topk_prob", True))
        ids = files.special_ids(TOKENS, config.vocab_size)
        info = model_info(config, "rnd1", ids, shift=1)
        return cls(config, info, published=files.config, device=device, dtype=dtype)
