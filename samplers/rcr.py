"""Everything is committed, and the least sure is masked again: running confidence remasking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler, block_steps, window_masks
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import LAWS, commit_candidates, confidence, top
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("rcr")
@dataclass(frozen=True)
class Rcr(QuotaSampler):
    """Keep the step's quota of highest running confidence, among old tokens and new ones alike.

    Running Confidence Remasking (RCR), "MDPO: Overcoming the Training-Inference Divide of Masked
    Diffusion Language Models", arXiv:2508.13148. Step i of S commits every mask, notes the highest
    confidence each position was ever given, and masks the sum of the quotas i + 1 .. S lowest ones
    again; the last step none. So low ones of earlier steps are decided anew while masks are left,
    and each step leaves fewer of them.
    """

    paper: ClassVar[str] = "RCR (MDPO), arXiv:2508.13148"
    traits: ClassVar[frozenset[str]] = frozenset({"history", "revokes"})

    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def init(self, canvas: Canvas) -> Any:
        running = torch.zeros_like(canvas.tokens, dtype=torch.float64)
        return super().init(canvas) | {"running": running}

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law).double()
        running = torch.where(canvas.eligible, torch.maximum(state["running"], c), state["running"])
        own = (running > 0) & canvas.editable & ~canvas.masked
        out_of_reach = (canvas.masked & canvas.editable & ~canvas.eligible).sum(-1)
        left = (self._left(canvas, state) - out_of_reach).clamp(min=0)
        back = top(-running, own | canvas.eligible, left)
        decision = commit_candidates(canvas, output, canvas.eligible & ~back, c)
        revoked = Decision(
            decision.tokens, decision.commit, remask=back & own, scores=decision.scores
        )
        return revoked, state | {"running": running}

    def _left(self, canvas: Canvas, state: Any) -> Tensor:
        """Masks `(B,)` that the block should have after this step: at least one fewer."""
        masks = state["masks"]
        steps = block_steps(canvas, masks, self.steps)
        done = (canvas.step + 1).clamp(max=steps)
        planned = masks - (done * (masks // steps) + torch.minimum(done, masks % steps))
        return torch.minimum(planned, (window_masks(canvas) - 1).clamp(min=0))
