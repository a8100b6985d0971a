"""The device part of a turn: from the forward to what was decided, as one function of tensors.

Forward, statistics, decision, the engine's guarantees and the sampler's new memory: no value is
read on the host in between and none is sent from there, and what the function does follows from the
structure of its argument alone. So it can run as it is, anywhere, or be captured as a CUDA graph
(`dlm_decode.graphs`). Letters as in `dlm_decode.types`; n scored positions, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dlm_decode.attention import PackedAttention, Watch
from dlm_decode.head import HeadPlan, Scored, statistics
from dlm_decode.kv import KVStore
from dlm_decode.models import DiffusionLM, SelfConditioned, share_of
from dlm_decode.outcome import Settled, permitted, settle
from dlm_decode.packing import Leads, Packed
from dlm_decode.rows import TurnRecord
from dlm_decode.samplers import Sampler
from dlm_decode.schedules import Schedule
from dlm_decode.types import Canvas, Decision, Draw, Output, Query


@dataclass(frozen=True)
class Turn:
    """All that the device part reads: a tree, see `dlm_decode.tree`.

    `memory` is the sampler's state, `finishing (B,)` marks rows that have to commit all they can,
    `ban_end` and `demote_end` `(n,)` are as in `Scored`, `shadows (n,)` are the packed tokens that
    shadow the scored positions, `kept (m, D)` the outputs kept from earlier turns, `branches` is R.
    """

    canvas: Canvas
    memory: Any
    query: Query | None
    packed: Packed
    finishing: Tensor
    ban_end: Tensor | None = None
    demote_end: Tensor | None = None
    watch: Watch | None = None
    shadows: Tensor | None = None
    kept: Tensor | None = None
    branches: int = 1


@dataclass(frozen=True)
class DevicePart:
    """What a turn computes with: called with a `Turn` and the K/V store, which it writes into."""

    model: DiffusionLM
    sampler: Sampler
    schedule: Schedule
    draw: Draw
    cfg_scale: float = 0.0

    def __call__(self, turn: Turn, store: KVStore | None) -> tuple[Tensor, Any, Tensor | None]:
        """All that was decided, for `Outcome.received`, the sampler's new memory, and the outputs
        to be kept, `(rows, lanes, D)` of those rows that keep any."""
        canvas = turn.canvas
        output, hidden, attend = self._output(turn, store)
        focus = self.schedule.focus(canvas, output)
        if focus is not None:
            canvas = _focused(canvas, focus)
        decision, memory = self.sampler.decide(canvas, output, turn.memory)
        if decision.winner is not None:
            attend.choose(decision.winner)
        first = output if turn.branches == 1 else output.branch(0)
        if "window" in self.sampler.needs and self.sampler.scope == "block":
            first = permitted(canvas, first)
        settled = settle(canvas, first, decision, turn.finishing)
        outcome = _outcome(canvas, settled, first, decision, focus)
        return outcome, memory, _led(turn.packed.leads, hidden, decision.winner)

    def _output(self, turn: Turn, store: KVStore | None) -> tuple[Output, Tensor, PackedAttention]:
        """The forward's statistics laid out over the windows, its outputs `(T, D)`, how it went."""
        packed = turn.packed
        attend = PackedAttention(
            packed.groups,
            store,
            packed.write_from,
            packed.write_to,
            write_all=packed.write_all,
            watch=turn.watch,
            windows=packed.windows,
            ragged=packed.ragged,
            choice=packed.choice,
        )
        hidden = self._hidden(turn, attend)
        scored = _scored(turn)
        read = hidden if turn.kept is None else torch.cat([hidden, turn.kept])
        stats = self._statistics(read, packed, scored)
        if turn.shadows is not None:
            stats |= self._shadow_statistics(hidden[turn.shadows], scored)
        if attend.watched is not None:
            stats["attention"] = self._attention(attend.watched.to(self.model.device))
        rows, width = turn.canvas.tokens.shape
        shape = (rows, width) if turn.branches == 1 else (rows, turn.branches, width)
        output = Output({k: _spread(v, packed.scatter, shape) for k, v in stats.items()})
        return output, hidden, attend

    def _hidden(self, turn: Turn, attend: PackedAttention) -> Tensor:
        """The forward itself, with what the model believed before where it wants to know."""
        packed, query, model = turn.packed, turn.query, self.model
        ids, embeds = self._inputs(packed, query)
        beliefs = None if query is None else query.beliefs
        places, target = packed.window_from, packed.window_to
        if not model.info.self_conditioned or beliefs is None or places is None or target is None:
            return model.forward(ids, packed.positions, attend, embeds=embeds)
        told = target, beliefs.flatten(0, -2)[places]
        hosted = cast("SelfConditioned", model)
        return hosted.forward(ids, packed.positions, attend, embeds=embeds, beliefs=told)

    def _inputs(self, packed: Packed, query: Query | None) -> tuple[Tensor, Tensor | None]:
        """Packed ids, with the query's own window contents put in, and embeddings if it has any."""
        ids, places, target = packed.ids, packed.window_from, packed.window_to
        if query is None or places is None or target is None:
            return ids, None
        if query.tokens is not None:
            ids = ids.index_copy(0, target, query.tokens.reshape(-1)[places])
        if query.mix_ids is None or query.mix_weights is None:
            return ids, None
        hard = self.model.embedding(ids)
        weights = query.mix_weights.flatten(0, -2)[places].to(hard.dtype)
        parts = self.model.embedding(query.mix_ids.flatten(0, -2)[places])
        mixed = torch.einsum("njd,nj->nd", parts, weights)
        mixed = torch.where((weights > 0).any(-1, keepdim=True), mixed, hard[target])
        return ids, hard.index_copy(0, target, mixed)

    def _attention(self, watched: Tensor) -> Tensor:
        """The mean over all heads; each process that shares the model watched as many of them."""
        share = share_of(self.model)
        return watched if share is None else torch.stack(share.ranks.gathered(watched)).mean(0)

    def _statistics(self, hidden: Tensor, packed: Packed, scored: Scored) -> dict[str, Tensor]:
        """Statistics of the scored positions, each `(n, ...)`."""
        info, needs = self.model.info, self.sampler.needs
        lanes = [hidden.index_select(0, read) for read in packed.read]
        plan = HeadPlan(info.vocab_size, needs, self.draw, info.mask_id, info.end_ids)
        stats = statistics(self._tile(lanes), scored, plan, share_of(self.model))
        if "hidden" in needs:
            stats["hidden"] = lanes[0]
        stats["valid"] = torch.ones_like(packed.scatter, dtype=torch.bool)
        return stats

    def _shadow_statistics(self, hidden: Tensor, scored: Scored) -> dict[str, Tensor]:
        """What the shadows predict, under the names of `Output` behind "shadow_"."""
        info = self.model.info
        plan = HeadPlan(info.vocab_size, frozenset(), Draw(), info.mask_id, info.end_ids)
        plain = replace(scored, demote_end=None)
        stats = statistics(self._tile([hidden]), plain, plan, share_of(self.model))
        return {f"shadow_{name}": value for name, value in stats.items()}

    def _tile(self, lanes: Sequence[Tensor]) -> Callable[[int, int], Tensor]:
        """The LM head on one vocabulary tile, guidance applied."""
        model, scale = self.model, self.cfg_scale
        if len(lanes) == 1:
            return lambda start, stop: model.logits(lanes[0], start, stop)

        def guided(start: int, stop: int) -> Tensor:
            conditional, free = (model.logits(lane, start, stop) for lane in lanes)
            return free + (scale + 1) * (conditional - free)

        return guided


