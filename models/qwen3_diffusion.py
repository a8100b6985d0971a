"""Qwen3 and Qwen2.5 models converted to diffusion (a2d), by masked or by block diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES, ModelInfo
from dlm_decode.models.backbone import Backbone, BackboneConfig, model_info
from dlm_decode.models.decoder_config import (
    QWEN2_NAMES,
    QWEN3_NAMES,
    QWEN3_SUPPORTED,
    SUPPORTED,
    TINY,
    qwen2_config,
    qwen3_config,
)
from dlm_decode.models.published import Published, SpecialTokens

QWEN3_TOKENS = SpecialTokens(
    mask="<|mask|>",
    end="<|im_end|>",
    turn="<|endoftext|>",
    vocab_size=151936,
    mask_id=151669,
    end_id=151645,
    turn_id=151643,
)

QWEN2_TOKENS = replace(QWEN3_TOKENS, mask_id=151665)
"""Derived: the mask is the first token after the 22 that Qwen2.5 adds to its vocabulary."""


@FAMILIES.register("qwen3_diffusion")
class Qwen3Diffusion(Backbone):
    """Qwen3 converted to masked or (`block_size` in config.json) block diffusion, without a shift.

    The published conversions by block diffusion have the masked ones' config.json: `block_size`
    has to be added to it (32 in their README). Their blocks are counted from the end of the prompt
    on, in both directions, which is what padding its left side to whole blocks comes to.
    """

    paper: ClassVar[str] = "dLLM, github.com/ZHZisZZ/dllm; BD3-LM, arXiv:2503.09573"
    names: ClassVar[Mapping[str, str]] = QWEN3_NAMES
    tiny: ClassVar[Mapping[str, Any]] = {**TINY, "model_type": "a2d-qwen3", "head_dim": 8}

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "a2d-qwen3"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> Qwen3Diffusion:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(QWEN3_SUPPORTED)
        config = qwen3_config(files)
        info = converted_info(files, config, "qwen3_diffusion", QWEN3_TOKENS)
        return cls(config, info, published=files.config, device=device, dtype=dtype)


@FAMILIES.register("qwen2_diffusion")
class Qwen2Diffusion(Backbone):
    """Qwen2.5 converted to masked or block diffusion, like `qwen3_diffusion`."""

    paper: ClassVar[str] = Qwen3Diffusion.paper
    names: ClassVar[Mapping[str, str]] = QWEN2_NAMES
    tiny: ClassVar[Mapping[str, Any]] = {**TINY, "model_type": "a2d-qwen2"}

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "a2d-qwen2"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> Qwen2Diffusion:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(SUPPORTED)
        config = qwen2_config(files, rope_theta=1000000.0)
        info = converted_info(files, config, "qwen2_diffusion", QWEN2_TOKENS)
        return cls(config, info, published=files.config, device=device, dtype=dtype)


def converted_info(
    files: Published, config: BackboneConfig, family: str, tokens: SpecialTokens
) -> ModelInfo:
    """Block-causal where config.json has a `block_size`, else full attention."""
    info = model_info(config, family, files.special_ids(tokens, config.vocab_size))
    if files.config.get("block_size") is None:
        return info
    return replace(info, regime="block_causal", block_length=files.number("block_size"))
