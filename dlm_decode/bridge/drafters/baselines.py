"""Drafters without a model: none at all, random ids, and what followed the same words earlier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlm_decode.bridge.draft import Draft
from dlm_decode.bridge.drafters import Context
from dlm_decode.bridge.streams import DRAFT, uniform
from dlm_decode.errors import OptionError
from dlm_decode.noise import request_key

__all__ = ["NullDrafter", "PromptLookup", "RandomDrafter"]


@dataclass(frozen=True)
class NullDrafter:
    """Drafts nothing: the verifier alone, the yardstick of every speedup."""

    vocab_size: int | None = None

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        return [Draft() for _ in contexts]


@dataclass(frozen=True)
class RandomDrafter:
    """Uniformly random ids of the verifier's vocabulary: the worst drafter, for tests."""

    vocab_size: int

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        return [self._draft(context) for context in contexts]

    def _draft(self, context: Context) -> Draft:
        start, count = len(context.ids), context.first_chunk
        key = request_key(DRAFT, [context.key % 2**62])
        numbers = uniform(key, start, count, round_=start).tolist()
        tokens = [int(u * self.vocab_size) for u in numbers]
        return Draft(tuple(tokens[: context.cut_at_end(tokens)]))


@dataclass(frozen=True)
class PromptLookup:
    """What followed the last occurrence of the sequence's last words (Saxena, Prompt Lookup
    Decoding, 2023).

    The longest n-gram of `max_ngram` to `min_ngram` last tokens that stands earlier in the sequence
    is looked up, the latest place first.
    """

    max_ngram: int = 3
    min_ngram: int = 1
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise OptionError(
                f"need 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}"
            )

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        return [self._draft(context) for context in contexts]

    def _draft(self, context: Context) -> Draft:
        ids = context.ids
        for size in range(min(self.max_ngram, len(ids) - 1), self.min_ngram - 1, -1):
            found = _last_occurrence(ids, size)
            if found is not None:
                tokens = ids[found : found + context.first_chunk]
                return Draft(tuple(tokens[: context.cut_at_end(tokens)]))
        return Draft()


def _last_occurrence(ids: Sequence[int], size: int) -> int | None:
    """The place after the latest earlier occurrence of the last `size` ids, or None."""
    tail = list(ids[-size:])
    for start in range(len(ids) - size - 1, -1, -1):
        if list(ids[start : start + size]) == tail:
            return start + size
    return None
