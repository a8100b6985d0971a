"""Weights laid out once for the CPU's matrix kernels, not anew at every product.

A product of a large matrix with few tokens, which is what a window forward and the LM head are,
spends as long on bringing the matrix into a kernel's own order as on multiplying. oneDNN can keep
that order, in a copy: the model then takes up to twice its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_decode.errors import CapabilityError

CHUNK = 1024
"""Rows of a weight that is read in tiles: its copy is in pieces of as many."""

_TOKENS = 32
_KEPT = "_prepacked"


@dataclass(frozen=True)
class _Prepacked:
    """Copies of `chunk` of the first `rows` rows each; good while the weight is at `version`."""

    parts: tuple[Any, ...]
    rows: int
    chunk: int
    version: int


def prepack(weight: Tensor, rows: int | None = None) -> None:
    """Keep a copy of `weight (F, D)` for `linear`; of its first `rows` for `columns`, if given.

    Raises as `check_prepackable` does.
    """
    check_prepackable(weight)
    chunk, rows = (len(weight), len(weight)) if rows is None else (CHUNK, rows)
    with torch.inference_mode():
        parts = tuple(
            torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), _TOKENS)
            for part in weight.detach()[:rows].split(chunk)
        )
    setattr(weight, _KEPT, _Prepacked(parts, rows, chunk, weight._version))


def check_prepackable(weight: Tensor) -> None:
    """Raise `CapabilityError` where there is no such kernel: not in fp32, or not on a CPU."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not _available():
        raise CapabilityError(
            f"weights are prepacked for products in float32 on a CPU with oneDNN, and these are "
            f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}: leave prepack out"
        )


def prepacked_bytes(model: nn.Module) -> int:
    """Bytes of the copies that a model's weights have."""
    return sum(p.nbytes for p in model.parameters() if hasattr(p, _KEPT))


def forget(model: nn.Module) -> None:
    """Drop the copies of a model's weights."""
    for weight in model.parameters():
        if hasattr(weight, _KEPT):
            delattr(weight, _KEPT)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x (..., D)` times `weight (F, D)` transposed: `torch.nn.functional.linear`."""
    kept = _usable(x, weight)
    if kept is None or len(kept.parts) > 1:
        return F.linear(x, weight, bias)
    return _product(x, kept.parts[0], bias)


def columns(x: Tensor, weight: Tensor, start: int, stop: int) -> Tensor:
    """The columns `[start, stop)` of `linear(x, weight)`, `(n, stop - start)`.

    The copy serves those that begin and end where its chunks do, or at its own end.
    """
    kept = _usable(x, weight)
    if kept is None or start % kept.chunk or (stop % kept.chunk and stop != kept.rows):
        return F.linear(x, weight[start:stop])
    parts = kept.parts[start // kept.chunk : -(-stop // kept.chunk)]
    return torch.cat([_product(x, part, None) for part in parts], dim=-1)


def _usable(x: Tensor, weight: Tensor) -> _Prepacked | None:
    kept: _Prepacked | None = getattr(weight, _KEPT, None)
    if kept is None or torch.compiler.is_compiling() or x.dtype != torch.float32 or not x.numel():
        return None
    grows = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return None if grows or kept.version != weight._version else kept


def _product(x: Tensor, part: Any, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, part, bias, "none", [], "")
    return found


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
