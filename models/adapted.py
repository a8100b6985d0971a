"""Causal LMs adapted to masked diffusion whose files still call them what they were.

DiffuLLaMA is a "llama" to its config.json and Open-dCoder a "qwen2", so that nothing there tells
them from the models they were made of. A field that is added says it: `diffusion_shift`, 1 where
the output at position i predicts token i + 1 (both of these), 0 where it predicts token i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from dlm_decode.errors import CheckpointError
from dlm_decode.models import FAMILIES
from dlm_decode.models.backbone import Backbone, BackboneConfig, model_info
from dlm_decode.models.decoder_config import (
    LLAMA_SUPPORTED,
    QWEN2_NAMES,
    QWEN3_NAMES,
    QWEN3_SUPPORTED,
    SUPPORTED,
    TINY,
    llama_config,
    qwen2_config,
    qwen3_config,
)
from dlm_decode.models.published import Published

SHIFT = "diffusion_shift"

LAYOUTS: Mapping[str, tuple[Mapping[str, Any], Callable[[Published], BackboneConfig]]] = {
    "llama": (LLAMA_SUPPORTED, llama_config),
    "qwen2": (SUPPORTED, qwen2_config),
    "qwen3": (QWEN3_SUPPORTED, qwen3_config),
}
"""`model_type` -> what its config.json may say, and its sizes."""


@FAMILIES.register("adapted")
class Adapted(Backbone):
    """DiffuLLaMA, Open-dCoder and the like: full attention; `diffusion_shift` added to config.json.

    Read: DiffuLLaMA's inference code, Open-dLLM's modelling and generation code. Their special ids
    have to be named by their files, the mask by `mask_token_id` or as the tokenizer's mask token.
    """

    paper: ClassVar[str] = "DiffuLLaMA, arXiv:2410.17891; github.com/pengzhangzhi/Open-dLLM"
    names: ClassVar[Mapping[str, str]] = {**QWEN2_NAMES, **QWEN3_NAMES}
    tiny: ClassVar[Mapping[str, Any]] = {**TINY, "model_type": "llama", SHIFT: 1}

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in LAYOUTS and SHIFT in config

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> Adapted:
        """The model of a config.json, with its weights allocated but not filled."""
        supported, sizes = LAYOUTS[files.config["model_type"]]
        files.require(supported)
        config = sizes(files)
        ids = files.special_ids(files.own_tokens(), config.vocab_size)
        info = model_info(config, "adapted", ids, shift=stated_shift(files))
        return cls(config, info, published=files.config, device=device, dtype=dtype)


def stated_shift(files: Published) -> int:
    """What config.json says of the outputs' shift."""
    shift = files.config.get(SHIFT)
    if type(shift) is not int or shift not in (0, 1):
        raise CheckpointError(f"config.json: {SHIFT} must be 0 or 1, got {shift!r}")
    return shift
