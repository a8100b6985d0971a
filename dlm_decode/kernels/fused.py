"""The kernel in Triton: one read of the logits, in whatever dtype the head gave them.

`_parts` reduces each part of a row, a program each; `_whole` merges the parts of a row in their
order. The parts depend on the tile alone, so a row's statistics are the same alone and in any
batch. Noise is that of `dlm_decode.noise`, computed in registers (Philox 4x32-10); its logarithms
are the device's, so a draw can differ from the reference's where two noisy logits agree in all but
their last bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlm_decode.kernels import Drawn, HeadPlan, Law, Scored, TileStats
from dlm_decode.noise import TOKENS

BLOCK = 4096
"""Columns of a part."""
FLOATS, INTS = 8, 3
"""Numbers of each kind that a part, and a row, has."""
STEP = tl.constexpr(2.0**-32)
INTERPRETED = bool(triton.knobs.runtime.interpret)


def tile_stats(logits: Tensor, start: int, scored: Scored, plan: HeadPlan) -> TileStats:
    """A `Kernel`, for fp32 and half-precision logits on a GPU; `start` is a multiple of 4."""
    logits = logits.contiguous()
    rows, columns = logits.shape
    parts = triton.cdiv(columns, BLOCK)
    floats, ints = _buffers(logits, rows, parts)
    flags = {
        "SECOND": plan.second,
        "MOMENT": "entropy" in plan.needs,
        "TEMPERED": plan.tempered,
        "DRAW": plan.draw.temperature > 0,
    }
    temperature = plan.draw.temperature or 1.0
    found, ids = _buffers(logits, rows, 1)
    width = triton.next_power_of_2(parts)
    with torch.cuda.device_of(logits):  # where kernels start, whichever device is the current one
        _parts[(rows, parts)](
            *(logits, logits.stride(0), columns, start),
            *(scored.keys, scored.positions, scored.commits, temperature, floats, ints),
            STREAM=TOKENS,
            BLOCK=BLOCK,
            num_warps=8,
            **flags,
        )
        _whole[(rows,)](
            floats, ints, found, ids, parts, temperature, PARTS=width, num_warps=1, **flags
        )
    return _named(found, ids + start, plan, temperature)


def _buffers(logits: Tensor, rows: int, parts: int) -> tuple[Tensor, Tensor]:
    """Room for what a kernel stores: `(FLOATS, rows, parts)` and `(INTS, rows, parts)`."""
    shape = (rows, parts)
    floats = torch.empty((FLOATS, *shape), device=logits.device, dtype=torch.float32)
    return floats, torch.empty((INTS, *shape), device=logits.device, dtype=torch.int64)


def _named(floats: Tensor, ids: Tensor, plan: HeadPlan, temperature: float) -> TileStats:
    best, total, moment, second, total_t, moment_t, value, logit = floats[..., 0]
    first, runner, drawn = ids[..., 0]
    has_moment = "entropy" in plan.needs
    raw = Law(
        best,
        first,
        second if plan.second else None,
        total,
        moment if has_moment else None,
        runner if "top2" in plan.needs else None,
    )
    tempered = None
    if plan.tempered:
        runner_up = second / temperature if plan.second else None
        tempered = Law(
            best / temperature, first, runner_up, total_t, moment_t if has_moment else None
        )
    sampled = Drawn(value, drawn, logit) if plan.draw.temperature > 0 else None
    return TileStats(raw, tempered, sampled)


@triton.jit
def _parts(
    logits,
    stride,
    columns,
    start,
    keys,
    positions,
    commits,
    temperature,
    floats,
    ints,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    MOMENT: tl.constexpr,
    TEMPERED: tl.constexpr,
    DRAW: tl.constexpr,
):
    """Statistics of the columns of one part of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    at = row * tl.num_programs(1) + part
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns, other=-float("inf"))
    x = x.to(tl.float32)
    best, place = _first(x, column)
    centred = tl.maximum(x - tl.where(best == -float("inf"), 0.0, best), -1000.0)
    weight = tl.exp(centred)
    tl.store(floats + at, best)
    tl.store(floats + plane + at, tl.sum(weight, 0))
    tl.store(ints + at, place.to(tl.int64))
    if MOMENT:
        tl.store(floats + 2 * plane + at, tl.sum(weight * centred, 0))
    if SECOND:
        second, second_place = _first(tl.where(column == place, -float("inf"), x), column)
        tl.store(floats + 3 * plane + at, second)
        tl.store(ints + plane + at, second_place.to(tl.int64))
    if TEMPERED:
        colder = centred / temperature
        weight = tl.exp(colder)
        tl.store(floats + 4 * plane + at, tl.sum(weight, 0))
        tl.store(floats + 5 * plane + at, tl.sum(weight * colder, 0))
    if DRAW:
        group = (start + part * BLOCK) // 4 + tl.arange(0, BLOCK // 4)
        noise = _noise(
            tl.load(keys + row), group, tl.load(positions + row), tl.load(commits + row), STREAM
        )
        noisy = tl.div_rn(x, tl.zeros_like(x) + temperature) + noise
        value, drawn = _first(noisy, column)
        tl.store(floats + 6 * plane + at, value)
        tl.store(floats + 7 * plane + at, tl.sum(tl.where(column == drawn, x, 0.0), 0))
        tl.store(ints + 2 * plane + at, drawn.to(tl.int64))


