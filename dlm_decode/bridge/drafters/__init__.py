"""Drafters, one file each: whatever proposes tokens for the verifier to judge.

No drafter can change what is emitted, only how many tokens a verifier forward yields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from dlm_decode.bridge.controllers import Controller
from dlm_decode.bridge.draft import Draft


@dataclass
class Context:
    """One row as its drafter sees it: a record that the loop owns.

    `ids` is the whole sequence, `prompt_length` of which were given; `room` is the longest draft
    that is of use. `key` is the noise key. `memory` is the drafter's to use, `control` the
    controller's state. `soft`: the rule makes use of a certified law. `temperature` 0 is greedy;
    `warp` turns raw logits `(n, V)` into those of the drawing law, where that needs no history.
    A certified draft holds no id from `vocab_size` on, which the verifier lacks: cutting before
    such an id afterwards would depend on its value.
    """

    ids: list[int]
    prompt_length: int
    key: int
    room: int
    controller: Controller
    control: Any
    temperature: float = 0.0
    soft: bool = False
    warp: Callable[[Tensor], Tensor] | None = None
    end_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    memory: Any = field(default=None)

    @property
    def first_chunk(self) -> int:
        """How many tokens to draft at first, 0 if none is of use."""
        return min(self.controller.first(self.control), self.room)

    def cut_at_end(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` to keep: up to and with the first end id."""
        ends = (i + 1 for i, token in enumerate(tokens) if token in self.end_ids)
        return next(ends, len(tokens))


class Drafter(Protocol):
    """What the loop asks of a drafter. `vocab_size` None: its ids are always the verifier's."""

    @property
    def vocab_size(self) -> int | None: ...

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """One draft a row, at most `room` tokens long; an empty one is a plain decoding step."""
        ...
