"""Masks become tokens and tokens become better tokens: the editing decoder of LLaDA2.1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.quotas import window_masks
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, commit_candidates, confidence, top
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("edit")
@dataclass(frozen=True)
class Edit(Sampler):
    """Commit confident masks, and overwrite the block's tokens that the model is sure are others.

    "LLaDA2.1: Speeding Up Text Diffusion via Token Editing", arXiv:2602.08676. Mask to token: every
    c_i > threshold, and at least `num_to_transfer` of the best. Token to token: a decided token of
    the block whose position now has another most probable token, with p > editing_threshold,
    becomes that one. A block without masks is forwarded again until nothing in it is edited, at
    most `max_post_steps` times.
    """

    paper: ClassVar[str] = "LLaDA2.1, arXiv:2602.08676"
    traits: ClassVar[frozenset[str]] = frozenset({"revokes"})

    threshold: float = option(0.95, "confidence above which a mask is decided", low=0.0)
    editing_threshold: float = option(
        0.9, "probability above which another token replaces a decided one (1: never)", low=0.0
    )
    num_to_transfer: int = option(1, "masks decided in a turn at the least", low=1)
    max_post_steps: int = option(16, "forwards of a full block, to edit it, at the most", low=0)
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"decided"})

    def init(self, canvas: Canvas) -> Any:
        return {"post": torch.zeros_like(canvas.step)}

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        chosen = (c > self.threshold) | top(c, canvas.eligible, self.num_to_transfer)
        decision = commit_candidates(canvas, output, chosen, c)
        decided = canvas.editable & ~canvas.masked & output.valid
        other = (output.top1 != canvas.tokens) & (output.p1 > self.editing_threshold)
        changed = decided & other
        own = decision.scores
        edited = Decision(
            torch.where(changed, output.top1, decision.tokens),
            decision.commit,
            overwrite=changed,
            stay=self._stays(canvas, decision, changed, state["post"]),
            scores=torch.where(changed, output.p1.to(c.dtype), c if own is None else own),
        )
        return edited, {"post": state["post"] + (window_masks(canvas) == 0)}

    def _stays(self, canvas: Canvas, decision: Decision, changed: Tensor, post: Tensor) -> Tensor:
        """Rows `(B,)` whose block is full after this turn and to be forwarded again."""
        full = window_masks(canvas) == 0
        fills = ~(canvas.masked & canvas.editable & ~decision.commit).any(-1)
        settled = full & ~changed.any(-1)
        return fills & ~settled & (post + full < self.max_post_steps) & (self.editing_threshold < 1)
