"""Block schedules, one file each: which window of a row is eligible now, and when it moves.

A schedule works on one row at a time, on the host, from positions alone; only `focus` sees a
forward's output and is tensor code. The engine keeps the window and asks for the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from torch import Tensor

from dlm_decode.options import Options
from dlm_decode.registry import Registry
from dlm_decode.types import Canvas, Output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Span:
    """The part of a row to decode: positions `[start, stop)` hold all its editable ones.

    `block_length` is the request's (or the model's) block size.
    """

    start: int
    stop: int
    block_length: int


@dataclass(frozen=True)
class Window:
    """Positions `[start, stop)` of block `index`."""

    start: int
    stop: int
    index: int = 0


@dataclass(frozen=True)
class Schedule(Options):
    """Base of all schedules. `paper` names the source.

    `keeps_windows` promises that a window changes only once it has no mask, so that the steps of a
    sampler inside it can be foreseen. `opens_ahead`: a window may reach further the more is decided
    in it, and so further in a branch of the row than in the row itself.
    """

    paper: ClassVar[str] = ""
    keeps_windows: ClassVar[bool] = False
    opens_ahead: ClassVar[bool] = False

    def bound(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> Schedule:
        """The schedule for a model, with texts among its options turned into ids."""
        return self

    def first(self, span: Span) -> Window:
        """The window a row begins with."""
        raise NotImplementedError

    def advance(self, span: Span, window: Window, masked: np.ndarray) -> Window:
        """The window of the next turn, given which positions of the whole row are masked.

        Asked after every turn while the row has masks; a window without masks must move on. A
        change of `index` starts a new block: sampler state of scope "block" begins afresh.
        """
        raise NotImplementedError

    def blocks(self, span: Span) -> int:
        """How many blocks the row has, for step budgets."""
        raise NotImplementedError

    def widest(self, span: Span) -> int:
        """The longest window this row can have, so that shapes stay fixed."""
        return min(span.block_length, span.stop)

    def focus(self, canvas: Canvas, output: Output) -> Tensor | None:
        """Optionally, new window ends `(B,)` seen from this forward; positions beyond them drop out
        of this turn's eligible ones. None keeps the windows."""
        return None


SCHEDULES: Registry[Schedule] = Registry("schedule", "dlm_decode.schedules", "dlm_decode.schedules")
