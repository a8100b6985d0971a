"""Blocks of equal length, counted from the first position to decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.schedules import SCHEDULES, Schedule, Span, Window


@SCHEDULES.register("fixed")
@dataclass(frozen=True)
class Fixed(Schedule):
    """Equal blocks from the first position to decode; the last one may be shorter.

    Semi-autoregressive decoding of LLaDA (arXiv:2502.09992). A block is left when it has no mask.
    """

    paper: ClassVar[str] = "Large Language Diffusion Models, arXiv:2502.09992"
    keeps_windows: ClassVar[bool] = True

    def origin(self, span: Span) -> int:
        """Where blocks are counted from."""
        return span.start

    def first(self, span: Span) -> Window:
        return self._block(span, 0)

    def advance(self, span: Span, window: Window, masked: np.ndarray) -> Window:
        while not masked[window.start : window.stop].any() and window.stop < span.stop:
            window = self._block(span, window.index + 1)
        return window

    def blocks(self, span: Span) -> int:
        return -(-(span.stop - self.origin(span)) // span.block_length)

    def widest(self, span: Span) -> int:
        return min(span.block_length, span.stop - self.origin(span))

    def _block(self, span: Span, index: int) -> Window:
        start = self.origin(span) + index * span.block_length
        return Window(start, min(start + span.block_length, span.stop), index)
