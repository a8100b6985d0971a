"""Ending a row early: what wrappers that stop before the last mask is decided have in common.

Letters: B rows, W window (here the whole generated region). Nothing here syncs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import Sampler, Wrapper, layers
from dlm_decode.types import Canvas, Decision, Output


@dataclass(frozen=True)
class EarlyExit(Wrapper):
    """Base of wrappers that fill all masks at once when the margins are large enough.

    The margin of a position is g_i = ln(p_i(1st) / p_i(2nd)), the distance of its two highest
    logits. When the mean over a region reaches a threshold that depends on the row's progress,
    every mask of the row takes its most probable token and the row ends. Derived: the exit waits
    for a turn in which the cache policy computes every mask of the row (with a cache that computes
    the block only: the next refresh), since other masks have no token to take.
    """

    own_scope: ClassVar[str] = "canvas"
    measures: ClassVar[bool] = True

    average: str = option(
        "masked",
        "mean margin of the undecided positions, or (published) of the decided ones too",
        choices=("masked", "all"),
    )

    @property
    def own_needs(self) -> frozenset[str]:
        return frozenset({"p2", "decided"} if self.average == "all" else {"p2"})

    def region(self, canvas: Canvas) -> Tensor:
        """Positions whose margins count, `(B, W)` bool."""
        raise NotImplementedError

    def tau(self, progress: Tensor) -> Tensor:
        """The threshold `(B,)` at a progress `(B,)` between 0 and 1."""
        raise NotImplementedError

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        decision, inner = self.inner_decide(canvas, output, state)
        first = output if output.valid.ndim == 2 else output.branch(0)
        ends = self._settled(canvas, first)
        return filled(canvas, decision, ends, first), state | {"inner": inner}

    def _settled(self, canvas: Canvas, output: Output) -> Tensor:
        """Rows that can be filled now, `(B,)` bool."""
        counted = canvas.masked if self.average == "masked" else canvas.editable
        counted = counted & output.valid & self.region(canvas)
        total = margins(output).masked_fill(~counted, 0.0).sum(-1)
        count = counted.sum(-1)
        reached = total / count.clamp(min=1) >= self.tau(progress(self, canvas))
        complete = (output.valid | ~canvas.masked).all(-1)
        return reached & (count > 0) & complete


def margins(output: Output) -> Tensor:
    """g_i `(B, W)` in nats; finite, and 0 where the engine took away all confidence."""
    g = output.p1.double().log() - output.p2.double().log()
    return g.nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)


def progress(sampler: Sampler, canvas: Canvas) -> Tensor:
    """How far the row is, `(B,)`, 0 to 1.

    The turn, counted from 1, over the steps of the innermost sampler if it has a budget of them;
    else (derived) the share of positions decided.
    """
    steps = getattr(layers(sampler)[-1], "steps", None)
    if steps is None:
        return canvas.progress.double()
    return ((canvas.turn + 1).double() / steps).clamp(max=1.0)


def filled(canvas: Canvas, decision: Decision, rows: Tensor, output: Output) -> Decision:
    """The decision with all masks of `rows (B,)` filled with the most probable tokens.

    These rows end; whatever else was decided for them is dropped.
    """
    whole = rows[:, None]
    scores = decision.scores
    return replace(
        decision,
        tokens=torch.where(whole, output.top1, decision.tokens),
        commit=torch.where(whole, canvas.eligible, decision.commit),
        remask=None if decision.remask is None else decision.remask & ~whole,
        overwrite=None if decision.overwrite is None else decision.overwrite & ~whole,
        fill=rows if decision.fill is None else rows | decision.fill,
        done=rows if decision.done is None else rows | decision.done,
        hold=None if decision.hold is None else decision.hold & ~rows,
        scores=None if scores is None else torch.where(whole, output.p1.to(scores.dtype), scores),
    )


def after(canvas: Canvas, decision: Decision) -> tuple[Tensor, Tensor]:
    """Tokens and masks of the window, each `(B, W)`, once the decision is carried out."""
    commit = decision.commit & canvas.eligible
    if decision.fill is not None:
        commit = commit | (decision.fill[:, None] & canvas.masked)
    decided = canvas.editable & ~canvas.masked
    write, masked = commit, canvas.masked & ~commit
    if decision.overwrite is not None:
        write = write | (decision.overwrite & decided)
    if decision.remask is not None:
        masked = masked | (decision.remask & decided)
    return torch.where(write, decision.tokens, canvas.tokens), masked


def stopped(decision: Decision, rows: Tensor) -> Decision:
    """The decision with `rows (B,)` ended after it; what they leave open becomes the end id."""
    return replace(decision, done=rows if decision.done is None else rows | decision.done)


def is_end(tokens: Tensor, canvas: Canvas) -> Tensor:
    """Where `tokens (B, W)` are one of the model's end ids, `(B, W)` bool."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for end in canvas.end_ids:
        found = found | (tokens == end)
    return found
