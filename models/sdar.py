"""SDAR and TraDo: Qwen3 turned into block diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, model_info
from dlm_decode.models.decoder_config import (
    QWEN3_NAMES,
    QWEN3_SUPPORTED,
    TINY,
    qwen3_config,
)
from dlm_decode.models.published import Published, SpecialTokens

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
    names: ClassVar[Mapping[str, str]] = QWEN3_NAMES
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "head_dim": 8,
        "block_size": 4,
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
        files.require(QWEN3_SUPPORTED)
        config = qwen3_config(files)
        info = replace(
            model_info(config, "sdar", files.special_ids(TOKENS, config.vocab_size)),
            regime="block_causal",
            block_length=files.number_or("block_size", 4),
            block_origin="absolute",
        )
        return cls(config, info, published=files.config, device=device, dtype=dtype)