@triton.jit
def _whole(
    floats,
    ints,
    found,
    ids,
    parts,
    temperature,
    PARTS: tl.constexpr,
    SECOND: tl.constexpr,
    MOMENT: tl.constexpr,
    TEMPERED: tl.constexpr,
    DRAW: tl.constexpr,
):
    """Statistics of a row from those of its parts."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    plane = rows * parts
    part = tl.arange(0, PARTS)
    at, inside = row * parts + part, part < parts
    low = -float("inf")
    bests = tl.load(floats + at, mask=inside, other=low)
    places = tl.load(ints + at, mask=inside, other=0)
    best, winner = _first(bests, part)
    shift = tl.maximum(bests - tl.where(best == low, 0.0, best), -1000.0)
    scale = tl.exp(shift)
    totals = tl.load(floats + plane + at, mask=inside, other=0.0)
    tl.store(found + row, best)
    tl.store(found + rows + row, tl.where(best == low, 1.0, tl.sum(scale * totals, 0)))
    tl.store(ids + row, tl.sum(tl.where(part == winner, places, 0), 0))
    if MOMENT:
        moments = tl.load(floats + 2 * plane + at, mask=inside, other=0.0)
        tl.store(found + 2 * rows + row, tl.sum(scale * (moments + shift * totals), 0))
    if SECOND:
        runners = tl.load(floats + 3 * plane + at, mask=inside, other=low)
        runner_places = tl.load(ints + plane + at, mask=inside, other=0)
        second, which = _first(tl.where(part == winner, runners, bests), part)
        at_second = tl.where(part == winner, runner_places, places)
        tl.store(found + 3 * rows + row, second)
        tl.store(ids + rows + row, tl.sum(tl.where(part == which, at_second, 0), 0))
    if TEMPERED:
        colder = shift / temperature
        scale = tl.exp(colder)
        totals = tl.load(floats + 4 * plane + at, mask=inside, other=0.0)
        moments = tl.load(floats + 5 * plane + at, mask=inside, other=0.0)
        tl.store(found + 4 * rows + row, tl.where(best == low, 1.0, tl.sum(scale * totals, 0)))
        tl.store(found + 5 * rows + row, tl.sum(scale * (moments + colder * totals), 0))
    if DRAW:
        values = tl.load(floats + 6 * plane + at, mask=inside, other=low)
        chosen = tl.load(floats + 7 * plane + at, mask=inside, other=0.0)
        drawn = tl.load(ints + 2 * plane + at, mask=inside, other=0)
        value, which = _first(values, part)
        tl.store(found + 6 * rows + row, value)
        tl.store(found + 7 * rows + row, tl.sum(tl.where(part == which, chosen, 0.0), 0))
        tl.store(ids + 2 * rows + row, tl.sum(tl.where(part == which, drawn, 0), 0))


@triton.jit
def _first(values, places):
    """The greatest value and the smallest of the places that have it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, places, 2147483647), 0)


@triton.jit
def _noise(key, group, position, commits, STREAM: tl.constexpr):
    """Gumbel noise of four ids for each of the counters `group (G,)`, in their order: `(4 G,)`."""
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    a = group.to(tl.uint32)
    b = tl.zeros_like(a) + position.to(tl.uint32)
    c = tl.zeros_like(a) + commits.to(tl.uint32)
    d = tl.zeros_like(a) + STREAM
    for _ in tl.static_range(10):
        left, right = a, c
        a = tl.umulhi(right, tl.zeros_like(a) + 0xCD9E8D57) ^ b ^ k0
        b = right * 0xCD9E8D57
        c = tl.umulhi(left, tl.zeros_like(a) + 0xD2511F53) ^ d ^ k1
        d = left * 0xD2511F53
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return _gumbel(tl.reshape(words, (4 * a.shape[0],)))


@triton.jit
def _gumbel(words):
    """-log E with E = -log(1 - v), v dense near 0; log(1 - v) without losing small v."""
    v = tl.minimum(
        (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08
    )
    rest = 1.0 - v
    lost = 1.0 - rest
    exponential = tl.where(lost == 0.0, v, -tl.log(rest) * (v / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)
