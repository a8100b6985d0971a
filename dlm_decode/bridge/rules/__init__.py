"""Verification rules, one file each: which drafted tokens stand, and what is emitted after them.

Letters: g drafted tokens, V vocabulary. log p is the verifier's law after all logits processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dlm_decode.bridge.draft import Draft
from dlm_decode.options import Options
from dlm_decode.registry import Registry


@dataclass(frozen=True)
class Case:
    """One row's draft beside the verifier's opinion of it.

    `log_p (g + 1, V)` after the sequence and after each drafted token (for a tree, each node).
    `start` is the absolute position of the first drafted token, `key` the row's noise key.
    """

    draft: Draft
    log_p: Tensor
    key: int
    start: int
    greedy: bool


@dataclass(frozen=True)
class Verdict:
    """`kept`: places of the draft that stand; `emitted`: their tokens and the one drawn after."""

    kept: tuple[int, ...]
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class Rule(Options):
    """Base of all rules.

    `lossless` ones emit exactly the verifier's law. `soft` ones make use of a certified draft law.
    `paper` names the source.
    """

    paper: ClassVar[str] = ""
    lossless: ClassVar[bool] = True
    soft: ClassVar[bool] = False

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """One verdict a row."""
        raise NotImplementedError


RULES: Registry[Rule] = Registry("rule", "dlm_decode.bridge.rules", "dlm_decode.bridge.rules")


def chain_verdict(draft: Draft, accepted: int, token: int) -> Verdict:
    """The first `accepted` tokens stand and `token` follows."""
    return Verdict(tuple(range(accepted)), (*draft.tokens[:accepted], token))
