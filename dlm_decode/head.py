"""Statistics of the LM head: one pass over the vocabulary in tiles, without keeping the logits.

Letters: n scored positions (of all rows together), V vocabulary, S columns of a tile. Tiles are
read by a kernel of `dlm_decode.kernels` and merged online (max, sum of exponentials, sum of x e^x,
second best, best drawn id), so memory is bounded by one tile; rows of logits are materialised only
for samplers that declare "logits" and for top-k / top-p. Ties go to the smallest id. Nothing here
syncs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from dlm_decode.kernels import (
    Drawn,
    HeadPlan,
    Law,
    Scored,
    TileStats,
    kernel_for,
    reference,
)
from dlm_decode.kernels.reference import FLOOR, in_statistics_dtype
from dlm_decode.models.prepacked import CHUNK
from dlm_decode.ranks import Ranks, Share
from dlm_decode.tree import flattened, refilled
from dlm_decode.types import Canvas, Draw, Output

Tile = Callable[[int, int], Tensor]
"""Logits `(n, stop - start)` of the vocabulary columns `[start, stop)`, as a tensor of its own."""

_CPU_TILE_BYTES = 1 << 21
_DEVICE_TILE_BYTES = 1 << 26


def statistics(
    tile: Tile, scored: Scored, plan: HeadPlan, share: Share | None = None
) -> dict[str, Tensor]:
    """Every statistic that `plan` asks for, each `(n,)` (logits `(n, V)`); names as in `Output`.

    With a `share` this process reads tiles of its own columns alone, and what all processes found
    is merged as tiles are: the logits are never brought together.
    """
    assert share is None or not plan.by_rows, "the engine refuses what reads whole rows"
    stats = _by_rows(tile, scored, plan) if plan.by_rows else _by_tiles(tile, scored, plan, share)
    return stats if scored.demote_end is None else _demoted(stats, scored.demote_end, plan)


def output_from_logits(
    logits: Tensor, *, needs: frozenset[str], draw: Draw, canvas: Canvas
) -> Output:
    """An `Output` of given `logits (B, W, V)`: for tests and engines that have logits already."""
    rows, width, vocab = logits.shape
    flat = logits.reshape(rows * width, vocab)
    scored = Scored(
        canvas.keys[:, None].expand(rows, width).flatten(),
        canvas.positions.flatten(),
        canvas.commits[:, None].expand(rows, width).flatten(),
    )
    plan = HeadPlan(vocab, needs, draw, canvas.mask_id, canvas.end_ids)
    stats = statistics(lambda start, stop: flat[:, start:stop].clone(), scored, plan)
    shaped = {name: value.reshape(rows, width, *value.shape[1:]) for name, value in stats.items()}
    return Output(shaped | {"valid": torch.ones_like(canvas.masked)})


def tile_width(count: int, plan: HeadPlan, device: torch.device, itemsize: int) -> int:
    """Columns of a tile, so that `count` rows of it fit the tile budget: all of them, a multiple of
    1024, or of 256 where that is too many."""
    budget = plan.tile_bytes or (_CPU_TILE_BYTES if device.type == "cpu" else _DEVICE_TILE_BYTES)
    columns = budget // max(count * itemsize, 1)
    if columns >= plan.vocab_size:
        return plan.vocab_size
    step = CHUNK if columns >= CHUNK else 256
    return max(columns // step * step, 256)


def _by_tiles(tile: Tile, scored: Scored, plan: HeadPlan, share: Share | None) -> dict[str, Tensor]:
    columns = range(plan.vocab_size) if share is None else share.columns
    count = scored.positions.shape[0]
    width = tile_width(count, plan, scored.positions.device, 4)
    merged: TileStats | None = None
    probed: Tensor | None = None
    for start in columns[::width]:
        stop = min(start + width, columns.stop)
        logits = _banned(tile(start, stop), start, scored, plan)
        if scored.probe is not None:
            probed = _probe_tile(probed, logits, start, scored.probe)
        merged = _merge(merged, kernel_for(logits)(logits, start, scored, plan))
    assert merged is not None
    if share is not None:
        merged = reduce(_merge, _gathered(merged, share.ranks))
        probed = None if probed is None else share.ranks.total(probed)
    stats = _named(merged, plan)
    return stats if probed is None else stats | {"probed": probed}


def _by_rows(tile: Tile, scored: Scored, plan: HeadPlan) -> dict[str, Tensor]:
    """Materialise the logits, filter them, and read both distributions off."""
    logits = in_statistics_dtype(_banned(tile(0, plan.vocab_size), 0, scored, plan))
    temperature = plan.draw.temperature
    kept = filtered(logits / (temperature or 1.0), plan.draw)
    raw = reference.law(logits.clone(), 0, plan)
    tempered = reference.law(kept.clone(), 0, plan) if plan.tempered else None
    drawn = None
    if temperature > 0:
        found = reference.draw(kept, 0, scored, 1.0)
        drawn = replace(found, logit=logits.gather(1, found.id[:, None])[:, 0])
        # `_named` divides the raw logit by T again; a drawn id always passes the filters
    stats = _named(TileStats(raw, tempered, drawn), plan)
    if scored.probe is not None:
        stats["probed"] = logits.gather(1, scored.probe)
    return stats | ({"logits": logits} if "logits" in plan.needs else {})


def filtered(logits: Tensor, draw: Draw) -> Tensor:
    """Tempered `logits (n, V)` with ids outside top-p, then outside top-k, set to -inf.

    Top-p keeps the smallest set of most probable ids whose mass reaches p (the id that crosses p
    is kept), then top-k keeps the k largest; as in Dream's published sampler.
    """
    if draw.top_p is not None and draw.top_p < 1:
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        before[:, 0].fill_(0.0)
        outside = torch.empty_like(before, dtype=torch.bool).scatter_(1, order, before > draw.top_p)
        logits = logits.masked_fill(outside, -torch.inf)
    if draw.top_k is not None and draw.top_k < logits.shape[-1]:
        smallest = logits.topk(draw.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    return logits


def _banned(logits: Tensor, start: int, scored: Scored, plan: HeadPlan) -> Tensor:
    """The tile with the mask id, and end ids where they are forbidden, at -inf."""
    stop = start + logits.shape[1]
    if start <= plan.mask_id < stop:
        logits[:, plan.mask_id - start].fill_(-torch.inf)
    if scored.ban_end is not None:
        for end in plan.end_ids:
            if start <= end < stop:
                logits[:, end - start].masked_fill_(scored.ban_end, -torch.inf)
    return logits


def _gathered(found: TileStats, ranks: Ranks) -> list[TileStats]:
    """What every process found, in the order of their ids: one transfer of a few numbers a row.

    All of them travel as fp64, which holds fp32 and ids exactly.
    """
    tensors, _ = flattened(found)
    everyone = ranks.gathered(torch.stack([value.double() for value in tensors]))
    sorts = [value.dtype for value in tensors]
    return [refilled(found, map(Tensor.to, lines, sorts)) for lines in everyone]


def _merge(a: TileStats | None, b: TileStats) -> TileStats:
    """Statistics of two tiles together; `a` has the smaller ids and wins ties."""
    if a is None:
        return b
    tempered = drawn = None
    if a.tempered is not None and b.tempered is not None:
        tempered = _merge_laws(a.tempered, b.tempered)
    if a.drawn is not None and b.drawn is not None:
        drawn = _merge_drawn(a.drawn, b.drawn)
    return TileStats(_merge_laws(a.raw, b.raw), tempered, drawn)


def _merge_laws(a: Law, b: Law) -> Law:
    best = torch.maximum(a.best, b.best)
    safe = best.clamp(min=torch.finfo(best.dtype).min)
    shift_a, shift_b = ((x.best - safe).clamp(min=FLOOR) for x in (a, b))
    scale_a, scale_b = shift_a.exp(), shift_b.exp()
    second = moment = None
    if a.second is not None and b.second is not None:
        second = torch.maximum(torch.minimum(a.best, b.best), torch.maximum(a.second, b.second))
    if a.moment is not None and b.moment is not None:
        moment = scale_a * (a.moment + shift_a * a.total) + scale_b * (b.moment + shift_b * b.total)
    return Law(
        best,
        torch.where(b.best > a.best, b.id, a.id),
        second,
        scale_a * a.total + scale_b * b.total,
        moment,
        _second_id(a, b),
    )


def _second_id(a: Law, b: Law) -> Tensor | None:
    """Second-best id of two tiles together; `a` has the smaller ids and wins ties."""
    if a.second is None or a.second_id is None or b.second is None or b.second_id is None:
        return None
    beside_b = torch.where(a.best >= b.second, a.id, b.second_id)
    beside_a = torch.where(a.second >= b.best, a.second_id, b.id)
    return torch.where(b.best > a.best, beside_b, beside_a)


def _probe_tile(found: Tensor | None, logits: Tensor, start: int, probe: Tensor) -> Tensor:
    """The probed ids' logits `(n, J)`, as far as tiles up to this one hold them."""
    offset = probe - start
    inside = (offset >= 0) & (offset < logits.shape[1])
    values = in_statistics_dtype(logits.gather(1, offset.clamp(0, logits.shape[1] - 1)))
    return torch.where(inside, values, torch.zeros_like(values) if found is None else found)


