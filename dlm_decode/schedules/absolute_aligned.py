"""Blocks of equal length, counted from absolute position 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlm_decode.schedules import SCHEDULES, Span
from dlm_decode.schedules.fixed import Fixed


@SCHEDULES.register("absolute_aligned")
@dataclass(frozen=True)
class AbsoluteAligned(Fixed):
    """Equal blocks from position 0, so that the prompt's tail shares the first decoded block.

    The layout block-causal models (SDAR, LLaDA2) are trained with; first and last may be shorter.
    """

    paper: ClassVar[str] = "SDAR, arXiv:2510.06303; LLaDA2.0, arXiv:2512.15745"

    def origin(self, span: Span) -> int:
        return span.start - span.start % span.block_length
