"""Around lossless self-speculation: what it can foresee, its audit, and learning draft graphs.

The decoding itself is `samplers/self_speculative.py`, the graphs are in `drafts.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.caches import CACHES, CachePolicy
from dlm_decode.clock import clock_of
from dlm_decode.drafts import DraftGraph, Node
from dlm_decode.errors import OptionError
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.schedules import SCHEDULES
from dlm_decode.scores import confidence, ranks
from dlm_decode.types import Canvas, Decision, Output
from dlm_decode.watching import Watching

if TYPE_CHECKING:
    from dlm_decode.api import Decoder, Parts
    from dlm_decode.types import Generation, Request, Step

WRAPPER = "self_speculative"


def verified(sampler: str) -> str:
    """The chain that decodes as `sampler` does, with states drafted ahead and verified."""
    first = sampler.split("+", 1)[0].strip()
    return sampler if first == WRAPPER else f"{WRAPPER}+{sampler}"


def check_foreseen(parts: Parts) -> None:
    """Raise `OptionError` where no step beyond the next one can be foreseen."""
    schedule, cache = parts.schedule, parts.cache
    if not schedule.keeps_windows:
        raise OptionError(
            f"schedule {SCHEDULES.name_of(schedule)!r} cannot be verified ahead: its windows move "
            "while they have masks; take schedule fixed"
        )
    if type(cache).horizon is CachePolicy.horizon:
        raise OptionError(
            f"cache {CACHES.name_of(cache)!r} cannot be verified ahead: what it computes depends "
            "on what was decided; take none, prefix or dual"
        )


# ------------------------------------------------------------------------------------- watching


@dataclass(frozen=True)
class Seen:
    """A turn of a single row, `(W,)` tensors: its canvas, what the forward said, what counted."""

    tokens: Tensor
    positions: Tensor
    eligible: Tensor
    block: int
    candidate: Tensor
    top2: Tensor
    confidence: Tensor
    margin: Tensor
    scores: Tensor


@dataclass(frozen=True)
class _Noting(Watching):
    """Notes each turn of a single row, which it reads on the host."""

    extra_needs: ClassVar[frozenset[str]] = frozenset({"top2"})

    notes: list[Seen]

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        decision, state = super().decide(canvas, output, state)
        c = confidence(output)
        per_position = (canvas.tokens, canvas.positions, canvas.eligible)
        said = (output.candidate, output.top2, c, output.p1 - output.p2)
        scores = c if decision.scores is None else decision.scores
        tokens, positions, eligible = (value[0].clone() for value in per_position)
        candidate, top2, sure, lead, score = (value[0].clone() for value in (*said, scores))
        block = int(canvas.block[0])
        seen = Seen(tokens, positions, eligible, block, candidate, top2, sure, lead, score)
        self.notes.append(seen)
        return decision, state


def watch(decoder: Decoder, sampler: Sampler, request: Request) -> tuple[Generation, list[Seen]]:
    """One request decoded by `sampler` alone, and its turns."""
    notes: list[Seen] = []
    watching = _Noting(sampler, notes)
    object.__setattr__(watching, "traits", sampler.traits)
    return with_sampler(decoder, watching).generate(request)[0], notes


def with_sampler(decoder: Decoder, sampler: Sampler) -> Decoder:
    """A decoder like this one, its model shared, with another sampler."""
    from dlm_decode.api import Decoder

    parts, engine = decoder.parts, decoder.engine
    return Decoder(
        decoder.model,
        sampler,
        parts.cache,
        parts.schedule,
        draw=parts.draw,
        cfg_scale=engine.cfg_scale,
        seed=decoder.seed,
        max_batch_size=engine.max_batch_size,
        tokenizer=decoder.tokenizer,
        storage=engine.storage,
    )


# ---------------------------------------------------------------------------------------- audit


@dataclass(frozen=True)
class Divergence:
    """Where a request's two runs part: the first differing step, and how close the choice was.

    `score_gap` is the difference of the plain run's scores: of its choice and the other's where two
    positions were preferred, of the best and second-best token where two tokens were; None where
    one run decided more than the other.
    """

    id: str
    step: int
    score_gap: float | None


@dataclass(frozen=True)
class LosslessReport:
    """Both runs of all requests: plain figures first, then those with speculation."""

    rows: int
    identical: int
    forwards: tuple[int, int]
    positions: tuple[int, int]
    seconds: tuple[float, float]
    drafted: int
    accepted: int
    divergences: tuple[Divergence, ...]

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        ratios = {
            f"{name}_ratio": _ratio(*getattr(self, name))
            for name in ("forwards", "positions", "seconds")
        }
        return plain | {"identical_share": _ratio(self.rows, self.identical)} | ratios


def _ratio(whole: float, part: float) -> float:
    return round(part / whole, 4) if whole else 0.0


Timed = tuple[list["Generation"], float]
"""Results and the seconds that all of them took together."""


def audit_lossless(decoder: Decoder, requests: Sequence[Request]) -> LosslessReport:
    """Decode the requests with the decoder's `self_speculative` and with its inner alone."""
    inner: Sampler = decoder.parts.sampler.inner  # type: ignore[attr-defined]
    plain = with_sampler(decoder, inner)
    return compared(plain, requests, timed(plain, requests), timed(decoder, requests))


