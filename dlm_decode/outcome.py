"""What a decision does to a canvas: the one place where it is checked and carried out.

Letters: B rows, W window. Nothing here syncs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlm_decode.rows import COMMIT, OVERWRITE, REMASK
from dlm_decode.scores import best
from dlm_decode.types import Canvas, Decision, Output


@dataclass(frozen=True)
class Settled:
    """What happens to each position, `(B, W)`: a code (0: nothing) and the token it then shows.

    Where nothing happens that is the one the sampler had in mind.
    """

    codes: Tensor
    tokens: Tensor


def settle(
    canvas: Canvas, output: Output, decision: Decision, finishing: Tensor | None = None
) -> Settled:
    """The engine's guarantees, applied to a decision; rows of `finishing (B,)` commit all they can.

    Only eligible positions are committed, only decided editable ones from the window's start on are
    changed (no window comes back to what lies before), never to the mask id, and a row that would
    do nothing commits its best position. What is committed without the sampler naming a token takes
    the candidate.
    """
    named = decision.tokens != canvas.mask_id
    commit = decision.commit & canvas.eligible
    if decision.fill is not None:
        commit = commit | (decision.fill[:, None] & canvas.masked & output.valid)
    codes, changes = _changes(canvas, decision, named, finishing)
    chosen = (commit | changes) & named
    idle = ~(commit | changes).any(-1, keepdim=True)
    if decision.hold is not None:
        idle = idle & ~decision.hold[:, None]
    if finishing is not None:
        commit = commit | (finishing[:, None] & canvas.masked & output.valid)
        idle = idle | finishing[:, None]
    commit = commit | (best(output.p1, canvas.eligible) & idle)
    codes = codes.masked_fill(commit, COMMIT)
    tokens = torch.where(chosen | (codes == 0), decision.tokens, output.candidate)
    return Settled(codes, tokens.masked_fill(codes == REMASK, canvas.mask_id))


def permitted(canvas: Canvas, output: Output) -> Output:
    """The output without the masks that this turn may not commit: those read for "window" alone."""
    seen = canvas.eligible | ~canvas.masked
    seen = seen.view(seen.shape[0], *[1] * (output.valid.ndim - 2), seen.shape[1])
    return Output({**output.stats, "valid": output.valid & seen})


def _changes(
    canvas: Canvas, decision: Decision, named: Tensor, finishing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes of overwritten and re-masked positions, and where there are any, each `(B, W)`."""
    decided = canvas.editable & ~canvas.masked & (canvas.positions >= canvas.start[:, None])
    if finishing is not None:
        decided = decided & ~finishing[:, None]
    codes, changes = torch.zeros_like(canvas.tokens), torch.zeros_like(canvas.masked)
    overwrite = None if decision.overwrite is None else decision.overwrite & named
    for wanted, code in ((overwrite, OVERWRITE), (decision.remask, REMASK)):
        if wanted is not None:
            changes = changes | (wanted & decided)
            codes = codes.masked_fill(wanted & decided, code)
    return codes, changes


def next_canvas(canvas: Canvas, output: Output, settled: Settled) -> Canvas:
    """The canvas one step later, in the same window: what the sampler would see of it next turn."""
    written = settled.codes > 0
    set_now = written & (settled.codes != REMASK)
    masked = torch.where(written, settled.codes == REMASK, canvas.masked)
    at = canvas.positions
    inside = (at >= canvas.start[:, None]) & (at < canvas.stop[:, None])
    return replace(
        canvas,
        tokens=torch.where(written, settled.tokens, canvas.tokens),
        masked=masked,
        eligible=masked & inside & output.valid,
        step=canvas.step + 1,
        turn=canvas.turn + 1,
        commits=canvas.commits + set_now.sum(-1),
        remaining=canvas.remaining + masked.sum(-1) - canvas.masked.sum(-1),
        horizon=canvas.horizon - 1,
    )


def blend(rows: Tensor, a: Canvas, b: Canvas) -> Canvas:
    """`a` for `rows (B,)`, `b` for the others, in all that a step changes."""
    wide = rows[:, None]
    return replace(
        b,
        tokens=torch.where(wide, a.tokens, b.tokens),
        masked=torch.where(wide, a.masked, b.masked),
        eligible=torch.where(wide, a.eligible, b.eligible),
        step=torch.where(rows, a.step, b.step),
        turn=torch.where(rows, a.turn, b.turn),
        commits=torch.where(rows, a.commits, b.commits),
        remaining=torch.where(rows, a.remaining, b.remaining),
        horizon=torch.where(rows, a.horizon, b.horizon),
    )


def ended(canvas: Canvas, *, revokes: bool) -> Tensor:
    """Rows `(B,)` that the engine would end: an end id is decided and everything before it too."""
    is_end = torch.zeros_like(canvas.masked)
    for end in canvas.end_ids:
        is_end = is_end | (canvas.tokens == end)
    after = canvas.positions >= canvas.ends_from[:, None]
    open_before = canvas.masked.cumsum(-1) > 0
    found = (is_end & ~canvas.masked & canvas.editable & after & ~open_before).any(-1)
    return found & ~canvas.masked.any(-1) if revokes else found
