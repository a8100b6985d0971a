"""A request in flight: its tokens, its window, what it has cost so far. Host side, one per row."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor

from dlm_decode.caches import RowPlan, RowView
from dlm_decode.errors import CapabilityError, RequestError
from dlm_decode.kv import Slot
from dlm_decode.models import ModelInfo
from dlm_decode.noise import request_key
from dlm_decode.schedules import Schedule, Span, Window
from dlm_decode.types import Generation, Request, Step, Trace

EOS_POLICIES = ("none", "no_confidence", "banned", "ban_start")
DEFAULT_BLOCK_LENGTH = 32
_MAX_TURNS_PER_TOKEN = 8

_BEFORE = -(2**31)
"""When given tokens were decided: longer ago than any turn."""

COMMIT, REMASK, OVERWRITE = 1, 2, 3
"""What happened to a position in a turn."""


@dataclass(frozen=True)
class TurnRecord:
    """What one turn did to a row's window, arrays `(W,)`.

    `codes` and `tokens` say what each position became (the mask id if masked again), `sure`
    the confidence, `order` which of the turn's `steps` wrote it. `commits` counts the tokens
    committed, where that is more than the positions set.
    """

    codes: np.ndarray
    tokens: np.ndarray
    sure: np.ndarray
    order: np.ndarray
    steps: int = 1
    commits: int | None = None


@dataclass
class Row:
    """The only mutable record of the engine; `tokens`, `editable`, `masked` are `(N,)`.

    `ahead` are the positions that the branches of the next forward fill, `stops` where the windows
    of its versions end, the row's own first, if not all at the same place. `kept (lanes, D)` is the
    output that predicts the window's first position, for a plan that wants it.
    """

    request: Request
    tokens: np.ndarray
    editable: np.ndarray
    masked: np.ndarray
    span: Span
    window: Window
    blocks: int
    key: int
    slots: tuple[Slot, ...] = ()
    step: int = 0
    turn: int = 0
    commits: int = 0
    since_refresh: int = -1
    last: tuple[int, ...] = ()
    fresh: bool = True
    place: int = -1
    finishing: bool = False
    staying: bool = False
    branches: int = 1
    ahead: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    kept: Tensor | None = None
    block_ids: np.ndarray | None = None
    decided_at: np.ndarray = field(init=False)
    scores: np.ndarray = field(init=False)
    refreshed_at: int = 0
    last_start: int | None = None
    memory: Any = None
    forwards: Counter[str] = field(default_factory=Counter)
    computed: int = 0
    drafted: int | None = None
    accepted: int | None = None
    steps: list[Step] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)
    draft: tuple[int, np.ndarray] | None = None

    def __post_init__(self) -> None:
        self.decided_at = np.full(len(self.tokens), _BEFORE, dtype=np.int64)
        self.scores = np.zeros(len(self.tokens), dtype=np.float32)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def shown(self) -> np.ndarray:
        """The tokens `(N,)`, with those that the window's open positions would take, if drafted."""
        if self.draft is None:
            return self.tokens
        base, drafted = self.draft
        shown = self.tokens.copy()
        window = slice(base, min(base + len(drafted), self.window.stop))
        open_now = self.masked[window]
        shown[window][open_now] = drafted[: len(open_now)][open_now]
        return shown

    @property
    def turn_limit(self) -> int:
        """Turns after which a row that keeps revoking is made to finish."""
        return _MAX_TURNS_PER_TOKEN * int(self.editable.sum()) + 8

    def view(self, shift: int) -> RowView:
        """What a cache policy may look at."""
        return RowView(
            self.length,
            self.window,
            self.masked,
            self.step,
            self.since_refresh,
            shift,
            self.last,
            self.block_ids,
            self.slots[0].tokens != self.tokens if self.slots else None,
            self.span.start,
            np.where(self.masked, 0, self.turn - self.decided_at),
            self.scores,
            self.commits - self.refreshed_at,
            self.last_start,
            self.memory,
            self.turn,
        )

    def speculate(self, drafted: int, steps: int) -> None:
        """Account for a turn that forwarded `drafted` future states and advanced by `steps`."""
        self.drafted = (self.drafted or 0) + drafted
        self.accepted = (self.accepted or 0) + steps - 1

    def charge(self, versions: Sequence[RowPlan], lanes: int = 1) -> None:
        """Account for one forward of the plans of the row and its branches, in guidance lanes."""
        plan = versions[0]
        self.forwards[plan.kind] += 1
        self.computed += sum(len(version.query) for version in versions) * lanes
        if plan.kind in ("refresh", "region"):
            self.since_refresh, self.refreshed_at = 0, self.commits
        elif self.since_refresh >= 0:
            self.since_refresh += 1

    def apply(self, base: int, turn: TurnRecord) -> None:
        """Carry out one turn of the positions from `base`."""
        places = np.flatnonzero(turn.codes)
        assert len(places) or not self.finishing, "a row that is to finish can commit nothing"
        positions, codes = places + base, turn.codes[places]
        set_now = codes != REMASK
        self.tokens[positions] = turn.tokens[places]
        self.masked[positions] = ~set_now
        self.commits += int(set_now.sum()) if turn.commits is None else turn.commits
        self.last = tuple(positions[set_now].tolist())
        self.decided_at[positions] = self.turn
        for step in range(turn.steps):
            of_step = turn.order[places] == step if turn.steps > 1 else slice(None)
            self._record(turn, places[of_step], base)

    def keep_scores(self, positions: np.ndarray, base: int, scores: np.ndarray) -> None:
        """Remember the sampler's scores `(W,)`, from `base` on, of the `positions` it scored."""
        self.scores[positions] = scores[positions - base]

    def _record(self, turn: TurnRecord, places: np.ndarray, base: int) -> None:
        """Add one step to the trace: the `places` of a turn that it wrote."""
        set_now = turn.codes[places] != REMASK
        self.steps.append(
            Step(
                tuple((places[set_now] + base).tolist()),
                tuple(turn.tokens[places[set_now]].tolist()),
                tuple(turn.sure[places[set_now]].tolist()),
                tuple((places[~set_now] + base).tolist()),
            )
        )

    @property
    def filled(self) -> bool:
        """Whether nothing is left to decide, and no other turn was asked for."""
        return not self.masked.any() and not self.staying

    def advance(
        self,
        schedule: Schedule,
        steps: int = 1,
        *,
        stay: bool = False,
        forget: bool = True,
        end_ids: Sequence[int] = (),
    ) -> None:
        """Move on by `steps` turns' worth, and to the next window where the schedule says so.

        Not if its window, in which nothing is masked, is to `stay` as it is for another turn. With
        `forget` no branch outlives its block. Behind one of the `end_ids` no block is opened ahead.
        """
        self.stops = ()
        self.turn += steps
        self.step += steps
        if self.since_refresh >= 0:
            self.since_refresh += steps - 1
        self.finishing = self.finishing or self.turn >= self.turn_limit
        open_window = self.masked[self.window.start : self.window.stop].any()
        self.staying = stay and not open_window and not self.finishing
        if self.staying or not self.masked.any():
            return
        self.last_start = self.window.start
        span = self._opening(end_ids) if schedule.opens_ahead else self.span
        window = schedule.advance(span, self.window, self.masked)
        if window.index != self.window.index:
            self.step, self.fresh = 0, True
            if forget:
                self.branches, self.ahead = 1, ()
        if schedule.opens_ahead and self.ahead:
            with_each = (self._stop_with(place, schedule, span) for place in self.ahead)
            self.stops = (window.stop, *with_each)
        self.window = window

    def _opening(self, end_ids: Sequence[int]) -> Span:
        """The part of the row that may be opened: up to its window's end if it ends in there."""
        open_now = self.masked[self.window.start : self.window.stop].any()
        ends = open_now and self._last(end_ids) is not None
        return replace(self.span, stop=self.window.stop) if ends else self.span

    def _stop_with(self, place: int, schedule: Schedule, span: Span) -> int:
        """Where the next window would end if `place` were decided too."""
        masked = self.masked.copy()
        masked[place] = False
        return schedule.advance(span, self.window, masked).stop

    def ends_from(self) -> int:
        """First position from which on nothing is frozen, N if the row never ends early."""
        if not self.request.stop_at_eos:
            return self.length
        frozen = np.flatnonzero(~self.editable)
        return int(frozen[-1]) + 1 if len(frozen) else 0

    def first_end(self, end_ids: Sequence[int]) -> int | None:
        """Position of the first end id that was decided or frozen as part of the answer, or None.

        One given in an infilled prompt or suffix, as between the turns of a chat, ends nothing.
        """
        own = self.editable.copy()
        first = len(self.request.prompt_ids)
        own[first : first + self.request.gen_length] = True
        ends = np.isin(self.tokens, end_ids) & ~self.masked & own
        return int(ends.argmax()) if ends.any() else None

    def _last(self, end_ids: Sequence[int]) -> int | None:
        """Position of the end id that the row is to end at: nothing frozen follows it."""
        end = self.first_end(end_ids) if self.request.stop_at_eos else None
        return end if end is not None and self.editable[end:].all() else None

    def ended(self, end_ids: Sequence[int], revokes: bool) -> bool:
        """Whether everything before the first end id is settled and nothing frozen follows it."""
        end = self._last(end_ids)
        if end is None or self.staying:
            return False
        settled = not self.masked[self.span.start : end].any()
        window = slice(self.window.start, self.window.stop)
        return settled and not (revokes and self.masked[window].any())

    def close(self, info: ModelInfo) -> Generation:
        """The result; positions left open when the row ends take the first end id."""
        capped = self.finishing
        if self.masked.any():
            self.tokens[self.masked] = info.end_ids[0]
            self.masked[:] = False
        end = self.first_end(info.end_ids)
        ids = self.tokens[self.span.start : self.span.stop]
        count = len(ids) if end is None else end - self.span.start
        reason = "step_cap" if capped else "length" if end is None else "eos"
        trace = Trace(
            dict(self.forwards),
            self.computed,
            tuple(self.steps),
            time.perf_counter() - self.started_s,
            self.drafted,
            self.accepted,
        )
        canvas = tuple(self.tokens.tolist())
        return Generation(self.request.id, tuple(ids.tolist()), None, count, reason, trace, canvas)


