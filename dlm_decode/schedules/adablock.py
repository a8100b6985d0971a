"""Blocks that end at a predicted delimiter: AdaBlock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.options import option
from dlm_decode.schedules import SCHEDULES, Schedule, Span, Window
from dlm_decode.scores import best
from dlm_decode.types import Canvas, Output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@SCHEDULES.register("adablock")
@dataclass(frozen=True)
class AdaBlock(Schedule):
    """Blocks that end with a delimiter the model is sure of, or at their usual length.

    AdaBlock-dLLM, arXiv:2509.26432. The first forward of a block looks at the next
    floor(`lookahead` L) positions, L the positions to decide: of those that predict a delimiter the
    most probable one ends the block, itself included, if its probability is at least
    `delimiter_threshold`; else the block has the request's block length. That forward already
    decides tokens.

    `delimiters` are ids ("198 271") or a text; a text stands for each token that spells just that.
    """

    paper: ClassVar[str] = "AdaBlock-dLLM, arXiv:2509.26432"

    delimiter_threshold: float = option(0.3, "tau_D, probability that ends a block", low=0.0)
    lookahead: float = option(
        0.25, "share of the positions to decide that is looked at", low=0.0, high=1.0
    )
    delimiters: str | None = option(
        None, "ids or text that end a block (none: a newline, if there is a tokenizer)"
    )
    ids: tuple[int, ...] | None = None
    """Ids that `delimiters` were found to mean, see `bound`."""

    def bound(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> AdaBlock:
        if self.ids is not None:
            return self
        words = (self.delimiters or "").replace(",", " ").split()
        if words and all(word.isdecimal() for word in words):
            found = tuple(int(word) for word in words)
            if max(found) >= vocab_size:
                raise OptionError(
                    f"AdaBlock.delimiters must be ids below {vocab_size}, got {self.delimiters!r}"
                )
            return replace(self, ids=found)
        if tokenizer is None:
            if self.delimiters is None:
                return replace(self, ids=())
            raise CapabilityError(
                f"AdaBlock.delimiters {self.delimiters!r} is a text, and this model has no "
                "tokenizer: give ids"
            )
        text = self.delimiters or "\n"
        spelled = tokenizer.batch_decode([[i] for i in range(min(vocab_size, len(tokenizer)))])
        found = tuple(i for i, word in enumerate(spelled) if word == text)
        if not found and self.delimiters is not None:
            raise OptionError(f"AdaBlock.delimiters: no token of this model spells {text!r}")
        return replace(self, ids=found)

    def first(self, span: Span) -> Window:
        return self._from(span, span.start, 0)

    def advance(self, span: Span, window: Window, masked: np.ndarray) -> Window:
        while not masked[window.start : window.stop].any() and window.stop < span.stop:
            window = self._from(span, window.stop, window.index + 1)
        return window

    def blocks(self, span: Span) -> int:
        return -(-(span.stop - span.start) // span.block_length)

    def widest(self, span: Span) -> int:
        whole = span.stop - span.start
        return min(max(int(self.lookahead * whole), span.block_length), whole)

    def focus(self, canvas: Canvas, output: Output) -> Tensor | None:
        """Ends `(B,)` of blocks that begin; the others stay as they are."""
        first = output if output.valid.ndim == 2 else output.branch(0)
        is_end = torch.zeros_like(canvas.eligible)
        for delimiter in self.ids or ():
            is_end = is_end | (first.top1 == delimiter)
        reach = canvas.start + (self.lookahead * canvas.total).long()
        seen = canvas.eligible & is_end & (canvas.positions < reach[:, None])
        likeliest = best(first.p1, seen)
        sure = (likeliest & (first.p1 >= self.delimiter_threshold)).any(-1)
        behind = canvas.positions + 1
        end = (behind * likeliest).amax(-1)
        open_ = behind.masked_fill(~canvas.eligible, torch.iinfo(behind.dtype).max).amin(-1)
        usual = torch.maximum(canvas.start + canvas.block_length, open_)
        found = torch.where(sure, end, torch.minimum(usual, canvas.stop))
        return torch.where(canvas.step == 0, found, canvas.stop)

    def _from(self, span: Span, start: int, index: int) -> Window:
        """A block about to begin: all it may come to hold."""
        return Window(start, min(start + self.widest(span), span.stop), index)
