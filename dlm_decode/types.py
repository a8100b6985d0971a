"""The data that passes between engine, samplers, caches and schedules.

Letters in shapes: B rows (requests in flight), R branches of a row, W window, N row length,
V vocabulary, D hidden size. Everything here is frozen; state is returned, never kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dlm_decode.errors import CapabilityError
from dlm_decode.options import Options, option

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Draw(Options):
    """How a token is drawn from a position's logits, whichever sampler chooses the positions."""

    temperature: float = option(
        0.0, "0 takes the most probable token; > 0 samples", low=0.0, high=1e6
    )
    top_p: float | None = option(None, "sample from the smallest set of this mass", above=0, high=1)
    top_k: int | None = option(None, "sample from this many most probable tokens", low=1)

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded before drawing."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)

    @property
    def is_raw(self) -> bool:
        """Whether the drawing law is the model's own distribution, untempered and unfiltered."""
        return not self.filters and self.temperature in (0.0, 1.0)


@dataclass(frozen=True)
class Canvas:
    """What a sampler sees of the rows: their windows, all of the same padded width W.

    `tokens`, `positions` (absolute), `masked`, `editable`, `eligible` are `(B, W)`. `masked` marks
    undecided positions, `editable` those that are not frozen (prompt, given spans, padding),
    `eligible` the masked ones that may be committed this turn; where branches' windows differ, by
    any of them, and each has valid statistics in its own window only. The rest is `(B,)`: `step`
    counts turns since the window's block began, `turn` since the request began, `commits` the
    tokens committed so far (it never falls), `block` and `blocks` are the block's index and the
    row's number of blocks, `block_length` the request's, `[start, stop)` the block's window (with
    scope "canvas" the tensors reach beyond it), `remaining` and `total` the masked and editable
    positions of the whole row, `keys` the noise keys. `draw` is how tokens are drawn.
    """

    tokens: Tensor
    positions: Tensor
    masked: Tensor
    editable: Tensor
    eligible: Tensor
    step: Tensor
    turn: Tensor
    commits: Tensor
    block: Tensor
    blocks: Tensor
    block_length: Tensor
    start: Tensor
    stop: Tensor
    remaining: Tensor
    total: Tensor
    keys: Tensor
    horizon: Tensor
    ends_from: Tensor
    mask_id: int
    end_ids: tuple[int, ...]
    vocab_size: int
    draw: Draw = Draw()

    @property
    def progress(self) -> Tensor:
        """Share of the row's editable positions that are decided, `(B,)`, 0 to 1."""
        return 1 - self.remaining / self.total.clamp(min=1)


@dataclass(frozen=True)
class Query:
    """What to forward instead of, or ask beside, the canvas as it stands.

    `tokens (B, R, W)` are R branches of each row's window; they share the row's stored context and
    only branch 0 is stored. Positions with any of `mix_weights (B, R, W, J)` above 0 get the
    weighted sum of the embeddings of `mix_ids (B, R, W, J)` instead of their token's (such a
    sampler needs "soft_embeddings"). `probe (B, W, J)` are ids whose logits are wanted as
    `Output.probed`. `beliefs (B, R, W, V)` are logits of the turn before (-inf: none yet), told to
    models that are conditioned on them and to no others. `adaptive`: of the R branches a row uses
    as many as its last decision named, 1 at first. Where the schedule opens blocks ahead and that
    decision told what each branch fills, a branch's window ends where it would with that decided.
    """

    tokens: Tensor | None = None
    mix_ids: Tensor | None = None
    mix_weights: Tensor | None = None
    probe: Tensor | None = None
    beliefs: Tensor | None = None
    adaptive: bool = False

    @property
    def branches(self) -> int:
        """R: how many versions of each row are forwarded."""
        given = self.tokens if self.tokens is not None else self.mix_ids
        return 1 if given is None else given.shape[1]


