"""A slow look at how far the text is settled, then fast decoding up to there: slow-fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, best, commit_candidates, confidence
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("slow_fast")
@dataclass(frozen=True)
class SlowFast(Sampler):
    """Find in a few slow turns how far tokens are likely, then finish that region first.

    "Slow-Fast Sampling", arXiv:2506.10848. Slow phase, `explore` turns: the estimate e_t is the
    position behind the last one with c >= likely; it stands once two in a row differ by at most
    one, else their mean is taken. Fast phase: only masks before e may go, until there are none;
    then a slow phase begins behind them. In both, every c >= threshold goes, and always the best.

    The published fast phase also drops the text behind e from the forward: that is a cache policy's
    business here. Derived: a phase ends with its block.
    """

    paper: ClassVar[str] = "Slow-Fast Sampling, arXiv:2506.10848"
    traits: ClassVar[frozenset[str]] = frozenset({"history"})

    explore: int = option(6, "k, turns of a slow phase", low=1)
    likely: float = option(0.3, "confidence that counts for the estimate", low=0.0)
    threshold: float = option(0.9, "confidence that is enough to commit", low=0.0)
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def init(self, canvas: Canvas) -> Any:
        return _cycle(canvas.start)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law=self.law)
        slow = state["turn"] < self.explore
        explored = self._explored(canvas, c, state)
        state = {k: torch.where(slow, explored[k], state[k]) for k in state} | {
            "turn": state["turn"] + 1
        }
        # A region without any mask that can go now cannot hold the row up.
        region = canvas.eligible & (canvas.positions < state["end"][:, None])
        allowed = torch.where(slow[:, None], canvas.eligible, region)
        allowed = torch.where(allowed.any(-1, keepdim=True), allowed, canvas.eligible)
        chosen = (allowed & (c >= self.threshold)) | best(c, allowed)
        left = canvas.masked & ~chosen & (canvas.positions < state["end"][:, None])
        over = (state["turn"] >= self.explore) & ~left.any(-1)
        begun = _cycle(canvas.start)
        after = {k: torch.where(over, begun[k], state[k]) for k in state}
        return commit_candidates(canvas, output, chosen, c), after

    def _explored(self, canvas: Canvas, c: Tensor, state: Any) -> Any:
        """The state with this turn's estimate, unless an earlier one stands."""
        behind = canvas.positions + 1
        first = behind.masked_fill(~canvas.eligible, torch.iinfo(behind.dtype).max).amin(-1)
        likely = canvas.eligible & (c >= self.likely)
        found = torch.where(likely.any(-1), (behind * likely).amax(-1), first)
        count, total = state["count"] + 1, state["sum"] + found
        stands = (state["count"] > 0) & ((found - state["last"]).abs() <= 1)
        end = torch.where(stands, found, torch.maximum(total // count, first))
        fresh = {"last": found, "sum": total, "count": count, "end": end, "stands": stands}
        kept = {k: torch.where(state["stands"], state[k], fresh[k]) for k in fresh}
        return state | kept


def _cycle(start: Tensor) -> dict[str, Tensor]:
    """A slow phase about to begin, each `(B,)`."""
    zero = torch.zeros_like(start)
    counts = {"turn": zero, "last": zero, "sum": zero, "count": zero, "end": start}
    return counts | {"stands": zero.bool()}