def _merge_drawn(a: Drawn, b: Drawn) -> Drawn:
    later = b.value > a.value
    return Drawn(
        torch.where(later, b.value, a.value),
        torch.where(later, b.id, a.id),
        torch.where(later, b.logit, a.logit),
    )


def _named(found: TileStats, plan: HeadPlan) -> dict[str, Tensor]:
    """The statistics under the names of `Output`; without tempering q is p."""
    raw, tempered, drawn = found.raw, found.tempered, found.drawn
    stats = {"top1": raw.id, "lse": raw.best + raw.total.log()}
    stats |= _law_stats(raw, "p", drawn, 1.0)
    if raw.second_id is not None:
        stats["top2"] = raw.second_id
    if drawn is not None:
        stats["sampled"] = drawn.id
    if "entropy" in plan.needs:
        stats["entropy"] = stats.pop("p_entropy")
    if "filtered" in plan.needs:
        law = tempered or raw
        scale = plan.draw.temperature or 1.0
        stats |= _law_stats(law, "q", drawn, scale if tempered else 1.0)
    return stats


def _law_stats(law: Law, name: str, drawn: Drawn | None, scale: float) -> dict[str, Tensor]:
    stats = {f"{name}1": 1 / law.total}
    if law.second is not None:
        stats[f"{name}2"] = (law.second - law.best).exp() / law.total
    if law.moment is not None:
        stats[f"{name}_entropy"] = law.total.log() - law.moment / law.total
    if drawn is not None:
        stats[f"{name}_sampled"] = (drawn.logit / scale - law.best).exp() / law.total
    return stats


def _demoted(stats: dict[str, Tensor], where: Tensor, plan: HeadPlan) -> dict[str, Tensor]:
    """Positions of `where` that would take an end id lose all confidence."""
    candidate = stats.get("sampled", stats["top1"])
    is_end = torch.zeros_like(candidate, dtype=torch.bool)
    for end in plan.end_ids:
        is_end |= (candidate == end) & where
    uncertain = math.log(plan.vocab_size)
    lost = {"entropy": uncertain, "q_entropy": uncertain}
    keep = {"top1", "top2", "sampled", "logits", "lse", "probed"}
    return {
        name: value if name in keep else value.masked_fill(is_end, lost.get(name, 0.0))
        for name, value in stats.items()
    }
