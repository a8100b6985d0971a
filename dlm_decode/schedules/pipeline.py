"""A window over several unfinished blocks: discrete diffusion forcing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.options import option
from dlm_decode.schedules import SCHEDULES, Schedule, Span, Window


@SCHEDULES.register("pipeline")
@dataclass(frozen=True)
class Pipeline(Schedule):
    """Equal blocks, the next of which opens once the last one is decided in part.

    Discrete diffusion forcing (D2F), arXiv:2508.09192. The window reaches from the first unfinished
    block to the end of the last opened one; a turn opens at most one, when the decided share of the
    last one is at least `add`, and none behind an end id that the row ends at. Made for
    block-causal models, where what stands in a block behind changes nothing before it, and for the
    samplers `d2f` and `lopa`.
    """

    paper: ClassVar[str] = "D2F, arXiv:2508.09192"
    opens_ahead: ClassVar[bool] = True

    add: float = option(
        0.1, "tau_add, decided share of the last block that opens the next one", above=0, high=1
    )

    def first(self, span: Span) -> Window:
        return Window(span.start, min(span.start + span.block_length, span.stop))

    def advance(self, span: Span, window: Window, masked: np.ndarray) -> Window:
        stop = window.stop
        if masked[self._begin(span, stop - 1) : stop].mean() <= 1 - self.add:
            stop = self._opened(span, stop)
        while not masked[window.start : stop].any() and stop < span.stop:
            stop = self._opened(span, stop)
        open_ = np.flatnonzero(masked[window.start : stop])
        if not len(open_):
            return window
        start = self._begin(span, window.start + int(open_[0]))
        return Window(start, stop, (start - span.start) // span.block_length)

    def blocks(self, span: Span) -> int:
        return -(-(span.stop - span.start) // span.block_length)

    def widest(self, span: Span) -> int:
        return span.stop - span.start

    def _begin(self, span: Span, position: int) -> int:
        """Where the block of a position begins."""
        return position - (position - span.start) % span.block_length

    def _opened(self, span: Span, stop: int) -> int:
        return min(stop + span.block_length, span.stop)
