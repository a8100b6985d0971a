"""Verify the draft as a block: the longest prefix whose joint probability ratio passes its test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dlm_decode.bridge.rules import RULES
from dlm_decode.bridge.rules.rejection import Rejection


@RULES.register("block")
@dataclass(frozen=True)
class Block(Rejection):
    """Accept the longest prefix i with eta_i <= h_i, eta independent uniform numbers.

    pi_0 = 1, pi_i = min(pi_{i-1} p_i(x_i) / q_i(x_i), 1), s_i = sum_x max(pi_i p_{i+1}(x) -
    q_{i+1}(x), 0), h_i = s_i / (s_i + 1 - pi_i) for i < g and h_g = pi_g; then a draw from
    norm(max(pi_i p_{i+1} - q_{i+1}, 0)). Never accepts less than `rejection` on average; the same
    where q is one-hot (Sun et al., Block Verification Accelerates Speculative Decoding,
    arXiv:2403.10444).
    """

    paper: ClassVar[str] = "Block verification, arXiv:2403.10444"

    def chances(self, p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
        joint = _joint(p, q, tokens)
        rest = (joint[1:-1, None] * p[1:-1] - q[1:]).clamp(min=0.0).sum(-1)
        inner = rest / (rest + 1 - joint[1:-1]).clamp(min=torch.finfo(p.dtype).tiny)
        return torch.cat([inner, joint[-1:]])[: len(tokens)]

    def accepted(self, passed: Tensor) -> int:
        places = passed.nonzero()
        return int(places.max()) + 1 if len(places) else 0

    def counts(self, chances: Tensor) -> Tensor:
        later = torch.cat([(1 - chances).flip(0).cumprod(0).flip(0), chances.new_ones(1)])
        return later * torch.cat([chances.new_ones(1), chances])

    def residual(self, p: Tensor, q: Tensor, tokens: Tensor, accepted: int) -> Tensor:
        if accepted == len(tokens):
            return p[accepted]
        weights = (_joint(p, q, tokens)[accepted] * p[accepted] - q[accepted]).clamp(min=0.0)
        return weights / weights.sum()


def _joint(p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """pi_0 .. pi_g `(g + 1,)`."""
    places = tokens[:, None]
    ratios = (p[:-1].gather(1, places) / q.gather(1, places))[:, 0].tolist()
    values = [1.0]
    for ratio in ratios:
        values.append(min(values[-1] * ratio, 1.0))
    return torch.tensor(values, dtype=p.dtype, device=p.device)
