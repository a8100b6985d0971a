"""The canvas a sampler sees, built from the rows on the host and sent over in three copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dlm_decode.caches import RowPlan
from dlm_decode.models import DiffusionLM
from dlm_decode.rows import Row
from dlm_decode.samplers import Sampler
from dlm_decode.schedules import Schedule
from dlm_decode.types import Canvas, Draw


def window_width(rows: Sequence[Row], sampler: Sampler, schedule: Schedule) -> int:
    """W for a run: the widest window that any of its rows can have, so shapes never change."""
    if sampler.scope == "canvas":
        return max(row.span.stop - row.span.start for row in rows)
    return max(schedule.widest(row.span) for row in rows)


def window_base(rows: Sequence[Row], sampler: Sampler) -> tuple[int, ...]:
    """First position of each row's window."""
    if sampler.scope == "canvas":
        return tuple(row.span.start for row in rows)
    return tuple(row.window.start for row in rows)


def build_canvas(
    rows: Sequence[Row],
    plans: Sequence[RowPlan],
    base: Sequence[int],
    width: int,
    model: DiffusionLM,
    *,
    wide: bool,
    decided: bool,
    window: bool,
    draw: Draw,
    horizons: Sequence[int],
    reach: Sequence[int],
) -> tuple[Canvas, list[np.ndarray]]:
    """The canvas of `rows`, and for each row the absolute positions whose logits are read.

    Those are the eligible positions, with `wide` (scope "canvas") all masked ones that the plan
    computes, with `decided` the decided editable ones too, and with `window` the window's masked
    ones that are not eligible. Without `wide` nothing beyond a row's own window is marked, or that
    of the branch whose window reaches farthest (`reach`, its end), however wide the windows of the
    rows beside it are.
    """
    count = len(rows)
    whole = np.zeros((2, count, width), dtype=np.int64)
    flags = np.zeros((3, count, width), dtype=bool)
    readable = []
    for i, row in enumerate(rows):
        stop = row.span.stop if wide else reach[i]
        span = slice(base[i], stop)
        size = stop - base[i]
        beyond = row.tokens[base[i] : base[i] + width]  # a query hands back every token of these
        whole[0, i, : len(beyond)] = beyond
        whole[1, i] = np.arange(base[i], base[i] + width)
        computed = np.zeros(row.length, dtype=bool)
        computed[_predicted(plans[i].query, model.info.shift, row.length)] = True
        computed[row.window.start] |= plans[i].lead == "kept"
        eligible = row.masked & computed & _limits(row, reach[i], plans[i])
        flags[0, i, :size] = row.masked[span]
        flags[1, i, :size] = row.editable[span]
        flags[2, i, :size] = eligible[span]
        read = (
            eligible | (_limits(row, reach[i], plans[i]) & row.editable & computed)
            if decided
            else eligible
        )
        if window:
            read = read | (row.masked & computed & _limits(row, reach[i], None))
        if wide:
            read = (row.editable if decided else row.masked) & computed
            read[: base[i]] = read[stop:] = False
        readable.append(np.flatnonzero(read))
    return _canvas(rows, whole, flags, model, draw, horizons), readable


def _predicted(query: np.ndarray, shift: int, length: int) -> np.ndarray:
    """Positions whose logits the outputs at `query` give."""
    found = query + shift
    if shift and len(query) and query[0] == 0:
        found = np.concatenate([[0], found])
    return found[found < length]


def _limits(row: Row, stop: int, plan: RowPlan | None) -> np.ndarray:
    """Positions of the row's window, which ends at `stop`, narrowed by the plan."""
    inside = np.zeros(row.length, dtype=bool)
    inside[row.window.start : stop] = True
    if plan is not None and plan.only is not None:
        inside[: plan.only[0]] = inside[plan.only[1] :] = False
    return inside


def _canvas(
    rows: Sequence[Row],
    whole: np.ndarray,
    flags: np.ndarray,
    model: DiffusionLM,
    draw: Draw,
    horizons: Sequence[int],
) -> Canvas:
    info, device = model.info, model.device
    columns = [_columns(row, horizon) for row, horizon in zip(rows, horizons, strict=True)]
    numbers = np.array([list(column.values()) for column in columns], dtype=np.int64).T
    tokens, positions = torch.from_numpy(whole).to(device, non_blocking=True)
    masked, editable, eligible = torch.from_numpy(flags).to(device, non_blocking=True)
    sent = torch.from_numpy(np.ascontiguousarray(numbers)).to(device, non_blocking=True)
    return Canvas(
        tokens=tokens,
        positions=positions,
        masked=masked,
        editable=editable,
        eligible=eligible,
        **dict(zip(columns[0], sent, strict=True)),
        mask_id=info.mask_id,
        end_ids=info.end_ids,
        vocab_size=info.vocab_size,
        draw=draw,
    )


def _columns(row: Row, horizon: int) -> dict[str, int]:
    """What the canvas holds of a row as a whole, by its names there."""
    return {
        "step": row.step,
        "turn": row.turn,
        "commits": row.commits,
        "block": row.window.index,
        "blocks": row.blocks,
        "block_length": row.span.block_length,
        "start": row.window.start,
        "stop": row.window.stop,
        "remaining": int(row.masked.sum()),
        "total": int(row.editable.sum()),
        "keys": row.key,
        "horizon": horizon,
        "ends_from": row.ends_from(),
    }