@dataclass(frozen=True)
class Output:
    """Statistics of the forward's logits, aligned so that position i describes token i.

    Each is `(B, W)`, or `(B, R, W)` when the sampler's query had R branches, and is meaningful
    where `valid`. Always there: `top1` (id), `p1` (its probability), `lse` (log-sum-exp of the
    logits), `valid`; `probed (B, W, J)` for a query with a probe. Declared in the sampler's
    `needs`: "p2", "top2" (the second-best id, with `p2`), "entropy" (nats), "filtered" (`q1`, `q2`,
    `q_entropy` of the tempered and top-k/top-p filtered law), "logits" `(B, W, V)` fp32 with banned
    ids at -inf, "hidden" `(B, W, D)`, "attention" `(B, W, N)` (of the outputs that predict the
    window, over absolute positions, averaged over heads and the sampler's `attention_layers`);
    "decided" asks for statistics of decided positions too, "window" for those of masks that may not
    be committed this turn, "shadow" for `shadow_top1`, `shadow_p1`,
    `shadow_lse` and `shadow_probed`, predicted without seeing what stands at the position. At
    temperature > 0 also `sampled` (id), `p_sampled` and, with "filtered", `q_sampled`. `q2` needs
    "p2" beside "filtered", `q_entropy` "entropy". Asking for what was not declared raises
    `CapabilityError`.
    """

    stats: Mapping[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name == "stats":
            raise AttributeError(name)
        try:
            return self.stats[name]
        except KeyError:
            have = ", ".join(sorted(self.stats))
            raise CapabilityError(
                f"output has no {name!r}: declare it in the sampler's needs (have: {have})"
            ) from None

    @property
    def is_sampled(self) -> bool:
        """Whether tokens were drawn (temperature > 0)."""
        return "sampled" in self.stats

    @property
    def candidate(self) -> Tensor:
        """The token each position would take: the drawn one, or the most probable one."""
        return self.stats["sampled"] if self.is_sampled else self.stats["top1"]

    @property
    def branched(self) -> Output:
        """The statistics as `(B, R, W)`, with R = 1 where the query had no branches."""
        if self.stats["valid"].ndim == 3:
            return self
        return Output({name: value[:, None] for name, value in self.stats.items()})

    def branch(self, r: int) -> Output:
        """Branch `r` of a branched output, as `(B, W)` statistics."""
        return Output({name: value[:, r] for name, value in self.stats.items()})


@dataclass(frozen=True)
class Decision:
    """What a sampler wants done; the engine checks and applies it. Masks are `(B, W)` bool.

    `commit` sets eligible positions to `tokens (B, W)`; `overwrite` sets already decided editable
    ones; `remask` makes decided editable ones masked again, both from the window's start on.
    `fill (B,)` commits every masked position of the window, `done (B,)` ends the row and gives what
    is open the end id (a model without one goes on), `hold (B,)` marks rows that mean to commit
    nothing this turn, `stay (B,)` those that keep their window for another turn although nothing in
    it is masked any more. `scores (B, W)` are kept in the trace.

    A decision that stands for several steps of another sampler says so: `steps (B,)` of them,
    `order (B, W)` the step (from 0) that each position was last written in, `commits (B,)` the
    tokens committed in them, `branches (B,)` the versions of the row wanted in the next forward.

    One made among branches may name the `winner (B,)`: its window becomes the row's, and its K/V
    those of what lies before the window. `ahead (B, R - 1)` are the absolute positions that each
    branch of the next forward fills, -1 for those not wanted.
    """

    tokens: Tensor
    commit: Tensor
    remask: Tensor | None = None
    overwrite: Tensor | None = None
    fill: Tensor | None = None
    done: Tensor | None = None
    hold: Tensor | None = None
    stay: Tensor | None = None
    scores: Tensor | None = None
    steps: Tensor | None = None
    order: Tensor | None = None
    commits: Tensor | None = None
    branches: Tensor | None = None
    winner: Tensor | None = None
    ahead: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One turn of one row: what was committed, where, and how sure the model was."""

    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]
    remasked: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            "positions": list(self.positions),
            "tokens": list(self.tokens),
            "confidence": [round(c, 6) for c in self.confidence],
        }
        return plain | ({"remasked": list(self.remasked)} if self.remasked else {})


@dataclass(frozen=True)
class Trace:
    """What one request cost and did.

    `forwards` by kind ("full": every position, nothing stored; "refresh": every position, K/V
    stored; "window": only what the cache policy asked for). `computed_positions` counts query
    positions over all forwards, guidance lanes and branches included. `elapsed_s` runs from
    admission to completion, so it contains the time spent on rows beside it. `drafted` counts the
    future states that were forwarded ahead of their turn, `accepted` those that were reached, each
    of which saved a forward; None without speculation.
    """

    forwards_by_kind: Mapping[str, int]
    computed_positions: int
    steps: tuple[Step, ...]
    elapsed_s: float
    drafted: int | None = None
    accepted: int | None = None

    @property
    def forwards(self) -> int:
        return sum(self.forwards_by_kind.values())


@dataclass(frozen=True)
class Generation:
    """The result of one request.

    `ids` is the generated region, whole; `tokens` counts those before the first end id; `text` is
    cut at that id and at stop strings (None without a tokenizer). `finish_reason` is "eos"
    (an end id was decided and everything before it too), "length" or "step_cap".
    """

    id: str
    ids: tuple[int, ...]
    text: str | None
    tokens: int
    finish_reason: str
    trace: Trace
    canvas: tuple[int, ...] = field(repr=False, default=())

    @property
    def forwards(self) -> int:
        return self.trace.forwards


@dataclass(frozen=True)
class Frame:
    """A row after one turn, for streaming: the generated region with masks where undecided.

    Samplers that work on random tokens instead show there what they would decide now; `masked`
    tells in either case what is undecided.
    """

    id: str
    ids: tuple[int, ...]
    masked: tuple[bool, ...]
    turn: int
    result: Generation | None = None


@dataclass(frozen=True)
class Request:
    """One row to decode: `prompt_ids`, then `gen_length` masked positions, then `suffix_ids`.

    `frozen` holds ids that stand fixed inside the generated region, by offset from its start.
    With `infill=True` mask ids inside `prompt_ids` are holes to fill too. `seed` overrides the
    decoder's; `sample` tells apart several draws for one prompt. `block_length` None takes the
    model's or 32. `eos` is the end-of-text policy: "none", "no_confidence" (an end id is given no
    confidence, so it comes last), "banned" (end ids cannot be chosen), or "ban_start" (not in the
    first `eos_ban_length` positions). `stop_at_eos` ends a row once everything before its first
    end id is decided.
    """

    prompt_ids: Sequence[int]
    gen_length: int = 128
    block_length: int | None = None
    suffix_ids: Sequence[int] = ()
    frozen: Mapping[int, int] = field(default_factory=dict)
    infill: bool = False
    id: str = ""
    seed: int | None = None
    sample: int = 0
    eos: str = "none"
    eos_ban_length: int = 1
    stop_at_eos: bool = True
    stop: Sequence[str] = ()
