"""SDAR and TraDo: Qwen3, dense or with a mixture of experts, turned into block diffusion.

Of the mixture (SDAR-30B-A3B) its modelling code was read (an adapted copy of the published one, and
JetEngine's), not its config.json: what decides its output has to stand there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.errors import CheckpointError
from dlm_decode.models import FAMILIES, ModelInfo
from dlm_decode.models.backbone import Backbone, BackboneConfig, model_info
from dlm_decode.models.decoder_config import (
    QWEN3_MOE_NAMES,
    QWEN3_NAMES,
    QWEN3_SUPPORTED,
    TINY,
    qwen3_config,
    qwen3_moe_config,
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
        return config.get("model_type") == "sdar" and not config.get("num_experts")

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> SDAR:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(QWEN3_SUPPORTED)
        config = qwen3_config(files)
        info = block_causal(files, config, "sdar", files.number_or("block_size", 4))
        return cls(config, info, published=files.config, device=device, dtype=dtype)


@FAMILIES.register("sdar_moe")
class SDARMoE(Backbone):
    """SDAR-30B-A3B: as `sdar`, with 8 of 128 experts a token.

    Its config.json must have `block_size` (4 where the checkpoint's name has none, 32 in those that
    end in -b32) and `norm_topk_prob`.
    """

    paper: ClassVar[str] = "SDAR, arXiv:2510.06303"
    names: ClassVar[Mapping[str, str]] = QWEN3_MOE_NAMES
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "architectures": ["SDARMoeForCausalLM"],
        "model_type": "sdar_moe",
        "num_hidden_layers": 3,
        "head_dim": 8,
        "block_size": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """By its experts, too, should it be called as the dense ones are."""
        kind = config.get("model_type")
        return kind == "sdar_moe" or (kind == "sdar" and bool(config.get("num_experts")))

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> SDARMoE:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(QWEN3_SUPPORTED)
        renormalise = files.config.get("norm_topk_prob")
        if not isinstance(renormalise, bool):
            raise CheckpointError(
                "config.json: norm_topk_prob must be true or false, for it decides how experts are "
                f"weighed, got {renormalise!r}"
            )
        config = qwen3_moe_config(files, renormalise=renormalise)
        info = block_causal(files, config, "sdar_moe", files.number("block_size"))
        return cls(config, info, published=files.config, device=device, dtype=dtype)


def block_causal(files: Published, config: BackboneConfig, family: str, block: int) -> ModelInfo:
    """SDAR's attention, and its ids."""
    return replace(
        model_info(config, family, files.special_ids(TOKENS, config.vocab_size)),
        regime="block_causal",
        block_length=block,
        block_origin="absolute",
    )
