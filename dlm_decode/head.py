"""Statistics of the LM head: one pass over the vocabulary in tiles, without keeping the logits.

Letters: n scored positions (of all rows together), V vocabulary, S columns of a tile. Tiles are
merged online (max, sum of exponentials, sum of x e^x, second best, best drawn id), so memory is
bounded by one tile; rows of logits are materialised only for samplers that declare "logits" and
for top-k / top-p. Ties go to the smallest id. Nothing here syncs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlm_decode.noise import token_gumbel
from dlm_decode.types import Canvas, Draw, Output

Tile = Callable[[int, int], Tensor]
"""Logits `(n, stop - start)` of the vocabulary columns `[start, stop)`, as a tensor of its own."""

_CPU_TILE_BYTES = 1 << 22
_DEVICE_TILE_BYTES = 1 << 26
_FLOOR = -1000.0
_GROUP = 64


@dataclass(frozen=True)
class Scored:
    """What identifies the n scored positions: noise keys, positions, commits so far, each `(n,)`.

    `ban_end (n,)` bool, where given, forbids end ids at those positions; `demote_end (n,)` takes
    all confidence from positions whose token would be one, so that they come last. `probe (n, J)`
    are ids whose logits are asked for.
    """

    keys: Tensor
    positions: Tensor
    commits: Tensor
    ban_end: Tensor | None = None
    demote_end: Tensor | None = None
    probe: Tensor | None = None


@dataclass(frozen=True)
class HeadPlan:
    """What to compute: the sampler's needs, the drawing law, and the ids treated specially."""

    vocab_size: int
    needs: frozenset[str]
    draw: Draw
    mask_id: int
    end_ids: tuple[int, ...] = ()
    tile_bytes: int | None = None

    @property
    def tempered(self) -> bool:
        """Whether a second distribution, beside the raw one, is asked for."""
        return "filtered" in self.needs and not self.draw.is_raw

    @property
    def by_rows(self) -> bool:
        """Whether whole rows of logits have to exist at a time."""
        return "logits" in self.needs or self.draw.filters


@dataclass(frozen=True)
class _Law:
    """Running statistics `(n,)` of one distribution: best and second logit, sums, their ids."""

    best: Tensor
    id: Tensor
    second: Tensor | None
    total: Tensor
    moment: Tensor | None
    second_id: Tensor | None = None


@dataclass(frozen=True)
class _Drawn:
    """Running best `(n,)` of logit / T + noise: its value, its id, and that id's logits."""

    value: Tensor
    id: Tensor
    logit: Tensor


