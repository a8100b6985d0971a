"""Inputs on which all statistics kernels have to agree, and a way to run them in another process.

python -m tests.unit.kernel_cases FILE   # statistics of all cases, by the kernel of DLM_KERNELS
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_decode.head import HeadPlan, Scored, statistics
from dlm_decode.types import Draw

ROWS, VOCAB, MASK, ENDS = 3, 9001, 700, (3, 8999)
ALL = frozenset({"p2", "top2", "entropy", "filtered"})
PLANS = {
    "least": HeadPlan(VOCAB, frozenset(), Draw(), MASK, ENDS),
    "greedy": HeadPlan(VOCAB, ALL, Draw(), MASK, ENDS),
    "drawn": HeadPlan(VOCAB, ALL, Draw(0.7), MASK, ENDS),
    "raw": HeadPlan(VOCAB, ALL, Draw(1.0), MASK, ENDS),
    "tiled": HeadPlan(VOCAB, ALL, Draw(0.7), MASK, ENDS, tile_bytes=ROWS * 4 * 4608),
}
"""The last one takes two tiles, of which the first has two parts of `fused.BLOCK` columns."""


@dataclass(frozen=True)
class Case:
    name: str
    logits: Tensor
    scored: Scored
    plan: HeadPlan

    def statistics(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        logits = self.logits if dtype is None else self.logits.to(dtype)
        return statistics(lambda a, b: logits[:, a:b].clone(), self.scored, self.plan)


def logits_of(kind: str) -> Tensor:
    """fp32: smooth; best and second tied; all equal; nearly one-hot; half of them at -inf; bf16."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(ROWS, VOCAB, generator=generator)
    if kind == "ties":
        return (logits.clamp(max=8) * 4).round() / 4
    if kind == "flat":
        return torch.zeros_like(logits)
    if kind == "sharp":
        return logits * 300
    if kind == "hole":
        return logits.index_fill(1, torch.arange(4096), -torch.inf)
    return logits.bfloat16() if kind == "half" else logits


KINDS = ("smooth", "ties", "flat", "sharp", "hole", "half")


def cases() -> Iterator[Case]:
    n = torch.arange(ROWS)
    for kind in KINDS:
        for name, plan in PLANS.items():
            scored = Scored(n * 31 + (5 << 33), n + 40, n % 3, ban_end=n % 2 == 0)
            yield Case(f"{kind}-{name}", logits_of(kind), scored, plan)


if __name__ == "__main__":
    torch.save({case.name: case.statistics() for case in cases()}, sys.argv[1])
