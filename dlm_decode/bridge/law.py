"""The verifier's law after all logits processors, position by position.

Letters: n scored positions, V vocabulary. Processors see what they would see in `generate`: the
sequence so far, drafted tokens that lead to the position included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from dlm_decode.options import Options, option

WITHOUT_HISTORY = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
"""Processors that never look at the ids, so that all positions go through them at once."""


@dataclass(frozen=True)
class Sampling(Options):
    """How the verifier draws its tokens; the names are those of `generate`."""

    temperature: float = option(0.0, "0 takes the most probable token", low=0.0)
    top_k: int | None = option(None, "draw from this many most probable tokens", low=1)
    top_p: float | None = option(None, "draw from the smallest set of this mass", above=0, high=1)
    repetition_penalty: float = option(1.0, "divides the logits of ids that stood before", above=0)

    def processors(self) -> LogitsProcessorList:
        """What `generate` would build for these settings, in its order."""
        found: list[LogitsProcessor] = []
        if self.repetition_penalty != 1.0:
            found.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.temperature > 0:
            if self.temperature != 1.0:
                found.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k is not None:
                found.append(TopKLogitsWarper(self.top_k))
            if self.top_p is not None and self.top_p < 1:
                found.append(TopPLogitsWarper(self.top_p))
        return LogitsProcessorList(found)


@dataclass(frozen=True)
class Law:
    """Logits processors and whether the best token is taken or one is drawn."""

    processors: LogitsProcessorList
    greedy: bool

    @property
    def temperature(self) -> float:
        """The temperature among the processors; 0 if greedy, 1 if there is none."""
        found = [p for p in self.processors if isinstance(p, TemperatureLogitsWarper)]
        return 0.0 if self.greedy else float(found[-1].temperature) if found else 1.0

    @property
    def warp(self) -> Callable[[Tensor], Tensor]:
        """The processors that need no history, on logits `(n, V)`."""
        plain = [p for p in self.processors if isinstance(p, WITHOUT_HISTORY)]
        return lambda logits: _processed(plain, torch.zeros(1, 1, dtype=torch.long), logits)

    def scores(self, logits: Tensor, contexts: Sequence[Sequence[int]]) -> Tensor:
        """log p `(n, V)` of raw `logits (n, V)`; `contexts` are the ids before each position.

        Greedy scores are not normalised, lest rounding makes ties that `generate` does not see.
        """
        if all(isinstance(p, WITHOUT_HISTORY) for p in self.processors):
            found = self.warp(logits)
        else:
            found = torch.cat([self._row(*pair) for pair in zip(contexts, logits, strict=True)])
        return found if self.greedy else found.log_softmax(-1)

    def _row(self, context: Sequence[int], logits: Tensor) -> Tensor:
        ids = torch.tensor([list(context)], device=logits.device)
        return _processed(self.processors, ids, logits[None])


def _processed(processors: Sequence[LogitsProcessor], ids: Tensor, logits: Tensor) -> Tensor:
    """Processors may write into what they are given, so they get a copy."""
    found = logits.clone()
    for processor in processors:
        found = processor(ids, found)
    return found
