"""What a speculative run did and cost; all of it measured, nothing modelled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Round:
    """One verifier forward of one row.

    `drafted` tokens (of a tree: its depth), `accepted` of them, `emitted` in all: the accepted ones
    and the verifier's own, fewer where the text ended inside. Seconds are those of the whole batch.
    """

    drafted: int
    accepted: int
    emitted: int
    drafter_forwards: int
    draft_s: float
    verify_s: float


@dataclass(frozen=True)
class Totals:
    """Figures over any set of rounds; a verifier forward counts once for each of its rows.

    The first forward of a row, which reads its prompt, counts and emits like any other, so a
    verifier alone has exactly one token a forward.
    """

    rounds: tuple[Round, ...]

    @classmethod
    def over(cls, results: Iterable[Speculation]) -> Totals:
        return cls(tuple(r for result in results for r in result.rounds))

    @property
    def verifier_forwards(self) -> int:
        return len(self.rounds)

    @property
    def tokens(self) -> int:
        return sum(r.emitted for r in self.rounds)

    @property
    def drafted(self) -> int:
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.accepted for r in self.rounds)

    @property
    def drafter_forwards(self) -> int:
        return sum(r.drafter_forwards for r in self.rounds)

    @property
    def tokens_per_verifier_forward(self) -> float:
        """Mean acceptance length, the verifier's own token included: a ratio of totals."""
        return self.tokens / max(self.verifier_forwards, 1)

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted."""
        return self.accepted / max(self.drafted, 1)

    def acceptance_by_position(self) -> list[float]:
        """Of the drafts that stood up to a place, the share that stood there too, in order."""
        deepest = max((r.drafted for r in self.rounds), default=0)
        tested = [
            sum(r.accepted >= i and r.drafted > i for r in self.rounds) for i in range(deepest)
        ]
        passed = [sum(r.accepted > i for r in self.rounds) for i in range(deepest)]
        return [a / n for a, n in zip(passed, tested, strict=True) if n]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "tokens": self.tokens,
            "verifier_forwards": self.verifier_forwards,
            "tokens_per_verifier_forward": round(self.tokens_per_verifier_forward, 4),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_by_position": [round(a, 4) for a in self.acceptance_by_position()],
            "drafter_forwards": self.drafter_forwards,
        }


@dataclass(frozen=True)
class Speculation:
    """The result of one prompt: new `ids`, "eos", "length" or "stop", its rounds.

    `lossless` is False if a rule was used that does not keep the verifier's law. `elapsed_s` runs
    from the batch's start to this row's end.
    """

    ids: tuple[int, ...]
    finish_reason: str
    rounds: tuple[Round, ...]
    elapsed_s: float
    lossless: bool = True

    @property
    def totals(self) -> Totals:
        return Totals(self.rounds)
