"""Stable-DiffCoder: Seed-Coder, a Llama, turned into block diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, model_info
from dlm_decode.models.decoder_config import LLAMA_SUPPORTED, NAMES, TINY, llama_config
from dlm_decode.models.published import Published

ARCHITECTURE = "StableDiffcoderForCausalLM"
MASK = "<[MASK_TOKEN]>"
BLOCK_LENGTH = 4
"""Default of the published `generate` and what its README uses; config.json does not say it."""


@FAMILIES.register("stable_diffcoder")
class StableDiffCoder(Backbone):
    """Stable-DiffCoder: block-causal, blocks from position 0, position i predicts token i.

    Read: the published modelling code and README. Its config.json was not: the end of a text comes
    from there or from the tokenizer.
    """

    paper: ClassVar[str] = "Stable-DiffCoder, github.com/ByteDance-Seed/Stable-DiffCoder"
    names: ClassVar[Mapping[str, str]] = NAMES
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "block_size": 4,
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """By its class: its `model_type` is that of any Llama."""
        return ARCHITECTURE in (config.get("architectures") or ())

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> StableDiffCoder:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(LLAMA_SUPPORTED)
        config = llama_config(files)
        ids = files.special_ids(replace(files.own_tokens(), mask=MASK), config.vocab_size)
        info = replace(
            model_info(config, "stable_diffcoder", ids),
            regime="block_causal",
            block_length=files.number_or("block_size", BLOCK_LENGTH),
            block_origin="absolute",
        )
        return cls(config, info, published=files.config, device=device, dtype=dtype)