def statistics(tile: Tile, scored: Scored, plan: HeadPlan) -> dict[str, Tensor]:
    """Every statistic that `plan` asks for, each `(n,)` (logits `(n, V)`); names as in `Output`."""
    stats = _by_rows(tile, scored, plan) if plan.by_rows else _by_tiles(tile, scored, plan)
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
    """Columns of a tile, a multiple of 256, so that `count` rows of it fit the tile budget."""
    budget = plan.tile_bytes or (_CPU_TILE_BYTES if device.type == "cpu" else _DEVICE_TILE_BYTES)
    columns = budget // max(count * itemsize, 1)
    return max(min(columns, plan.vocab_size) // 256 * 256, 256)


def _by_tiles(tile: Tile, scored: Scored, plan: HeadPlan) -> dict[str, Tensor]:
    count = scored.positions.shape[0]
    width = tile_width(count, plan, scored.positions.device, 4)
    temperature = plan.draw.temperature
    raw: _Law | None = None
    tempered: _Law | None = None
    drawn: _Drawn | None = None
    probed: Tensor | None = None
    for start in range(0, plan.vocab_size, width):
        stop = min(start + width, plan.vocab_size)
        logits = _banned(_statistics_dtype(tile(start, stop)), start, scored, plan)
        if scored.probe is not None:
            probed = _probe_tile(probed, logits, start, scored.probe)
        if temperature > 0:
            drawn = _merge_drawn(drawn, _draw_tile(logits, start, stop, scored, temperature))
        if plan.tempered:
            tempered = _merge(tempered, _tile_law(logits / (temperature or 1.0), start, plan))
        raw = _merge(raw, _tile_law(logits, start, plan))
    assert raw is not None
    stats = _named(raw, tempered, drawn, plan)
    return stats if probed is None else stats | {"probed": probed}


def _by_rows(tile: Tile, scored: Scored, plan: HeadPlan) -> dict[str, Tensor]:
    """Materialise the logits, filter them, and read both distributions off."""
    logits = _banned(_statistics_dtype(tile(0, plan.vocab_size)), 0, scored, plan)
    temperature = plan.draw.temperature
    law = filtered(logits / (temperature or 1.0), plan.draw)
    raw = _tile_law(logits.clone(), 0, plan)
    tempered = _tile_law(law.clone(), 0, plan) if plan.tempered else None
    drawn = None
    if temperature > 0:
        found = _draw_tile(law, 0, plan.vocab_size, scored, 1.0)
        drawn = replace(found, logit=logits.gather(1, found.id[:, None])[:, 0])
        # `_named` divides the raw logit by T again; a drawn id always passes the filters
    stats = _named(raw, tempered, drawn, plan)
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
        before[:, 0] = 0.0
        outside = torch.empty_like(before, dtype=torch.bool).scatter_(1, order, before > draw.top_p)
        logits = logits.masked_fill(outside, -torch.inf)
    if draw.top_k is not None and draw.top_k < logits.shape[-1]:
        smallest = logits.topk(draw.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    return logits


def _statistics_dtype(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _banned(logits: Tensor, start: int, scored: Scored, plan: HeadPlan) -> Tensor:
    """The tile with the mask id, and end ids where they are forbidden, at -inf."""
    stop = start + logits.shape[1]
    if start <= plan.mask_id < stop:
        logits[:, plan.mask_id - start] = -torch.inf
    if scored.ban_end is not None:
        for end in plan.end_ids:
            if start <= end < stop:
                logits[:, end - start].masked_fill_(scored.ban_end, -torch.inf)
    return logits


def _tile_law(logits: Tensor, start: int, plan: HeadPlan) -> _Law:
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
        centred = (logits - best[:, None]).clamp_(min=_FLOOR)
        moment = (p * centred).sum(-1).mul_(total).masked_fill_(empty, 0.0)
    if plan.needs & {"p2", "top2"}:
        others = logits.scatter_(1, column, -torch.inf)
        second = others.amax(dim=-1)
        second_id = first_argmax(others) + start if "top2" in plan.needs else None
    return _Law(best, place + start, second, total, moment, second_id)


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


def _merge(a: _Law | None, b: _Law) -> _Law:
    """Statistics of two tiles together; `a` has the smaller ids and wins ties."""
    if a is None:
        return b
    best = torch.maximum(a.best, b.best)
    safe = best.clamp(min=torch.finfo(best.dtype).min)
    shift_a, shift_b = ((x.best - safe).clamp(min=_FLOOR) for x in (a, b))
    scale_a, scale_b = shift_a.exp(), shift_b.exp()
    second = moment = None
    if a.second is not None and b.second is not None:
        second = torch.maximum(torch.minimum(a.best, b.best), torch.maximum(a.second, b.second))
    if a.moment is not None and b.moment is not None:
        moment = scale_a * (a.moment + shift_a * a.total) + scale_b * (b.moment + shift_b * b.total)
    return _Law(
        best,
        torch.where(b.best > a.best, b.id, a.id),
        second,
        scale_a * a.total + scale_b * b.total,
        moment,
        _second_id(a, b),
    )


def _second_id(a: _Law, b: _Law) -> Tensor | None:
    """Second-best id of two tiles together; `a` has the smaller ids and wins ties."""
    if a.second is None or a.second_id is None or b.second is None or b.second_id is None:
        return None
    beside_b = torch.where(a.best >= b.second, a.id, b.second_id)
    beside_a = torch.where(a.second >= b.best, a.second_id, b.id)
    return torch.where(b.best > a.best, beside_b, beside_a)


def _draw_tile(logits: Tensor, start: int, stop: int, scored: Scored, temperature: float) -> _Drawn:
    noise = token_gumbel(scored.keys, scored.positions, scored.commits, start, stop)
    noisy = logits / temperature + noise
    place = first_argmax(noisy)
    value, logit = (x.gather(1, place[:, None])[:, 0] for x in (noisy, logits))
    return _Drawn(value, place + start, logit)


def _probe_tile(found: Tensor | None, logits: Tensor, start: int, probe: Tensor) -> Tensor:
    """The probed ids' logits `(n, J)`, as far as tiles up to this one hold them."""
    offset = probe - start
    inside = (offset >= 0) & (offset < logits.shape[1])
    values = logits.gather(1, offset.clamp(0, logits.shape[1] - 1))
    return torch.where(inside, values, torch.zeros_like(values) if found is None else found)


def _merge_drawn(a: _Drawn | None, b: _Drawn) -> _Drawn:
    if a is None:
        return b
    later = b.value > a.value
    return _Drawn(
        torch.where(later, b.value, a.value),
        torch.where(later, b.id, a.id),
        torch.where(later, b.logit, a.logit),
    )


def _named(
    raw: _Law, tempered: _Law | None, drawn: _Drawn | None, plan: HeadPlan
) -> dict[str, Tensor]:
    """The statistics under the names of `Output`; without tempering q is p."""
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


def _law_stats(law: _Law, name: str, drawn: _Drawn | None, scale: float) -> dict[str, Tensor]:
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
