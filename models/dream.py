"""Dream-v0, Dream-Coder and DiffuCoder."""

from __future__ import annotations

from collections.abc import Mapping
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
    names: ClassVar[Mapping[str, str]] = QWEN2_NAMES
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "architectures": ["DreamModel"],
        "model_type": "Dream",
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
        config = qwen2_config(files)
        info = model_info(config, "dream", files.special_ids(TOKENS, config.vocab_size), shift=1)
        return cls(config, info, published=files.config, device=device, dtype=dtype)
