"""Fewer forwards, the same output: lossless self-speculation over any sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dlm_decode.drafts import (
    BUNDLED_GRAPH,
    DraftGraph,
    instantiate,
    odds,
    read_graph,
    worthwhile,
)
from dlm_decode.errors import OptionError
from dlm_decode.options import option
from dlm_decode.outcome import blend, ended, next_canvas, permitted, settle
from dlm_decode.samplers import SAMPLERS, Sampler, Wrapper, in_window, layers
from dlm_decode.tree import where_rows
from dlm_decode.types import Canvas, Decision, Output, Query


class Walk(NamedTuple):
    """How far each row has come in a turn: its canvas, sampler state and which branch it is."""

    canvas: Canvas
    state: Any
    branch: Tensor
    live: Tensor
    written: Tensor
    steps: Tensor
    order: Tensor
    scores: Tensor
    fill: Tensor
    done: Tensor
    stay: Tensor


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
    of the text, ends the row. A step that writes a position again waits for the next turn, so that
    the trace shows both. `drafter=graph` takes the drafts from a calibrated graph (Spiffy,
    arXiv:2509.18085), see `DraftGraph`. `min_acceptance` and `row_cost` keep improbable drafts from
    being forwarded, see `worthwhile`, and `most_tokens` those for which a large batch leaves no
    room: a forward takes as long for few tokens as for so many (on GPUs about 120 to 240, the
    ratio of arithmetic to bandwidth). None of them changes what is decided.
    """

    paper: ClassVar[str] = (
        "FreeDave, arXiv:2510.00294; SSD, arXiv:2510.04147; Spiffy, arXiv:2509.18085"
    )
    preserves_text: ClassVar[bool] = True
    outermost: ClassVar[bool] = True

    max_states: int = option(
        4, "states K forwarded at once, the canvas itself included", low=1, high=1024
    )
    drafter: str = option(
        "chain",
        "which states to draft: those the inner would reach, or those of a graph (Spiffy)",
        choices=("chain", "graph"),
    )
    graph: str | None = option(
        None, "file of a draft graph (none: one learnt from the bundled model)"
    )
    min_acceptance: float = option(
        0.0, "forward no draft less probable than this; 0 forwards all", low=0.0, high=1.0
    )
    row_cost: float = option(
        0.0, "what one more state costs, relative to a forward of one; 0 drafts all", low=0.0
    )
    most_tokens: int | None = option(
        None,
        "draft no more states than keep the windows of a forward, of all rows together, within so "
        "many tokens, beyond which each costs (none: no limit)",
        low=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        name = SAMPLERS.name_of(self.inner)
        if "attention" in self.needs:
            raise OptionError(
                f"self_speculative cannot wrap {name}: it reads attention, which branches do not "
                "give"
            )
        if self.inner.asks:
            hint = _asking(self.inner)
            raise OptionError(
                f"self_speculative cannot wrap {name}: it asks for forwards of its own{hint}"
            )
        if self.graph is not None and self.drafter != "graph":
            raise OptionError(f"graph={self.graph!r} needs drafter=graph, got {self.drafter!r}")

    @property
    def own_needs(self) -> frozenset[str]:
        revoking = {"decided"} if self._revokes else set()
        second = {"top2"} if self.drafter == "graph" and self._nodes.second else set()
        return frozenset({"window"} | revoking | second)

    @property
    def _revokes(self) -> bool:
        return "revokes" in self.inner.traits

    @property
    def _nodes(self) -> DraftGraph:
        return read_graph(self.graph or str(BUNDLED_GRAPH)).first(self.max_states - 1)

    def begin(self, canvas: Canvas) -> Any:
        rows, width = canvas.tokens.shape
        return canvas.tokens[:, None].expand(rows, self.max_states, width).clone()

    def query(self, canvas: Canvas, state: Any) -> Query:
        drafts = self.own_state(canvas, state)
        return Query(torch.cat([canvas.tokens[:, None], drafts[:, 1:]], dim=1), adaptive=True)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        drafts = self.query(canvas, state).tokens
        assert drafts is not None
        branched = output.branched
        allowed = permitted(canvas, branched) if self.scope == "block" else branched
        walk = _start(canvas, state)
        for _ in range(self.max_states):
            walk = self._step(walk, canvas, allowed, drafts)
        following, branches = self._drafts(walk, _at(branched, walk.branch))
        decision = _decision(canvas, walk, branches)
        return decision, {"own": following, "inner": walk.state["inner"]}

    def _step(self, walk: Walk, begun: Canvas, output: Output, drafts: Tensor) -> Walk:
        """Take the inner's step from each live row's state, and see whether it was drafted."""
        seen, here = _at(output, walk.branch), walk.canvas
        decision, inner = self.inner_decide(here, seen, walk.state)
        settled = settle(here, seen, decision)
        there, written = next_canvas(here, seen, settled), settled.codes > 0
        live = walk.live & ~(written & walk.written).any(-1)
        written = written & live[:, None]
        scores = seen.p1 if decision.scores is None else decision.scores
        done = walk.done | (live & _flag(decision.done, live))
        found, place = _matching(there, begun, output, drafts)
        goes_on = live & found & ~done & ~self._stops(there)
        return Walk(
            canvas=blend(live, there, here),
            state=walk.state | {"inner": where_rows(live, inner, walk.state["inner"])},
            branch=torch.where(goes_on, place, walk.branch),
            live=goes_on,
            written=walk.written | written,
            steps=walk.steps + live,
            order=torch.where(written, walk.steps[:, None], walk.order),
            scores=torch.where(written, scores.to(walk.scores.dtype), walk.scores),
            fill=walk.fill | (live & _flag(decision.fill, live)),
            done=done,
            stay=torch.where(live, _flag(decision.stay, live), walk.stay),
        )

    def _stops(self, there: Canvas) -> Tensor:
        """Where the turn must end, `(B,)`: with the text, the block, or the plan of its forward."""
        ends = ended(there, revokes=self._revokes) | (there.horizon < 1)
        return ends | ~(there.masked & in_window(there)).any(-1)

    def _drafts(self, walk: Walk, seen: Output) -> tuple[Tensor, Tensor]:
        """Drafts `(B, K, W)` of the next turn, and how many states to forward then, `(B,)`."""
        one, inside = torch.ones_like(walk.steps), in_window(walk.canvas)
        canvas = replace(walk.canvas, eligible=walk.canvas.masked & inside & seen.valid)
        if self.max_states == 1:
            return canvas.tokens[:, None], one
        if self.drafter == "graph":
            drafts, useful = instantiate(self._nodes, canvas, seen)
        else:
            drafts, useful = self._chain(canvas, seen, walk.state)
        foreseen = (canvas.masked & inside).any(-1) & (canvas.horizon > 1) & ~walk.done
        likely = odds(canvas, seen, drafts)
        likely = likely.masked_fill(~(useful & foreseen[:, None]), -1.0)
        likely, order = torch.sort(likely, dim=-1, descending=True, stable=True)
        drafts = drafts.gather(1, order[..., None].expand_as(drafts))
        count = worthwhile(likely, least=self.min_acceptance, row_cost=self.row_cost)
        if self.most_tokens is not None:
            count = count.clamp(max=max(self.most_tokens // canvas.tokens.numel() - 1, 0))
        missing = self.max_states - 1 - drafts.shape[1]
        spare = canvas.tokens[:, None].expand(-1, 1 + missing, -1)
        return torch.cat([spare[:, :1], drafts, spare[:, 1:]], dim=1), one + count

    def _chain(self, canvas: Canvas, seen: Output, state: Any) -> tuple[Tensor, Tensor]:
        """The states `(B, K - 1, W)` that the inner would reach if predictions stayed as they are.

        And which of them are worth a forward: not those that end the block or the plan.
        """
        drafts, useful, is_open = [], [], torch.ones_like(canvas.horizon, dtype=torch.bool)
        for _ in range(self.max_states - 1):
            decision, inner = self.inner_decide(canvas, seen, state)
            there = next_canvas(canvas, seen, settle(canvas, seen, decision))
            moved = (there.tokens != canvas.tokens).any(-1)
            is_open = is_open & moved & ~self._stops(there) & ~_flag(decision.done, is_open)
            canvas, state = there, state | {"inner": inner}
            drafts.append(canvas.tokens)
            useful.append(is_open)
        return torch.stack(drafts, dim=1), torch.stack(useful, dim=1)


def _asking(inner: Sampler) -> str:
    """What to change where the inner has queries of its own; empty where nothing helps."""
    names = [SAMPLERS.name_of(layer) for layer in layers(inner)]
    return ", unless credit is given dense=true" if "credit" in names else ""


def _start(canvas: Canvas, state: Any) -> Walk:
    zeros = torch.zeros_like(canvas.commits)
    return Walk(
        canvas=canvas,
        state=state,
        branch=zeros,
        live=torch.ones_like(zeros, dtype=torch.bool),
        written=torch.zeros_like(canvas.masked),
        steps=zeros,
        order=torch.zeros_like(canvas.tokens),
        scores=torch.zeros_like(canvas.tokens, dtype=torch.float64),
        fill=torch.zeros_like(zeros, dtype=torch.bool),
        done=torch.zeros_like(zeros, dtype=torch.bool),
        stay=torch.zeros_like(zeros, dtype=torch.bool),
    )


def _matching(
    there: Canvas, begun: Canvas, output: Output, drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether a forwarded draft is the state `there`, and which, each `(B,)`.

    Whole states: every position of the window, and as many commits as the branch's noise assumed.
    """
    same = (drafts == there.tokens[:, None]).all(-1) & output.valid.any(-1)
    filled = (drafts != begun.tokens[:, None]) & (drafts != begun.mask_id)
    same = same & (filled.sum(-1) == (there.commits - begun.commits)[:, None])
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
        stay=walk.stay,
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


def _flag(value: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if value is None else value
