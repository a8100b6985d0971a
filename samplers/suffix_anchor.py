"""Confidence damped near a fixed suffix: suffix-anchored confidence modulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, best, commit_candidates, confidence
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("suffix_anchor")
@dataclass(frozen=True)
class SuffixAnchor(Sampler):
    """Commit by a threshold on confidence that is lowered near the fixed end of the text.

    "Suffix-Anchored Confidence Modulation", arXiv:2605.28181: a short fixed suffix (the request's
    `suffix_ids`, or frozen last tokens) keeps a text from ending early but makes its neighbours
    over-confident, the more so the less is decided. Derived, since only the abstract could be
    had: c'_i = c_i (1 - strength (1 - rho)^power exp(-d_i / scale)), with rho the share decided and
    d_i the distance to the suffix; threshold and order go by c'. Rows without a suffix are not
    damped.
    """

    paper: ClassVar[str] = "Suffix-Anchored Confidence Modulation, arXiv:2605.28181"

    threshold: float = option(0.9, "damped confidence that is enough to commit", low=0.0)
    strength: float = option(1.0, "lambda, the damping beside the suffix at first", low=0, high=1)
    power: float = option(1.0, "g, how fast the damping fades with progress", low=0.0)
    scale: float = option(8.0, "s, positions over which the damping falls to 1/e", above=0.0)
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    @property
    def scope(self) -> str:
        return "canvas"

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        if self.strength > 0:
            c = (c.double() * self._kept(canvas)).to(c.dtype)
        chosen = (c >= self.threshold) | best(c, canvas.eligible)
        return commit_candidates(canvas, output, chosen, c), state

    def _kept(self, canvas: Canvas) -> Tensor:
        """Share `(B, W)` of the confidence that is left."""
        end = ((canvas.positions + 1) * canvas.editable).amax(-1)
        anchored = canvas.ends_from > end
        near = ((canvas.positions - end[:, None]).clamp(max=0).double() / self.scale).exp()
        fading = (1 - canvas.progress.double()).clamp(min=0) ** self.power
        return 1 - self.strength * (anchored * fading)[:, None] * near