def make_row(request: Request, info: ModelInfo, schedule: Schedule, seed: int) -> Row:
    """A row ready to run. Raises `RequestError` or `CapabilityError` for a request that cannot."""
    check_request(request, info)
    prompt = np.asarray(request.prompt_ids, dtype=np.int64)
    blank = np.full(request.gen_length, info.mask_id, dtype=np.int64)
    for offset, token in request.frozen.items():
        blank[offset] = token
    tokens = np.concatenate([prompt, blank, np.asarray(request.suffix_ids, dtype=np.int64)])
    editable = tokens == info.mask_id
    block_length = request.block_length or info.block_length or DEFAULT_BLOCK_LENGTH
    span = Span(*_extent(request, editable), block_length)
    own_seed = seed if request.seed is None else request.seed
    masked = editable.copy()
    window = schedule.advance(span, schedule.first(span), masked)
    return Row(
        request=request,
        tokens=tokens,
        editable=editable,
        masked=masked,
        span=span,
        window=window,
        blocks=schedule.blocks(span),
        key=request_key(own_seed, tokens.tolist(), request.sample),
        block_ids=_attention_blocks(info, span, len(tokens)),
    )


def _attention_blocks(info: ModelInfo, span: Span, length: int) -> np.ndarray | None:
    """Block of every position `(N,)`, ascending, for a block-causal model; None for others."""
    if info.regime != "block_causal":
        return None
    origin = 0 if info.block_origin == "absolute" else span.start
    blocks = (np.arange(length, dtype=np.int64) - origin) // span.block_length
    return np.maximum(blocks, -1) if info.block_origin == "whole_prompt" else blocks


