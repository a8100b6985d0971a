"""A window that follows the first mask and always holds as many masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.options import option
from dlm_decode.schedules import SCHEDULES, Schedule, Span, Window


@SCHEDULES.register("sliding")
@dataclass(frozen=True)
class Sliding(Schedule):
    """From the first mask on, as far as it takes to hold a block length of masks.

    Deferred commitment decoding (DCD), arXiv:2601.02076: the window [L, R) begins at the first mask
    and holds `block_length` masks (fewer at the end of the text), but is never longer than
    `max_length` (but for the first one, as published). A move of L begins a new block, for the
    state of samplers and for caches.
    """

    paper: ClassVar[str] = "DCD, arXiv:2601.02076"

    max_length: int = option(128, "longest window", low=1)

    def first(self, span: Span) -> Window:
        return Window(span.start, min(span.start + span.block_length, span.stop))

    def advance(self, span: Span, window: Window, masked: np.ndarray) -> Window:
        open_ = np.flatnonzero(masked[span.start : span.stop]) + span.start
        open_ = open_[open_ >= window.start]
        if not len(open_):
            return window
        start, enough = int(open_[0]), len(open_) > span.block_length
        stop = int(open_[span.block_length - 1]) + 1 if enough else span.stop
        if len(open_) == span.stop - span.start:
            return self.first(span)
        stop = min(stop, start + self.max_length)
        return Window(start, stop, window.index + (start > window.start))

    def blocks(self, span: Span) -> int:
        return span.stop - span.start + 1

    def widest(self, span: Span) -> int:
        return min(max(self.max_length, span.block_length), span.stop - span.start)
