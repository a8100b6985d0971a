"""Fewer forwards, the same output: lossless self-speculation over any sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.options import option
from dlm_decode.outcome import blend, ended, next_canvas, settle
from dlm_decode.samplers import SAMPLERS, Wrapper, in_window
from dlm_decode.tree import where_rows
from dlm_decode.types import Canvas, Decision, Output, Query


class Walk(NamedTuple):
    """How far each row has come in a turn: its canvas, sampler state and which branch it is."""

    canvas: Canvas
    state: Any
    branch: Tensor
    live: Tensor
    steps: Tensor
    order: Tensor
    scores: Tensor
    fill: Tensor
    done: Tensor


@SAMPLERS.register("self_speculative")
@dataclass(frozen=True)
class SelfSpeculative(Wrapper):
    """Forward several drafted future states at once; accept those the inner would have reached.

    Drafting from the current prediction and exact acceptance along the chain: "Free Draft-and-
    Verification" (FreeDave), arXiv:2510.00294; "Self Speculative Decoding for Diffusion Large
    Language Models" (SSD), arXiv:2510.04147. With T one step of the inner and f a forward, branch 0
    is the canvas itself, D_1; the walk goes from D_a to D_j whenever D_j = T(D_a), by whole states.
    The last f seen gives one more step for nothing, and the next drafts: the inner replayed on
    that prediction held fixed. Tokens and commit order are the inner's own, for any inner that
    decides from the canvas, its state and keyed noise, at any temperature. Derived: exact states
    instead of FreeDave's subsets, so that inners that commit several tokens a step stay lossless.

    A chain ends with its block, before a refresh inside the block, and where the inner, or the end
    of the text, ends the row.
    """

    paper: ClassVar[str] = "FreeDave, arXiv:2510.00294; SSD, arXiv:2510.04147"
    preserves_text: ClassVar[bool] = True

    max_states: int = option(4, "states K forwarded at once, the canvas itself included", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "attention" in self.needs:
            raise OptionError(
                f"self_speculative cannot wrap {SAMPLERS.name_of(self.inner)}: it reads attention, "
                "which branches do not give"
            )

    @property
    def own_needs(self) -> frozenset[str]:
        revokes = "revokes" in self.inner.traits
        return frozenset({"decided"}) if revokes else frozenset()

    def begin(self, canvas: Canvas) -> Any:
        rows, width = canvas.tokens.shape
        return canvas.tokens[:, None].expand(rows, self.max_states, width).clone()

    def query(self, canvas: Canvas, state: Any) -> Query:
        if super().query(canvas, state) is not None:
            name = SAMPLERS.name_of(self.inner)
            hint = "; set dense=true" if name == "credit" else ""
            raise CapabilityError(
                f"self_speculative cannot wrap {name}, which has a query of its own{hint}"
            )
        drafts = self.own_state(canvas, state)
        return Query(torch.cat([canvas.tokens[:, None], drafts[:, 1:]], dim=1), adaptive=True)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        drafts = self.query(canvas, state).tokens
        assert drafts is not None
        branched = output if output.valid.ndim == 3 else _unsqueezed(output)
        walk = _start(canvas, state)
        for _ in range(self.max_states):
            walk = self._step(walk, branched, drafts)
        following, branches = self._drafts(walk, _at(branched, walk.branch))
        decision = _decision(canvas, walk, branches)
        return decision, {"own": following, "inner": walk.state["inner"]}

    def _step(self, walk: Walk, output: Output, drafts: Tensor) -> Walk:
        """Take the inner's step from each live row's state, and see whether it was drafted."""
        seen = _at(output, walk.branch)
        here, live = walk.canvas, walk.live
        decision, inner = self.inner_decide(here, seen, walk.state)
        settled = settle(here, seen, decision)
        there = next_canvas(here, seen, settled)
        written = live[:, None] & (settled.codes > 0)
        scores = seen.p1 if decision.scores is None else decision.scores
        done = walk.done | (live & _flag(decision.done, live))
        stop = done | ended(there, revokes="revokes" in self.inner.traits)
        stop = stop | (there.horizon < 1) | ~(there.masked & in_window(there)).any(-1)
        found, place = _matching(there, drafts, output, here)
        return Walk(
            canvas=blend(live, there, here),
            state=walk.state | {"inner": where_rows(live, inner, walk.state["inner"])},
            branch=torch.where(live & found & ~stop, place, walk.branch),
            live=live & found & ~stop,
            steps=walk.steps + live,
            order=torch.where(written, walk.steps[:, None], walk.order),
            scores=torch.where(written, scores.to(walk.scores.dtype), walk.scores),
            fill=walk.fill | (live & _flag(decision.fill, live)),
            done=done,
        )

    def _drafts(self, walk: Walk, seen: Output) -> tuple[Tensor, Tensor]:
        """Drafts `(B, K, W)` of the next turn, and how many are worth a forward, `(B,)`."""
        canvas, state = walk.canvas, walk.state
        drafts, useful = [canvas.tokens], (canvas.masked & in_window(canvas)).any(-1)
        count = torch.ones_like(walk.steps)
        for _ in range(self.max_states - 1):
            decision, inner = self.inner_decide(canvas, seen, state)
            canvas = next_canvas(canvas, seen, settle(canvas, seen, decision))
            state = state | {"inner": inner}
            drafts.append(canvas.tokens)
            open_ = (canvas.masked & in_window(canvas)).any(-1) & (canvas.horizon >= 1)
            useful = useful & open_ & ~_flag(decision.done, open_)
            count = count + useful
        return torch.stack(drafts, dim=1), count


def _start(canvas: Canvas, state: Any) -> Walk:
    zeros = torch.zeros_like(canvas.commits)
    return Walk(
        canvas=canvas,
        state=state,
        branch=zeros,
        live=torch.ones_like(zeros, dtype=torch.bool),
        steps=zeros,
        order=torch.zeros_like(canvas.tokens),
        scores=torch.zeros_like(canvas.tokens, dtype=torch.float64),
        fill=torch.zeros_like(zeros, dtype=torch.bool),
        done=torch.zeros_like(zeros, dtype=torch.bool),
    )


def _matching(there: Canvas, drafts: Tensor, output: Output, here: Canvas) -> tuple[Tensor, Tensor]:
    """Whether a forwarded draft is the state `there`, and which, each `(B,)`.

    Whole states: every position of the window, and as many commits as the branch's noise assumed.
    """
    same = (drafts == there.tokens[:, None]).all(-1)
    forwarded = output.valid.any(-1)
    changed = (drafts != drafts[:, :1]).sum(-1)
    begun = drafts[:, 0]
    commits = there.commits - here.commits + (here.tokens != begun).sum(-1)
    same = same & forwarded & (changed == commits[:, None])
    return same.any(-1), same.to(torch.int8).argmax(-1)


def _decision(canvas: Canvas, walk: Walk, branches: Tensor) -> Decision:
    """The turn's steps as one decision of the canvas it began with."""
    after = walk.canvas
    changed = (after.tokens != canvas.tokens) & ~after.masked & ~canvas.masked
    return Decision(
        tokens=after.tokens,
        commit=canvas.masked & ~after.masked,
        remask=~canvas.masked & after.masked,
        overwrite=changed,
        fill=walk.fill,
        done=walk.done,
        scores=walk.scores,
        steps=walk.steps,
        order=walk.order,
        commits=after.commits - canvas.commits,
        branches=branches,
    )


def _at(output: Output, branch: Tensor) -> Output:
    """The statistics `(B, W, ...)` of each row's `branch (B,)`."""
    rows = torch.arange(branch.shape[0], device=branch.device)
    return Output({name: value[rows, branch] for name, value in output.stats.items()})


def _unsqueezed(output: Output) -> Output:
    return Output({name: value[:, None] for name, value in output.stats.items()})


def _flag(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if value is None else value
