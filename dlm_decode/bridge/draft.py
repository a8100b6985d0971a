"""A draft and the law it was drawn from: what a rule may believe about it, and no more.

Letters: g drafted tokens, V vocabulary. The only law that is always safe for a masked diffusion
drafter is one-hot: "this token, with probability 1". A soft law is used for the positions that
satisfy the record rule alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dlm_decode.bridge.tree import Tree
from dlm_decode.errors import CapabilityError

ONE_HOT = "one_hot"
FACTORISED = "factorised"


@dataclass(frozen=True)
class Draft:
    """Tokens proposed to follow a sequence, as a chain; `tree` proposes several chains at once.

    `law` FACTORISED certifies that the tokens of one step were drawn independently, each from the
    law `log_q (g, V)` stated for it, that which positions are committed when never depends on a
    drawn value of the same step, and that the length was not decided by tokens that were cut off.
    `steps` says in which step each token was committed, `confidence` its probability under the
    drafter, `forwards` what the draft cost.
    """

    tokens: tuple[int, ...] = ()
    law: str = ONE_HOT
    log_q: Tensor | None = None
    steps: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    forwards: int = 0
    tree: Tree | None = None

    def __post_init__(self) -> None:
        if self.law not in (ONE_HOT, FACTORISED):
            raise CapabilityError(f"law must be {ONE_HOT} or {FACTORISED}, got {self.law!r}")
        if self.law == ONE_HOT and self.log_q is not None:
            raise CapabilityError("a one-hot draft states no log_q: only a certified law is used")
        if self.law == FACTORISED:
            given = 0 if self.log_q is None else len(self.log_q)
            if given != len(self.tokens) or len(self.steps) != len(self.tokens):
                raise CapabilityError(
                    f"a factorised draft of {len(self.tokens)} tokens needs log_q and a step for "
                    f"each, got {given} and {len(self.steps)}"
                )

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> Draft:
        """The first `length` tokens; `length` must not depend on the tokens behind it."""
        if length >= len(self):
            return self
        return Draft(
            self.tokens[:length],
            self.law,
            None if self.log_q is None else self.log_q[:length],
            self.steps[:length],
            self.confidence[:length],
            self.forwards,
        )

    def laws(self, vocab_size: int, device: torch.device) -> Tensor:
        """log q `(g, V)` fp64 that verification may use: as stated where recorded, else one-hot."""
        tokens = torch.tensor(self.tokens, dtype=torch.long, device=device)
        shape = (len(self), vocab_size)
        certain = torch.full(shape, -torch.inf, dtype=torch.float64, device=device)
        certain.scatter_(1, tokens[:, None], 0.0)
        if self.log_q is None:
            return certain
        stated = torch.full_like(certain, -torch.inf)
        width = min(vocab_size, self.log_q.shape[1])
        stated[:, :width] = self.log_q[:, :width].to(device)
        keep = torch.tensor(recorded(self.steps), dtype=torch.bool, device=device)
        return torch.where(keep[:, None], stated, certain)


def recorded(steps: Sequence[int]) -> list[bool]:
    """The record rule (derived): whether each position was committed no earlier than all before it.

    Given the tokens left of such a position and all earlier steps, it is distributed as its
    marginal at the commit step. Any other position is already known from later ones: one-hot.
    """
    return [step >= high for step, high in zip(steps, accumulate(steps, max), strict=True)]
