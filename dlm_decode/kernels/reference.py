"""The kernel in plain torch: the yardstick, and what runs where nothing faster does."""

from __future__ import annotations

import torch
from torch import Tensor

from dlm_decode.kernels import Drawn, HeadPlan, Law, Scored, TileStats
from dlm_decode.noise import token_gumbel

FLOOR = -1000.0
"""Differences of logits are kept above this, so that none is infinite; e^FLOOR is 0 anyway."""

_GROUP = 64


def tile_stats(logits: Tensor, start: int, scored: Scored, plan: HeadPlan) -> TileStats:
    """A `Kernel`, for any device and dtype."""
    logits = in_statistics_dtype(logits)
    temperature = plan.draw.temperature
    drawn = draw(logits, start, scored, temperature) if temperature > 0 else None
    tempered = law(logits / (temperature or 1.0), start, plan) if plan.tempered else None
    return TileStats(law(logits, start, plan), tempered, drawn)


def in_statistics_dtype(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def law(logits: Tensor, start: int, plan: HeadPlan) -> Law:
    """Statistics of one tile; overwrites `logits`.

    The sum of exponentials is read off the fused softmax, as 1 / p of the best id: one pass where
    exp and sum would take three.
    """
    place = first_argmax(logits)
    column = place[:, None]
    best = logits.gather(1, column)[:, 0]
    p = logits.softmax(-1)
    empty = best.isneginf()
    total = p.gather(1, column)[:, 0].reciprocal_().masked_fill_(empty, 1.0)
    moment = second = second_id = None
    if "entropy" in plan.needs:
        centred = (logits - best[:, None]).clamp_(min=FLOOR)
        moment = (p * centred).sum(-1).mul_(total).masked_fill_(empty, 0.0)
    if plan.second:
        others = logits.scatter_(1, column, -torch.inf)
        second = others.amax(dim=-1)
        second_id = first_argmax(others) + start if "top2" in plan.needs else None
    return Law(best, place + start, second, total, moment, second_id)


def draw(logits: Tensor, start: int, scored: Scored, temperature: float) -> Drawn:
    """The best of logit / T + noise of one tile."""
    stop = start + logits.shape[1]
    noise = token_gumbel(scored.keys, scored.positions, scored.commits, start, stop)
    noisy = logits / temperature + noise
    place = first_argmax(noisy)
    value, logit = (x.gather(1, place[:, None])[:, 0] for x in (noisy, logits))
    return Drawn(value, place + start, logit)


def first_argmax(values: Tensor) -> Tensor:
    """Place `(n,)` of the first greatest value of each row of `values (n, S)`.

    Maxima of groups first, then the group: a plain maximum is many times faster on a CPU than one
    that carries an index along.
    """
    rows, columns = values.shape
    whole = columns // _GROUP * _GROUP
    if whole == 0 or columns != whole:
        return values.argmax(dim=-1)
    group = values.view(rows, -1, _GROUP).amax(dim=-1).argmax(dim=-1)
    inside = values.view(rows, -1, _GROUP).gather(1, group[:, None, None].expand(-1, 1, _GROUP))
    return group * _GROUP + inside[:, 0].argmax(dim=-1)
