"""The loop: draft, verify, emit, roll back; one verifier forward a round for a whole batch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dlm_decode.bridge.controllers import CONTROLLERS, Controller
from dlm_decode.bridge.draft import FACTORISED, Draft
from dlm_decode.bridge.drafters import Context, Drafter
from dlm_decode.bridge.law import Law, Sampling
from dlm_decode.bridge.rules import RULES, Case, Rule, Verdict
from dlm_decode.bridge.stats import Round, Speculation
from dlm_decode.bridge.verifier import Feed, Session, Verifier
from dlm_decode.errors import CapabilityError, OptionError, RequestError
from dlm_decode.noise import request_key

Stop = Callable[[list[int]], bool]
"""Asked after each emitted token, with the whole sequence: does the text end here?"""


@dataclass(frozen=True)
class Piece:
    """Tokens of prompt number `place` that one round emitted; its result once it is complete."""

    place: int
    tokens: tuple[int, ...]
    result: Speculation | None = None


class Speculator:
    """A verifier, a drafter, and how they work together; `generate` and `stream` run prompts.

    The output is the verifier's: at temperature 0 its greedy text, else (by default, rule `match`)
    a function of seed and prompt alone. Rows of a batch may have any lengths; each
    is the same alone and in any batch, up to the arithmetic of the forward.
    """

    def __init__(
        self,
        verifier: Verifier | Any,
        drafter: Drafter,
        *,
        rule: str | Rule = "match",
        controller: str | Controller = "failfast",
        sampling: Sampling | None = None,
        law: Law | None = None,
        seed: int = 0,
        max_batch_size: int = 8,
        end_ids: Sequence[int] | None = None,
        stop: Stop | None = None,
        lossless: bool = True,
        shared_ids: bool = False,
    ) -> None:
        """Raises `CapabilityError` or `OptionError` for parts that do not fit together.

        `law` takes ready logits processors instead of `sampling`. `end_ids` None takes the model's.
        `shared_ids` promises that both models' ids mean the same although one has more of them.
        """
        self.verifier = verifier if isinstance(verifier, Verifier) else Verifier(verifier)
        self.drafter = drafter
        self.rule = RULES.create(rule)
        self.controller = CONTROLLERS.create(controller)
        chosen = sampling or Sampling()
        self.law = law or Law(chosen.processors(), chosen.temperature == 0)
        self.seed, self.max_batch_size, self.stop = seed, max_batch_size, stop
        self.end_ids = self.verifier.end_ids if end_ids is None else tuple(end_ids)
        if max_batch_size < 1:
            raise OptionError(f"max_batch_size must be at least 1, got {max_batch_size}")
        if lossless and not self.rule.lossless:
            raise OptionError(
                f"rule {RULES.name_of(self.rule)!r} changes the verifier's output: pass "
                "lossless=False if that is meant"
            )
        if not shared_ids:
            check_vocabularies(self.verifier, drafter)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 128
    ) -> list[Speculation]:
        """Results in the order of the prompts, which are token ids of the verifier."""
        pieces = self.stream(prompts, max_new_tokens=max_new_tokens)
        done = {piece.place: piece.result for piece in pieces if piece.result is not None}
        return [done[place] for place in range(len(prompts))]

    def stream(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 128
    ) -> Iterator[Piece]:
        """Every row's new tokens after each round. Mistakes are raised before the first."""
        self._check(prompts, max_new_tokens)
        tracks = self._tracks(prompts, max_new_tokens)
        batches = range(0, len(tracks), self.max_batch_size)
        return (
            piece
            for first in batches
            for piece in self._run(tracks[first : first + self.max_batch_size])
        )

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if not len(prompts):
            raise RequestError("there are 0 prompts: give at least one")
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        most = self.verifier.max_positions
        for place, prompt in enumerate(prompts):
            self.verifier.check_ids(f"prompt {place}", prompt)
            if most is not None and len(prompt) + max_new_tokens > most:
                raise RequestError(
                    f"prompt {place} ({len(prompt)}) and max_new_tokens ({max_new_tokens}) take "
                    f"{len(prompt) + max_new_tokens} positions, but the verifier has {most}"
                )

    def _tracks(self, prompts: Sequence[Sequence[int]], most: int) -> list[_Track]:
        """Equal prompts of one call get different draws, by their order."""
        seen: Counter[tuple[int, ...]] = Counter()
        tracks = []
        for place, prompt in enumerate(prompts):
            ids = [int(token) for token in prompt]
            key = request_key(self.seed, ids, seen[tuple(ids)])
            seen[tuple(ids)] += 1
            tracks.append(_Track(place, self._context(ids, key, most), most))
        return tracks

    def _context(self, ids: list[int], key: int, most: int) -> Context:
        return Context(
            ids=ids,
            prompt_length=len(ids),
            key=key,
            room=most - 1,
            controller=self.controller,
            control=self.controller.init(),
            temperature=self.law.temperature,
            soft=self.rule.soft and not self.law.greedy,
            warp=self.law.warp,
            end_ids=self.end_ids,
            vocab_size=self.verifier.vocab_size,
        )

    def _run(self, tracks: list[_Track]) -> Iterator[Piece]:
        session, started_s = self.verifier.open(len(tracks)), time.perf_counter()
        while tracks:
            before_s = time.perf_counter()
            drafts = self._drafts(tracks)
            drafted_s = time.perf_counter()
            verdicts = self._verdicts(session, tracks, drafts)
            times = (drafted_s - before_s, time.perf_counter() - drafted_s)
            for track, draft, verdict in zip(tracks, drafts, verdicts, strict=True):
                tokens = track.take(draft, verdict, times, self.end_ids, self.stop)
                elapsed_s = time.perf_counter() - started_s
                yield Piece(track.place, tokens, track.result(elapsed_s, self.rule.lossless))
            live = [i for i, track in enumerate(tracks) if not track.reason]
            if live and len(live) < len(tracks):
                session.keep_rows(live)
            tracks = [tracks[i] for i in live]
            assert all(
                cached == len(t.context.ids) - 1
                for t, cached in zip(tracks, session.cached, strict=bool(tracks))
            ), "the cache must hold all but the last token"

    def _drafts(self, tracks: Sequence[_Track]) -> list[Draft]:
        found = self.drafter.propose([track.context for track in tracks])
        vocab = self.verifier.vocab_size
        return [usable(d, t.context.room, vocab) for d, t in zip(found, tracks, strict=True)]

    def _verdicts(
        self, session: Session, tracks: Sequence[_Track], drafts: Sequence[Draft]
    ) -> list[Verdict]:
        """Score all drafts in one forward, judge them, and keep what stands in the cache."""
        rows = list(zip(tracks, drafts, strict=True))
        feeds = [
            Feed(t.context.ids[cached:], d.tokens, () if d.tree is None else d.tree.parents)
            for (t, d), cached in zip(rows, session.cached, strict=True)
        ]
        logits = session.score(feeds)
        cases = [self._case(t.context, d, x) for (t, d), x in zip(rows, logits, strict=True)]
        verdicts = self.rule.judge(cases)
        session.commit([verdict.kept for verdict in verdicts])
        return verdicts

    def _case(self, context: Context, draft: Draft, logits: Tensor) -> Case:
        log_p = self.law.scores(logits, _contexts(context.ids, draft))
        return Case(draft, log_p, context.key, len(context.ids), self.law.greedy)


