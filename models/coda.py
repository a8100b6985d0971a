"""CoDA: Qwen3-1.7B turned into masked diffusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, model_info
from dlm_decode.models.decoder_config import QWEN3_NAMES, QWEN3_SUPPORTED, TINY, qwen3_config
from dlm_decode.models.published import Published


@FAMILIES.register("coda")
class CoDA(Backbone):
    """CoDA: full attention, position i predicts token i + 1.

    Its causal mask is never applied, and its head is stored apart from the embeddings whatever
    `tie_word_embeddings` says: its code never ties them. Read: the published modelling code and the
    defaults of its configuration, which the special ids are where the files name none.
    """

    paper: ClassVar[str] = "CoDA, github.com/SalesforceAIResearch/CoDA"
    names: ClassVar[Mapping[str, str]] = QWEN3_NAMES
    tiny: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "architectures": ["CoDALanguageModel"],
        "model_type": "CoDA",
        "head_dim": 8,
        "tie_word_embeddings": True,
    }

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "CoDA"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> CoDA:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(QWEN3_SUPPORTED)
        config = replace(qwen3_config(files), tied=False)
        tokens = replace(
            files.own_tokens(turn="<|im_end|>"),
            vocab_size=151936,
            mask_id=151669,
            end_id=151645,
            turn_id=151643,
        )
        info = model_info(config, "coda", files.special_ids(tokens, config.vocab_size), shift=1)
        return cls(config, info, published=files.config, device=device, dtype=dtype)
