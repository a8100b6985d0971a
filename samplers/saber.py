"""A threshold that follows what was committed, and steps back from what lost ground: Saber."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import commit_candidates, confidence, placed, top
from dlm_decode.types import Canvas, Decision, Output, Query


@SAMPLERS.register("saber")
@dataclass(frozen=True)
class Saber(Sampler):
    """Commit what beats the mean confidence of all commits so far, then take back what fell most.

    "Saber: An Efficient Sampling with Adaptive Acceleration and Backtracking Enhanced Remasking",
    arXiv:2510.18165. k tokens with c_i > theta go, at least the best n; theta is the mean
    confidence of the block's commits (1 before any; tokens taken back still count). Then
    r = max(floor(n / 2), ceil(k / 8)), but at most k - 1, of the committed ones, the new ones too,
    are masked again: those whose top probability fell most since the last turn that computed them
    (`variant="llada"`), or those whose token is the least likely now ("dream", where
    r = ceil(k / 8)). Each turn leaves fewer masks. The published Dream code also weakens the pad
    id, which a request's eos policy does here.
    """

    paper: ClassVar[str] = "Saber, arXiv:2510.18165"
    traits: ClassVar[frozenset[str]] = frozenset({"history", "revokes"})

    n: int = option(2, "least tokens a turn", low=1)
    variant: str = option("llada", "which official rule takes back", choices=("llada", "dream"))
    backtrack: bool = option(True, "take tokens back at all")

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"decided"})

    def init(self, canvas: Canvas) -> Any:
        zeros = torch.zeros_like(canvas.tokens, dtype=torch.float64)
        total = torch.zeros_like(canvas.start, dtype=torch.float64)
        return {
            "last": zeros,
            "seen": torch.zeros_like(canvas.masked),
            "sum": total,
            "count": torch.zeros_like(canvas.start),
        }

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        return Query(probe=canvas.tokens[..., None]) if self.variant == "dream" else None

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output).double()
        mean = state["sum"] / state["count"].clamp(min=1)
        theta = torch.where(state["count"] > 0, mean, 1.0)
        chosen = canvas.eligible & (c > theta[:, None]) | top(c, canvas.eligible, self.n)
        k = chosen.sum(-1)
        after = {
            "last": torch.where(output.valid, output.p1.double(), state["last"]),
            "seen": state["seen"] | output.valid,
            "sum": state["sum"] + c.masked_fill(~chosen, 0.0).sum(-1),
            "count": state["count"] + k,
        }
        decision = commit_candidates(canvas, output, chosen, c)
        if not self.backtrack:
            return decision, after
        decided = canvas.editable & ~canvas.masked & output.valid
        back = top(-self._standing(canvas, output, c, state), decided | chosen, self._number(k))
        taken = Decision(
            decision.tokens, chosen & ~back, remask=back & decided, scores=decision.scores
        )
        return taken, after

    def _number(self, k: Tensor) -> Tensor:
        """r `(B,)`, how many are taken back of k `(B,)` new ones."""
        eighth = (k + 7) // 8
        r = eighth.clamp(min=self.n // 2) if self.variant == "llada" else eighth
        return torch.minimum(r, (k - 1).clamp(min=0))

    def _standing(self, canvas: Canvas, output: Output, c: Tensor, state: Any) -> Tensor:
        """What positions are taken back by, `(B, W)`, the lowest first."""
        if self.variant == "dream":
            return torch.where(canvas.masked, c, placed(output).double())
        change = output.p1.double() - state["last"]
        return change.masked_fill(~state["seen"], 0.0)
