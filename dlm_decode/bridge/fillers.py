"""Two ways to fill a chunk of masks: one's own passes over the marginals, or a registry sampler.

Letters: W chunk length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dlm_decode.bridge.drafters import Context
from dlm_decode.bridge.marginals import Reuse, Span, Stored, marginals
from dlm_decode.bridge.streams import DRAFT, EMIT, gumbel
from dlm_decode.caches import CachePolicy
from dlm_decode.engine import Engine
from dlm_decode.models import DiffusionLM
from dlm_decode.noise import token_gumbel
from dlm_decode.rows import Row, make_row
from dlm_decode.samplers import Sampler, Wrapper
from dlm_decode.schedules import SCHEDULES
from dlm_decode.types import Canvas, Decision, Draw, Output, Request


@dataclass(frozen=True)
class Job:
    """A chunk to draft: `width` tokens after `prefix`, at the head of `canvas` masks."""

    context: Context
    prefix: tuple[int, ...]
    width: int
    canvas: int


@dataclass(frozen=True)
class Chunk:
    """Drafted tokens, each with its step and confidence; `log_q (W, V)` if their law is known."""

    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    confidence: tuple[float, ...]
    forwards: int
    log_q: Tensor | None = None
    log_m: Tensor | None = None


class Filler(Protocol):
    """Fills the chunks of several rows."""

    def fill(self, jobs: Sequence[Job]) -> list[Chunk]: ...


@dataclass(frozen=True)
class PassFiller:
    """`passes` forwards a chunk, each committing its share of the positions that are surest.

    Surest by the highest probability of the distribution, never of the drawn token; so a draw for
    a rule with soft laws is certified, each position with its marginal at the step it was committed
    in. For `match`, the draw takes the noise that the verifier will take.
    """

    model: DiffusionLM
    reuse: Reuse
    passes: int = 1

    def fill(self, jobs: Sequence[Job]) -> list[Chunk]:
        states = [_Filling.begun(job, self.model.info.mask_id) for job in jobs]
        for step in range(self.passes):
            active = [s for s in states if s.open.any()]
            if active:
                spans = [state.span() for state in active]
                for state, logits in zip(
                    active, marginals(self.model, spans, self.reuse), strict=True
                ):
                    state.commit(logits, step, self.passes - step)
        return [state.chunk() for state in states]


@dataclass
class _Filling:
    """A chunk under way; tensors are `(W,)`, `log_q (W, V)`."""

    job: Job
    ids: list[int]
    open: Tensor
    tokens: Tensor
    steps: Tensor
    confidence: Tensor
    log_q: Tensor | None = None
    log_m: Tensor | None = None
    forwards: int = 0

    @classmethod
    def begun(cls, job: Job, mask_id: int) -> _Filling:
        ids = [*job.prefix, *[mask_id] * max(job.canvas, job.width)]
        blank = torch.zeros(job.width, dtype=torch.long)
        return cls(job, ids, blank == 0, blank, blank.clone(), torch.zeros(job.width))

    def span(self) -> Span:
        context = self.job.context
        if not isinstance(context.memory, Stored):
            context.memory = Stored()
        start = len(self.job.prefix)
        return Span(self.ids, len(context.ids), start, self.job.width, context.memory)

    def commit(self, logits: Tensor, step: int, passes_left: int) -> None:
        """Draw every open position; keep the surest share of them."""
        logits = logits.cpu()
        law = _drawing_law(logits, self.job.context)
        drawn = _drawn(law, self.job)
        sure = law.exp().amax(-1).masked_fill(~self.open, -1.0)
        count = -(-int(self.open.sum()) // passes_left)
        chosen = torch.zeros_like(self.open)
        chosen[sure.argsort(descending=True, stable=True)[:count]] = True
        self.tokens = torch.where(chosen, drawn, self.tokens)
        self.steps = self.steps.masked_fill(chosen, step)
        own = logits.softmax(-1).gather(1, drawn[:, None])[:, 0]
        self.confidence = torch.where(chosen, own, self.confidence)
        self.log_q = law if self.log_q is None else torch.where(chosen[:, None], law, self.log_q)
        self.log_m = law if self.log_m is None else self.log_m
        self.open = self.open & ~chosen
        start = len(self.job.prefix)
        for place in chosen.nonzero()[:, 0].tolist():
            self.ids[start + place] = int(self.tokens[place])
        self.forwards += 1

    def chunk(self) -> Chunk:
        soft = self.job.context.soft and self.job.context.temperature > 0
        return Chunk(
            tuple(self.tokens.tolist()),
            tuple(self.steps.tolist()),
            tuple(self.confidence.tolist()),
            self.forwards,
            self.log_q if soft else None,
            self.log_m,
        )


def _drawing_law(logits: Tensor, context: Context) -> Tensor:
    """log m `(W, V)` after those of the verifier's processors that need no history."""
    if context.vocab_size is not None and context.vocab_size < logits.shape[1]:
        unknown = torch.arange(logits.shape[1]) >= context.vocab_size
        logits = logits.masked_fill(unknown, -torch.inf)
    warped = logits if context.warp is None else context.warp(logits)
    return warped.log_softmax(-1)