def _led(leads: Leads | None, hidden: Tensor, winner: Tensor | None) -> Tensor | None:
    """The outputs before the windows, those of the branch `winner (B,)` of each row."""
    if leads is None:
        return None
    tokens = leads.tokens[..., 0]
    if winner is not None:
        of_row = winner[leads.row][:, None, None].expand(*tokens.shape, 1)
        tokens = leads.tokens.gather(-1, of_row)[..., 0]
    return hidden[tokens]


def _scored(turn: Turn) -> Scored:
    """Noise keys and end-of-text policies of the scored positions, and whatever for padded ones."""
    canvas, query = turn.canvas, turn.query
    rows, width = canvas.tokens.shape
    flat = turn.packed.scatter.clamp(max=rows * turn.branches * width - 1)
    row, place = flat // (width * turn.branches), flat % width
    commits = canvas.commits[row]
    if query is not None and query.tokens is not None:
        filled = (query.tokens != canvas.tokens[:, None]) & (query.tokens != canvas.mask_id)
        filled = filled & canvas.editable[:, None]
        commits = commits + filled.sum(-1).reshape(-1)[flat // width]
    return Scored(
        canvas.keys[row],
        canvas.positions[row, place],
        commits,
        turn.ban_end,
        turn.demote_end,
        None if query is None or query.probe is None else query.probe[row, place],
    )


def _spread(values: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`values (n, ...)` put at flat `places (n,)` of a zero tensor `(*shape, ...)`.

    The place behind the last takes what is nobody's.
    """
    rest, total = values.shape[1:], torch.Size(shape).numel()
    spread = values.new_zeros((total + 1, *rest)).index_copy_(0, places, values)
    return spread[:total].reshape(*shape, *rest)


def _focused(canvas: Canvas, stop: Tensor) -> Canvas:
    eligible = canvas.eligible & (canvas.positions < stop[:, None])
    return replace(canvas, eligible=eligible, stop=stop)


def _outcome(
    canvas: Canvas, settled: Settled, output: Output, decision: Decision, focus: Tensor | None
) -> Tensor:
    """All that a turn decided, as one flat int64 tensor for a single transfer; see `Outcome`."""
    scores = output.p1 if decision.scores is None else decision.scores
    sure = scores.float().view(torch.int32).to(torch.int64)
    nothing = torch.zeros_like(settled.codes)
    order = nothing if decision.order is None else decision.order
    unset = torch.full_like(canvas.commits, -1)
    per_row = [
        unset if value is None else value.to(torch.int64)
        for value in (
            decision.done,
            decision.stay,
            focus,
            decision.steps,
            decision.commits,
            decision.branches,
            decision.winner,
        )
    ]
    planes = (settled.codes, settled.tokens, sure, order)
    ahead = [] if decision.ahead is None else [decision.ahead.T.reshape(-1)]
    return torch.cat([*(plane.reshape(-1) for plane in planes), *per_row, *ahead])


@dataclass(frozen=True)
class Outcome:
    """What was decided, on the host: arrays `(B, W)`, and per row `(B,)`, -1 where not given.

    `ahead` is `(B, k)`, k = 0 if not given.
    """

    codes: np.ndarray
    tokens: np.ndarray
    sure: np.ndarray
    order: np.ndarray
    done: np.ndarray
    stay: np.ndarray
    stop: np.ndarray
    steps: np.ndarray
    commits: np.ndarray
    branches: np.ndarray
    winner: np.ndarray
    ahead: np.ndarray

    @classmethod
    def received(cls, flat: Tensor, rows: int, width: int) -> Outcome:
        """The one host sync of a turn is the transfer that made `flat`."""
        size = 4 * rows * width
        planes = flat[:size].reshape(4, rows, width)
        sure = planes[2].to(torch.int32).view(torch.float32).numpy()
        codes, tokens, _, order = planes.numpy()
        numbers = flat[size:].reshape(-1, rows).numpy()
        done, stay, stop, steps, commits, branches, winner = numbers[:7]
        per_row = done, stay, stop, steps, commits, branches, winner, numbers[7:].T
        return cls(codes, tokens, sure, order, *per_row)

    def of_row(self, i: int) -> TurnRecord:
        commits = int(self.commits[i])
        return TurnRecord(
            self.codes[i],
            self.tokens[i],
            self.sure[i],
            self.order[i],
            max(int(self.steps[i]), 1),
            None if commits < 0 else commits,
        )
