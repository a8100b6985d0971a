"""The kernel through torch.compile: a few fused loops over the tile where torch takes a dozen.

The noise may differ from the reference's in the last bit (another logarithm), ids do not but where
two noisy logits are that close. The first call of a process compiles, for a minute or, with
inductor's cache warm, for seconds; calls with other shapes do not compile again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dlm_decode.kernels import Drawn, HeadPlan, Law, Scored, TileStats
from dlm_decode.kernels.reference import FLOOR, in_statistics_dtype
from dlm_decode.noise import token_gumbel


def tile_stats(logits: Tensor, start: int, scored: Scored, plan: HeadPlan) -> TileStats:
    """A `Kernel`, for any device and dtype."""
    temperature = plan.draw.temperature
    raw, tempered, drawn = _fused(plan.second, "entropy" in plan.needs, plan.tempered, temperature)(
        logits, start, scored.keys, scored.positions, scored.commits
    )
    return TileStats(
        Law(*raw) if "top2" in plan.needs else Law(*raw[:5]),
        None if tempered is None else Law(*tempered[:5]),
        None if drawn is None else Drawn(*drawn),
    )


_Parts = tuple[Any, ...]  # tensors, or None for what is not asked for


@cache
def _fused(
    second: bool, moment: bool, tempered: bool, temperature: float
) -> Callable[..., tuple[_Parts, _Parts | None, _Parts | None]]:
    """One compiled function for each kind of plan, for all shapes of tiles."""

    def fused(
        logits: Tensor, start: int, keys: Tensor, positions: Tensor, commits: Tensor
    ) -> tuple[_Parts, _Parts | None, _Parts | None]:
        logits = in_statistics_dtype(logits)
        scaled = logits / (temperature or 1.0)
        drawn = None
        if temperature > 0:
            noise = token_gumbel(keys, positions, commits, start, start + logits.shape[1])
            value, place = _best(scaled + noise)
            drawn = (value, place + start, logits.gather(1, place[:, None])[:, 0])
        other = _law(scaled, start, second, moment) if tempered else None
        return _law(logits, start, second, moment), other, drawn

    return torch.compile(fused, dynamic=True, fullgraph=True)


def _law(logits: Tensor, start: int, second: bool, moment: bool) -> _Parts:
    best, place = _best(logits)
    empty = best.isneginf()
    centred = (logits - best.masked_fill(empty, 0.0)[:, None]).clamp(min=FLOOR)
    weights = centred.exp()
    total = weights.sum(-1).masked_fill(empty, 1.0)
    sums = (weights * centred).sum(-1).masked_fill(empty, 0.0) if moment else None
    runner = runner_id = None
    if second:
        columns = torch.arange(logits.shape[1], device=logits.device)
        runner, at = _best(logits.masked_fill(columns == place[:, None], -torch.inf))
        runner_id = at + start
    return best, place + start, runner, total, sums, runner_id


def _best(values: Tensor) -> tuple[Tensor, Tensor]:
    """Greatest value of each row and the first place of it: two plain reductions."""
    best = values.amax(-1)
    columns = torch.arange(values.shape[1], device=values.device)
    return best, torch.where(values == best[:, None], columns, values.shape[1]).amin(-1)
