"""Draft on while the next chunk is worth more accepted tokens than it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from dlm_decode.bridge.controllers import CONTROLLERS, Controller
from dlm_decode.options import option


@dataclass(frozen=True)
class Pace:
    """Tokens emitted and cost units spent so far, both decaying; 1 unit is a verifier forward."""

    tokens: float = 1.0
    spent: float = 1.0

    @property
    def rate(self) -> float:
        return self.tokens / self.spent


@CONTROLLERS.register("cost")
@dataclass(frozen=True)
class Cost(Controller):
    """Add a chunk of n while S (a + .. + a^n) > rate (c_d + c_tok n).

    S is the survival probability of the draft so far, a the mean confidence of its last chunk,
    rate the row's tokens per cost unit. Costs are in verifier forwards; `measure_costs` times them.
    Derived, after the scheduler of DSpark, arXiv:2607.05147: confidences stand for acceptance
    probabilities, uncalibrated.
    """

    paper: ClassVar[str] = "derived, after DSpark, arXiv:2607.05147"

    n: int = option(8, "tokens a chunk", low=1)
    n_max: int = option(60, "most tokens a draft", low=1)
    c_d: float = option(0.12, "cost of one drafter forward", low=0.0)
    c_tok: float = option(0.005, "cost of verifying one more token", low=0.0)
    memory: float = option(0.8, "share of past rounds that counts at the next", low=0.0, high=1.0)

    def init(self) -> Any:
        return Pace()

    def first(self, state: Any) -> int:
        return min(self.n, self.n_max)

    def more(self, state: Any, confidence: Sequence[float], chunk: int) -> int:
        size = min(self.n, self.n_max - len(confidence))
        a = sum(confidence[-chunk:]) / chunk
        gain = prod(confidence) * sum(a**k for k in range(1, size + 1))
        return size if gain > state.rate * (self.c_d + self.c_tok * size) else 0

    def observe(self, state: Any, drafted: int, accepted: int) -> Any:
        chunks = -(-drafted // self.n)
        spent = 1.0 + chunks * self.c_d + drafted * self.c_tok
        return Pace(self.memory * state.tokens + accepted + 1.0, self.memory * state.spent + spent)
