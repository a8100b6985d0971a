"""Positions in random order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.noise import ORDER, uniform
from dlm_decode.quotas import QuotaSampler
from dlm_decode.samplers import SAMPLERS
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("random")
@dataclass(frozen=True)
class Random(QuotaSampler):
    """Commit a fixed number of uniformly chosen positions a step, whatever the model says of them.

    The order masked diffusion models are trained with: "Simple and Effective Masked Diffusion
    Language Models", arXiv:2406.07524. Score u_i ~ U(0, 1), keyed by request and
    position.
    """

    paper: ClassVar[str] = "Simple and Effective Masked Diffusion Language Models, arXiv:2406.07524"
    traits: ClassVar[frozenset[str]] = frozenset({"random"})

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        u = uniform(canvas, ORDER)
        return self.take(canvas, output, state, u), state
