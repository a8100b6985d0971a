"""Stop after a block of nothing but end or pad ids: FreeDave's stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.exits import after, is_end, stopped
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Wrapper, in_window
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("blank_stop")
@dataclass(frozen=True)
class BlankStop(Wrapper):
    """End the row when its block is entirely end ids, or entirely pad ids.

    "Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion Large Language
    Models", arXiv:2510.00294, as in its code. What is left becomes the end id. Text is not always
    preserved: after a block of pad ids the inner might have gone on. Not for rows with frozen spans
    behind the block.
    """

    paper: ClassVar[str] = "FreeDave, arXiv:2510.00294"

    pad_id: int | None = option(None, "the pad id, if blocks of it should end a row too", low=0)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        decision, inner = self.inner_decide(canvas, output, state)
        tokens, masked = after(canvas, decision)
        outside = ~in_window(canvas)
        blank = (is_end(tokens, canvas) | outside).all(-1)
        if self.pad_id is not None:
            blank = blank | ((tokens == self.pad_id) | outside).all(-1)
        ends = blank & ~(masked & ~outside).any(-1)
        return stopped(decision, ends), state | {"inner": inner}
