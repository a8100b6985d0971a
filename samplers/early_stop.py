"""Stop after a block with an end id in it: dInfer's early stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.exits import after, is_end, stopped
from dlm_decode.samplers import SAMPLERS, Wrapper, in_window
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("early_stop")
@dataclass(frozen=True)
class EarlyStop(Wrapper):
    """End the row when its block is finished and holds an end id; the rest becomes the end id.

    "dInfer: An Efficient Inference Framework for Diffusion Language Models", arXiv:2510.08666,
    `early_stop`. The text before the end id is the inner's, since everything before it is decided.
    A request's own `stop_at_eos` ends the row sooner, without waiting for the block. Not for rows
    with frozen spans behind the block.
    """

    paper: ClassVar[str] = "dInfer, arXiv:2510.08666"
    preserves_text: ClassVar[bool] = True

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        decision, inner = self.inner_decide(canvas, output, state)
        tokens, masked = after(canvas, decision)
        inside = in_window(canvas)
        ends = (is_end(tokens, canvas) & inside).any(-1) & ~(masked & inside).any(-1)
        return stopped(decision, ends), state | {"inner": inner}