def timed(decoder: Decoder, requests: Sequence[Request]) -> Timed:
    """The requests decoded, and the seconds by `clock_of`."""
    clock = clock_of(decoder.model.device)
    began = clock()
    return decoder.generate(requests), clock() - began


def compared(
    decoder: Decoder, requests: Sequence[Request], plain: Timed, ahead: Timed
) -> LosslessReport:
    """Compare what the plain `decoder` and one with speculation made of the same requests."""
    runs = plain[0], ahead[0]
    apart = [
        _divergence(decoder, a, b, request)
        for a, b, request in zip(*runs, requests, strict=True)
        if _decided(a) != _decided(b)
    ]
    first, second = (
        (sum(r.forwards for r in run), sum(r.trace.computed_positions for r in run)) for run in runs
    )
    return LosslessReport(
        len(requests),
        len(requests) - len(apart),
        (first[0], second[0]),
        (first[1], second[1]),
        (plain[1], ahead[1]),
        sum(r.trace.drafted or 0 for r in ahead[0]),
        sum(r.trace.accepted or 0 for r in ahead[0]),
        tuple(apart),
    )


def _decided(result: Generation) -> Any:
    """Tokens, their order and the end: what must be the same."""
    return result.canvas, result.finish_reason, [_choice(step) for step in result.trace.steps]


def _choice(step: Step) -> tuple[dict[int, int], tuple[int, ...]]:
    return dict(zip(step.positions, step.tokens, strict=True)), tuple(sorted(step.remasked))


def _divergence(decoder: Decoder, a: Generation, b: Generation, request: Request) -> Divergence:
    mine, other = ([_choice(step) for step in r.trace.steps] for r in (a, b))
    same = sum(_agreeing(mine, other))
    if same >= min(len(mine), len(other)):
        return Divergence(a.id, same, None)
    _, notes = watch(decoder, decoder.parts.sampler, request)
    return Divergence(a.id, same, _gap(notes[same], mine[same][0], other[same][0]))


def _agreeing(a: Iterable[Any], b: Iterable[Any]) -> Iterator[bool]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield True


def _gap(seen: Seen, mine: dict[int, int], other: dict[int, int]) -> float | None:
    places = {p: i for i, p in enumerate(seen.positions.tolist())}
    only = [
        max((float(seen.scores[places[p]]) for p in one if p not in two), default=None)
        for one, two in ((mine, other), (other, mine))
    ]
    if only[0] is not None and only[1] is not None:
        return abs(only[0] - only[1])
    tokens = [p for p in mine if p in other and mine[p] != other[p]]
    return min((float(seen.margin[places[p]]) for p in tokens), default=None)


# ---------------------------------------------------------------------------------- calibration


def trajectories(notes: Sequence[Seen], depth: int) -> Iterator[tuple[Node, ...]]:
    """For each turn, the states up to `depth` steps after the next one, in its own coordinates.

    Nodes as in `DraftGraph`: what is filled after the next state, positions by their rank in this
    turn's confidence, tokens by theirs. A path ends at the block's end, and where a token is
    neither of the two best.
    """
    for start in range(len(notes) - 2):
        seen, root = notes[start], notes[start + 1]
        later = [n for n in notes[start + 2 : start + 2 + depth] if n.block == seen.block]
        if root.block == seen.block:
            yield tuple(_path(seen, root, later))


def _path(seen: Seen, root: Seen, later: Sequence[Seen]) -> Iterator[Node]:
    rank = ranks(seen.confidence[None], root.eligible[None])[0].tolist()
    for state in later:
        filled = (state.tokens != root.tokens).nonzero().flatten().tolist()
        named = [(rank[p] + 1, _token_rank(seen, p, int(state.tokens[p]))) for p in filled]
        if not filled or any(j == 0 for _, j in named):
            return
        yield tuple(sorted(named))


def _token_rank(seen: Seen, place: int, token: int) -> int:
    return 1 if token == int(seen.candidate[place]) else 2 * (token == int(seen.top2[place]))


def best_graph(paths: Iterable[tuple[Node, ...]], size: int) -> DraftGraph:
    """The `size` nodes that, connected, are walked most: Spiffy's calibration, greedily.

    Derived: with the nodes chosen so far, every path goes on until its first node that is not among
    them; the one where most paths stop is taken next. On a tree that is the best subgraph.
    """
    counts = Counter(paths)
    chosen: list[Node] = []
    for _ in range(size):
        stops: Counter[Node] = Counter()
        for path, count in counts.items():
            stop = next((node for node in path if node not in chosen), None)
            if stop is not None:
                stops[stop] += count
        if not stops:
            break
        chosen.append(min(stops, key=lambda node: (-stops[node], node)))
    return DraftGraph(tuple(chosen))


def calibrate(
    decoder: Decoder, requests: Sequence[Request], *, size: int, depth: int = 8
) -> DraftGraph:
    """Learn a draft graph of `size` nodes from how the decoder's sampler decodes the requests."""
    paths: list[tuple[Node, ...]] = []
    for request in requests:
        with torch.inference_mode():
            _, notes = watch(decoder, decoder.parts.sampler, request)
        paths += trajectories(notes, depth)
    return best_graph(paths, size)


def name_of(sampler: Sampler) -> str:
    """A chain's name as the command line has it."""
    from dlm_decode.samplers import layers

    return "+".join(SAMPLERS.name_of(layer) for layer in layers(sampler))