def _drawn(law: Tensor, job: Job) -> Tensor:
    """A token for each position `(W,)`: the best, or drawn with shared or with private noise."""
    context, start = job.context, len(job.prefix)
    if context.temperature <= 0:
        return law.argmax(-1)
    stream, round_ = (DRAFT, len(context.ids)) if context.soft else (EMIT, 0)
    noise = gumbel(context.key, start, *law.shape, stream=stream, round_=round_)
    return (law + noise).argmax(-1)


@dataclass(frozen=True)
class EngineFiller:
    """A registry sampler decodes the chunk, as a block of the engine; never certified."""

    model: DiffusionLM
    sampler: Sampler
    cache: CachePolicy

    def fill(self, jobs: Sequence[Job]) -> list[Chunk]:
        rows = [self._row(job) for job in jobs]
        places = {id(row): place for place, row in enumerate(rows)}
        waiting = set(places.values())
        temperature = jobs[0].context.temperature
        chunks: dict[int, Chunk] = {}
        for row, result in self._engine(temperature, len(rows)).run(rows):
            place = places[id(row)]
            start, stop = row.span.start, row.span.start + jobs[place].width
            if place in waiting and (result is not None or not row.masked[start:stop].any()):
                chunks[place] = _harvest(row, start, stop)
                waiting.discard(place)
            if not waiting:
                break
        return [chunks[place] for place in range(len(jobs))]

    def _engine(self, temperature: float, rows: int) -> Engine:
        sampler = self.sampler
        if temperature > 0:
            sampler = Coupled(inner=sampler)
        schedule = SCHEDULES.create("fixed")
        draw = Draw(temperature)
        return Engine(self.model, sampler, self.cache, schedule, draw, max_batch_size=rows)

    def _row(self, job: Job) -> Row:
        length = max(job.canvas, job.width)
        request = Request(job.prefix, length, block_length=job.width, stop_at_eos=False)
        row = make_row(request, self.model.info, SCHEDULES.create("fixed"), 0)
        row.key = job.context.key
        return row


def _harvest(row: Row, start: int, stop: int) -> Chunk:
    """The chunk as it stands once decided, with the last step and confidence of each position."""
    steps, confidence = [0] * (stop - start), [0.0] * (stop - start)
    for number, step in enumerate(row.steps):
        for position, sure in zip(step.positions, step.confidence, strict=True):
            if start <= position < stop:
                steps[position - start], confidence[position - start] = number, sure
    tokens = tuple(int(t) for t in row.tokens[start:stop])
    return Chunk(tokens, tuple(steps), tuple(confidence), sum(row.forwards.values()))


@dataclass(frozen=True)
class Coupled(Wrapper):
    """The inner sampler with the verifier's noise: x = argmax(log m + noise of the position).

    However often and in whatever order a position is drawn, its noise is the same.
    """

    alters: ClassVar[bool] = True

    @property
    def own_needs(self) -> frozenset[str]:
        return frozenset({"logits"})

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        logits = output.logits
        keys = canvas.keys[:, None].expand(canvas.positions.shape).reshape(-1)
        flat = canvas.positions.reshape(-1)
        zeros = torch.zeros_like(flat)
        noise = token_gumbel(keys, flat, zeros, 0, logits.shape[-1], EMIT)
        shape = canvas.positions.shape
        noise = noise.reshape(shape[0], *[1] * (logits.ndim - 3), *logits.shape[-2:])
        drawn = (logits / canvas.draw.temperature + noise).argmax(-1)
        chance = (logits.gather(-1, drawn[..., None])[..., 0] - output.lse).exp()
        stats = {**output.stats, "sampled": drawn, "p_sampled": chance}
        decision, inner = self.inner_decide(canvas, Output(stats), state)
        return decision, {"own": state["own"], "inner": inner}
