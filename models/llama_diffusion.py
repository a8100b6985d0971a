"""Llama converted to diffusion (a2d), by masked or by block diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.decoder_config import LLAMA_SUPPORTED, NAMES, TINY, llama_config
from dlm_decode.models.published import Published
from dlm_decode.models.qwen3_diffusion import Qwen3Diffusion, converted_info

MASK, TURN = "<|mask|>", "<|eot_id|>"


@FAMILIES.register("llama_diffusion")
class LlamaDiffusion(Backbone):
    """Llama converted to masked or block diffusion, like `qwen3_diffusion`.

    Modelling code and tokens as dLLM's conversion has them; no published checkpoint of it was read.
    """

    paper: ClassVar[str] = Qwen3Diffusion.paper
    names: ClassVar[Mapping[str, str]] = NAMES
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "architectures": ["A2DLlamaLMHeadModel"],
        "model_type": "a2d-llama",
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "a2d-llama"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> LlamaDiffusion:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(LLAMA_SUPPORTED)
        config = llama_config(files)
        tokens = replace(files.own_tokens(turn=TURN), mask=MASK)
        info = converted_info(files, config, "llama_diffusion", tokens)
        return cls(config, info, published=files.config, device=device, dtype=dtype)
