"""Fast-dLLM v2: Qwen2.5 turned into block diffusion that keeps the shift of its pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, model_info
from dlm_decode.models.decoder_config import (
    QWEN2_NAMES,
    SUPPORTED,
    TINY,
    qwen2_config,
)
from dlm_decode.models.published import Published, SpecialTokens

TOKENS = SpecialTokens(
    mask="|<MASK>|",
    end="<|im_end|>",
    turn="<|endoftext|>",
    vocab_size=152064,
    mask_id=151665,
    end_id=151645,
    turn_id=151643,
)

BLOCK_LENGTH = 32
"""Of the published checkpoints, where config.json has no `bd_size`."""


@FAMILIES.register("fast_dllm_v2")
class FastDLLMv2(Backbone):
    """Fast-dLLM v2: block-causal, blocks from position 0, position i predicts token i + 1.

    A block's first token is predicted by the last position of the block before, which sees nothing
    of the block: it is an autoregressive prediction.
    """

    paper: ClassVar[str] = "Fast-dLLM v2, arXiv:2509.26328"
    names: ClassVar[Mapping[str, str]] = QWEN2_NAMES
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 4,
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "Fast_dLLM_Qwen"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> FastDLLMv2:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(SUPPORTED)
        config = qwen2_config(files, rope_theta=1000000.0)
        ids = files.special_ids(TOKENS, config.vocab_size)
        info = replace(
            model_info(config, "fast_dllm_v2", ids, shift=1),
            regime="block_causal",
            block_length=files.number_or("bd_size", BLOCK_LENGTH),
            block_origin="absolute",
        )
        return cls(config, info, published=files.config, device=device, dtype=dtype)