def _extent(request: Request, editable: np.ndarray) -> tuple[int, int]:
    """First and last (exclusive) position of the generated region and all holes around it."""
    holes = np.flatnonzero(editable)
    start, stop = int(holes[0]), int(holes[-1]) + 1
    if request.gen_length == 0:
        return start, stop
    first = len(request.prompt_ids)
    return min(first, start), max(first + request.gen_length, stop)


def check_request(request: Request, info: ModelInfo) -> None:
    """Raise `RequestError` for what cannot be decoded, saying what is allowed."""
    _check_kinds(request)
    _check_numbers(request)
    _check_ids("prompt_ids", request.prompt_ids, info, allow_mask=request.infill)
    _check_ids("suffix_ids", request.suffix_ids, info, allow_mask=request.infill)
    _check_ids("frozen", list(request.frozen.values()), info, allow_mask=False)
    if not len(request.prompt_ids):
        raise RequestError("the prompt is empty: give at least one token")
    for offset in request.frozen:
        if not _is_whole(offset) or not 0 <= offset < request.gen_length:
            raise RequestError(
                f"frozen offset {offset!r} is outside the generated region "
                f"[0, {request.gen_length})"
            )
    length = len(request.prompt_ids) + request.gen_length + len(request.suffix_ids)
    if length > info.max_positions:
        raise RequestError(
            f"prompt ({len(request.prompt_ids)}), generation ({request.gen_length}) and suffix "
            f"({len(request.suffix_ids)}) take {length} positions, but the model has "
            f"{info.max_positions}: shorten one of them"
        )
    if _open_positions(request, info) == 0:
        raise RequestError("nothing to decode: every position of the request is fixed")
    if request.eos != "none" and not info.end_ids:
        raise CapabilityError(f"eos policy {request.eos!r} needs a model with an end-of-text id")


