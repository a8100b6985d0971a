"""Windows inside the blocks of a block-causal model: Fast-dLLM v2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.options import option
from dlm_decode.schedules import SCHEDULES, Schedule, Span, Window


@SCHEDULES.register("sub_blocks")
@dataclass(frozen=True)
class SubBlocks(Schedule):
    """Blocks from position 0, each decoded in windows of `sub_length` from left to right.

    Fast-dLLM v2 (arXiv:2509.26328), hierarchical decoding. Its models are shifted and block-causal,
    so that the finished block before predicts the first token of the next one: the first `lead`
    positions of a block that begins behind the prompt are a window of their own.
    """

    paper: ClassVar[str] = "Fast-dLLM v2, arXiv:2509.26328"
    keeps_windows: ClassVar[bool] = True

    sub_length: int = option(8, "positions of a window", low=1)
    lead: int = option(1, "first positions of a block that are decided before the rest", low=0)

    def first(self, span: Span) -> Window:
        inside = span.start % span.block_length
        return self._window(span, span.start - inside % self._step(span), 0, begins=inside == 0)

    def advance(self, span: Span, window: Window, masked: np.ndarray) -> Window:
        while not masked[window.start : window.stop].any() and window.stop < span.stop:
            window = self._after(span, window)
        return window

    def blocks(self, span: Span) -> int:
        window = self.first(span)
        while window.stop < span.stop:
            window = self._after(span, window)
        return window.index + 1

    def widest(self, span: Span) -> int:
        return min(self._step(span), span.stop)

    def _step(self, span: Span) -> int:
        return min(self.sub_length, span.block_length)

    def _after(self, span: Span, window: Window) -> Window:
        """The next window: the rest of the sub-block behind its lead, or the next sub-block."""
        inside = window.stop % span.block_length
        beside = inside % self._step(span)
        return self._window(span, window.stop - beside, window.index + 1, begins=inside == 0)

    def _window(self, span: Span, start: int, index: int, *, begins: bool) -> Window:
        """A sub-block from `start` on, or the lead of a block that `begins` with it."""
        length = min(self.lead, self._step(span)) if begins and self.lead else self._step(span)
        end = start - start % span.block_length + span.block_length
        return Window(start, min(start + length, end, span.stop), index)