@dataclass
class _Track:
    """A prompt in flight."""

    place: int
    context: Context
    most: int
    reason: str = ""
    rounds: list[Round] = field(default_factory=list)

    def take(
        self,
        draft: Draft,
        verdict: Verdict,
        times: tuple[float, float],
        end_ids: Sequence[int],
        stop: Stop | None,
    ) -> tuple[int, ...]:
        """Append what was emitted, up to where the text ends; returns it."""
        context, tokens = self.context, []
        for token in verdict.emitted:
            context.ids.append(token)
            tokens.append(token)
            self.reason = self._reason(token, end_ids, stop)
            if self.reason:
                break
        context.room = self.most - (len(context.ids) - context.prompt_length) - 1
        drafted = len(draft) if draft.tree is None else _depth(draft)
        accepted = min(len(verdict.kept), len(tokens))
        context.control = context.controller.observe(context.control, drafted, accepted)
        self.rounds.append(Round(drafted, accepted, len(tokens), draft.forwards, *times))
        return tuple(tokens)

    def result(self, elapsed_s: float, lossless: bool) -> Speculation | None:
        """The result, once the text has ended."""
        if not self.reason:
            return None
        ids = tuple(self.context.ids[self.context.prompt_length :])
        return Speculation(ids, self.reason, tuple(self.rounds), elapsed_s, lossless)

    def _reason(self, token: int, end_ids: Sequence[int], stop: Stop | None) -> str:
        if token in end_ids:
            return "eos"
        if stop is not None and stop(self.context.ids):
            return "stop"
        full = len(self.context.ids) - self.context.prompt_length >= self.most
        return "length" if full else ""


