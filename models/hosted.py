"""What families have in common that run transformers' own classes: allocation and tied tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlm_decode.errors import CheckpointError
from dlm_decode.models.published import MOST, MOST_PARTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def allocated(
    auto_class: str, config: Mapping[str, Any], device: torch.device | str, dtype: torch.dtype
) -> PreTrainedModel:
    """The model of a config.json that an auto class of transformers makes, not initialised.

    Its `model_type` chooses the class; code that comes with a checkpoint is never run.
    """
    import transformers
    from transformers.initialization import no_init_weights

    check_sizes(config)
    try:
        with torch.device(device), no_init_weights():
            settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
            net = getattr(transformers, auto_class).from_config(settings, dtype=dtype)
    except Exception as error:  # its checks, and torch's of sizes, raise errors of many kinds
        raise CheckpointError(
            f"config.json: transformers {transformers.__version__} makes no model of it: {error}"
        ) from error
    net.tie_weights()
    return net.eval().requires_grad_(False)


def check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse numbers that transformers would loop over, or allocate, for ever."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_sizes(value)
        most = MOST_PARTS if "layers" in key or "experts" in key else MOST
        if isinstance(value, int) and value > most:
            raise CheckpointError(f"config.json: {key} must be at most {most:,}, got {value!r}")


def tied_names(net: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of `tensors` that are another one again: their name -> the one that is stored."""
    return {
        name: source
        for name, source in net.all_tied_weights_keys.items()
        if tensors.get(name) is not None and tensors[name] is tensors.get(source)
    }
