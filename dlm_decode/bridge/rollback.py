"""Rolling back the K/V cache of a transformers model: the one place that knows cache classes.

Letters: B rows, L slots of the cache, S slots kept, G key/value heads, K head size. `crop` of
transformers 4 took the length to keep, that of 5 the number to remove; both are avoided: keys and
values are sliced and gathered as tensors `(B, G, L, K)`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dlm_decode.errors import CapabilityError


def new_cache(model: Any) -> DynamicCache:
    """An empty cache of the model's own kind.

    Raises `CapabilityError` for layers whose past cannot be rolled back token by token.
    """
    cache = DynamicCache(config=model.config)
    for place, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise CapabilityError(
                f"layer {place} of {type(model).__name__} keeps its past in a "
                f"{type(layer).__name__}, which cannot forget rejected drafts: take a verifier "
                "with full attention in every layer (or disable its sliding window)"
            )
    return cache


def cache_argument(model: Any) -> str:
    """What `forward` calls its cache: "cache", or "past_key_values" in older versions."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def drop_last(cache: DynamicCache, count: int) -> None:
    """Forget the last `count` slots of every row."""
    for layer in _layers(cache) if count else ():
        layer.keys, layer.values = layer.keys[..., :-count, :], layer.values[..., :-count, :]


def select_slots(cache: DynamicCache, slots: Tensor) -> None:
    """Keep the `slots (B, S)` of each row, in that order."""
    for layer in _layers(cache):
        layer.keys, layer.values = (_gathered(x, slots) for x in (layer.keys, layer.values))


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Keep the rows `(B',)`."""
    for layer in _layers(cache):
        layer.keys, layer.values = layer.keys[rows], layer.values[rows]


def _layers(cache: DynamicCache) -> list[Any]:
    """The layers that hold something; all are of the class that `new_cache` admits."""
    layers: list[Any] = list(cache.layers)
    return [layer for layer in layers if layer.keys is not None]


def _gathered(stored: Tensor, slots: Tensor) -> Tensor:
    index = slots.to(stored.device)[:, None, :, None]
    return torch.gather(stored, 2, index.expand(-1, stored.shape[1], -1, stored.shape[3]))