def _check_kinds(request: Request) -> None:
    for name, kind, words in (
        ("suffix_ids", Sequence, "a list of ids"),
        ("frozen", Mapping, "a mapping from offsets to ids"),
        ("infill", bool, "True or False"),
        ("stop_at_eos", bool, "True or False"),
    ):
        value = getattr(request, name)
        if not isinstance(value, (kind, np.ndarray) if kind is Sequence else kind):
            raise RequestError(f"{name} must be {words}, got {value!r}")
    if isinstance(request.stop, str) or not isinstance(request.stop, Sequence):
        raise RequestError(f"stop must be a list of strings, got {request.stop!r}")
    for text in request.stop:
        if not isinstance(text, str):
            raise RequestError(f"stop must hold strings, got {text!r}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_numbers(request: Request) -> None:
    least = 0 if request.infill else 1
    for name, value, low in (
        ("gen_length", request.gen_length, least),
        ("block_length", request.block_length, 1),
        ("eos_ban_length", request.eos_ban_length, 0),
        ("sample", request.sample, 0),
        ("seed", request.seed, None),
    ):
        if value is None and name in ("block_length", "seed"):
            continue
        if not _is_whole(value):
            raise RequestError(f"{name} must be an integer, got {value!r}")
        if low is not None and value < low:
            raise RequestError(f"{name} must be at least {low}, got {value}")
        if not -(2**63) <= value < 2**63:
            raise RequestError(f"{name} must fit 64 bits, got {value}")
    if request.eos not in EOS_POLICIES:
        raise RequestError(f"eos must be one of {', '.join(EOS_POLICIES)}, got {request.eos!r}")


def _check_ids(name: str, ids: Sequence[int], info: ModelInfo, *, allow_mask: bool) -> None:
    for place, token in enumerate(ids):
        if not _is_whole(token):
            raise RequestError(f"{name}[{place}] must be an integer id, got {token!r}")
        if not 0 <= token < info.vocab_size:
            raise RequestError(
                f"{name}[{place}] is {token}, but ids of this model run from 0 to "
                f"{info.vocab_size - 1}: is this the model's own tokenizer?"
            )
        if token == info.mask_id and not allow_mask:
            mend = "" if name == "frozen" else ", or set infill=True if that is what is meant"
            raise RequestError(
                f"{name}[{place}] is the mask id {token}; it marks positions to fill: "
                f"remove it{mend}"
            )


def _open_positions(request: Request, info: ModelInfo) -> int:
    holes = sum(int(t) == info.mask_id for t in (*request.prompt_ids, *request.suffix_ids))
    return request.gen_length - len(request.frozen) + holes
