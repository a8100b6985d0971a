"""What several test files need of the engine, in its plainest form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_decode.models import Attend


def full_attend(lengths: Sequence[int]) -> Attend:
    """Each packed row of `lengths` attends to all of itself and to nothing else."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
        return torch.cat([attention(*row) for row in rows])

    attend.row_runs = [(1, length) for length in lengths]  # type: ignore[attr-defined]
    return attend


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`q (T, H, K)` over `k` and `v` `(S, G, K)`, every key visible; returns `(T, H, K)`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


def row_positions(lengths: Sequence[int]) -> Tensor:
    """Positions `(T,)` of packed rows, each counted from 0."""
    return torch.cat([torch.arange(n) for n in lengths])
