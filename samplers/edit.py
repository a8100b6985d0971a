"""Masks become tokens and tokens become better tokens: the editing decoder of LLaDA2.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, best, commit_candidates, confidence
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("edit")
@dataclass(frozen=True)
class Edit(Sampler):
    """Commit confident masks, and overwrite the block's tokens that the model is sure are others.

    "LLaDA2.1: Speeding Up Text Diffusion via Token Editing", arXiv:2602.08676. Mask to token: every
    c_i > threshold, and always the best. Token to token: a decided token of the block whose
    position now has another most probable token, with p > editing_threshold, becomes that one.
    Derived: tokens are edited while the block has masks, in the turn that decides the last of them
    too; the published code goes on editing a full block for up to 16 forwards more.
    """

    paper: ClassVar[str] = "LLaDA2.1, arXiv:2602.08676"
    traits: ClassVar[frozenset[str]] = frozenset({"revokes"})

    threshold: float = option(0.95, "confidence above which a mask is decided", low=0.0)
    editing_threshold: float = option(
        0.9, "probability above which another token replaces a decided one (1: never)", low=0.0
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"decided"})

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        chosen = (c > self.threshold) | best(c, canvas.eligible)
        decision = commit_candidates(canvas, output, chosen, c)
        decided = canvas.editable & ~canvas.masked & output.valid
        other = (output.top1 != canvas.tokens) & (output.p1 > self.editing_threshold)
        changed = decided & other
        own = decision.scores
        edited = Decision(
            torch.where(changed, output.top1, decision.tokens),
            decision.commit,
            overwrite=changed,
            scores=torch.where(changed, output.p1.to(c.dtype), c if own is None else own),
        )
        return edited, state
