"""A block is decided, but for its last eighth, then its weakest tokens are decided anew: ReMDM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler, block_steps, llada_quota
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import LAWS, commit_candidates, confidence, top
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("remdm_count")
@dataclass(frozen=True)
class RemdmCount(QuotaSampler):
    """Before a block's last steps, decide its least confident tokens anew, a few in each turn.

    ReMDM as its authors run it on LLaDA, arXiv:2503.00307 (github.com/guanghanwang/ReMDM-LLaDA). A
    block of B positions and S steps begins with min(7B/8, S) steps of `llada`. In each of the next
    `extra` turns (S by default) the `remdm_number` tokens of lowest confidence, as it was when they
    were committed, are masked before the forward, and as many of the most confident masks committed
    after it. Then the steps go on. `extra` = 0 is `llada`. The published loop decides everything at
    temperature 1 and ends at an end id anywhere; both are up to the request here.
    """

    paper: ClassVar[str] = "ReMDM, arXiv:2503.00307"
    traits: ClassVar[frozenset[str]] = frozenset({"history", "revokes"})

    remdm_number: int = option(1, "tokens masked again, and committed, in each extra turn", low=1)
    extra: int | None = option(
        None, "extra turns of a block (none: as many as it has steps)", low=0
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def init(self, canvas: Canvas) -> Any:
        sure = torch.full_like(canvas.tokens, torch.inf, dtype=torch.float64)
        return super().init(canvas) | {"sure": sure}

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law).double()
        steps = block_steps(canvas, state["masks"], self.steps)
        first = torch.minimum((canvas.stop - canvas.start) * 7 // 8, steps).clamp(min=1)
        behind = first + (steps if self.extra is None else self.extra)
        ordinary = canvas.step - (behind - first) * (canvas.step >= behind)
        quota = llada_quota(state["masks"], steps, ordinary).clamp(min=1)
        extra = (canvas.step >= first) & (canvas.step < behind)
        chosen = top(c, canvas.eligible, torch.where(extra, self.remdm_number, quota))
        decision = commit_candidates(canvas, output, chosen, c)
        sure = torch.where(chosen, c, state["sure"])
        back = self._back(canvas, chosen, sure, first, behind)
        return (
            Decision(
                decision.tokens,
                chosen & ~back,
                remask=back & ~chosen,
                hold=(chosen & back).any(-1),
                scores=decision.scores,
                commits=chosen.sum(-1),
            ),
            state | {"sure": sure.masked_fill(back, torch.inf)},
        )

    def _back(
        self, canvas: Canvas, chosen: Tensor, sure: Tensor, first: Tensor, behind: Tensor
    ) -> Tensor:
        """Positions `(B, W)` that the next turn finds masked again, those just chosen included."""
        upcoming = canvas.step + 1
        weak = top(-sure, (chosen | ~canvas.masked) & sure.isfinite(), self.remdm_number)
        return weak & ((upcoming >= first) & (upcoming < behind))[:, None]