def speculate(
    verifier: Verifier | Any,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    rule: str | Rule = "match",
    controller: str | Controller = "failfast",
    sampling: Sampling | None = None,
    seed: int = 0,
    max_batch_size: int = 8,
) -> list[Speculation]:
    """What `verifier` (a causal LM of transformers) generates, drafted for by `drafter`.

    `prompts` are token ids of the verifier. `Speculator` has more to set, and streams.
    """
    speculator = Speculator(
        verifier,
        drafter,
        rule=rule,
        controller=controller,
        sampling=sampling,
        seed=seed,
        max_batch_size=max_batch_size,
    )
    return speculator.generate(prompts, max_new_tokens=max_new_tokens)


def check_vocabularies(verifier: Verifier, drafter: Drafter) -> None:
    """Raise `CapabilityError` unless the drafter's ids are the verifier's, as far as sizes tell."""
    size = drafter.vocab_size
    if size is not None and size != verifier.vocab_size:
        raise CapabilityError(
            f"the drafter has {size} ids and the verifier {verifier.vocab_size}: if their "
            "tokenizers differ, wrap the drafter in Retokenized; if only the padding does, pass "
            "shared_ids=True"
        )


def usable(draft: Draft, room: int, vocab_size: int) -> Draft:
    """The draft up to its first id that the verifier lacks, at most `room` tokens.

    Raises `CapabilityError` for a certified draft with such an id.
    """
    if draft.tree is not None:
        shared = all(token < vocab_size for token in draft.tokens)
        return draft if shared and _depth(draft) <= room else replace(draft, tokens=(), tree=None)
    unknown = (i for i, token in enumerate(draft.tokens) if token >= vocab_size)
    known = next(unknown, len(draft))
    if known < len(draft) and draft.law == FACTORISED:
        raise CapabilityError(
            f"a certified draft holds id {draft.tokens[known]}, but the verifier has {vocab_size} "
            "ids: a law over the verifier's ids must be drawn from, not cut afterwards"
        )
    return draft.cut(min(room, known))


def _depth(draft: Draft) -> int:
    tree = draft.tree
    return 0 if tree is None else max((len(tree.path(i)) for i in range(len(tree))), default=0)


def _contexts(ids: list[int], draft: Draft) -> list[list[int]]:
    """The ids before each scored position: the sequence's end, then each drafted token."""
    if draft.tree is None:
        return [[*ids, *draft.tokens[:i]] for i in range(len(draft) + 1)]
    paths = [[draft.tokens[i] for i in draft.tree.path(n)] for n in range(len(draft))]
    return [ids, *([*ids, *path] for path in paths)]
