"""Fixed number of tokens a step, the most confident ones first: LLaDA's own sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dlm_decode.noise import ORDER, uniform
from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler, block_steps, rounded_quota, window_masks
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import LAWS, confidence
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("llada")
@dataclass(frozen=True)
class Llada(QuotaSampler):
    """Each step commits its quota of the most confident tokens of the block.

    "Large Language Diffusion Models", arXiv:2502.09992, algorithm 5 (low-confidence remasking). A
    block of m masks takes S = steps // blocks steps; step s commits m // S + [s < m mod S] tokens
    of highest c_i = p_i(x_i). Confidence is the model's own probability, at any temperature.
    """

    paper: ClassVar[str] = "Large Language Diffusion Models, arXiv:2502.09992"

    remasking: str = option(
        "low_confidence",
        "which tokens are kept: the most confident ones, or random ones",
        choices=("low_confidence", "random"),
    )
    split: str = option(
        "even",
        "spread a block's masks evenly over its steps, or by rounding what is expected (dllm)",
        choices=("even", "rounded"),
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def init(self, canvas: Canvas) -> Any:
        state = super().init(canvas)
        return state | {"left": block_steps(canvas, state["masks"], self.steps)}

    def quota(self, canvas: Canvas, state: Any) -> Tensor:
        if self.split == "even":
            return super().quota(canvas, state)
        return rounded_quota(window_masks(canvas), state["left"])[0]

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        if self.remasking == "random":
            c = uniform(canvas, ORDER)
        else:
            c = confidence(output, law=self.law)
        left = rounded_quota(window_masks(canvas), state["left"])[1]
        return self.take(canvas, output, state, c), state | {"left": left}
