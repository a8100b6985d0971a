"""Extra commits where neighbours, repeats or earlier turns agree: the decoding rules of R2-dLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_decode.errors import CapabilityError
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Wrapper, in_window
from dlm_decode.samplers.hierarchy import first_of_runs
from dlm_decode.scores import confidence, ranks
from dlm_decode.types import Canvas, Decision, Output, Query


@SAMPLERS.register("r2")
@dataclass(frozen=True)
class R2(Wrapper):
    """Commit also what neighbours, repeated predictions or steady predictions make sure.

    R2-dLLM, arXiv:2604.18995. After the inner's commits, three rules read the same forward, each on
    the masks that the one before left. Spatial sweep: of every `width` neighbours in the block, at
    most `max_decided` of them decided, all masks go if their mean confidence is at least
    `confident`. Repeat cluster: a run of neighbouring masks with one and the same token commits it
    once, where it is surest, if that is above `confident`. Temporal: a mask that was given the
    same token in `streak` turns running goes if its `evaluated` confidence is at least `steady`.

    Derived: all windows of the sweep are judged before any commits; a turn that did not compute a
    position neither prolongs nor breaks its streak; at temperature > 0 the tokens are those drawn.
    """

    paper: ClassVar[str] = "R2-dLLM, arXiv:2604.18995"
    traits: ClassVar[frozenset[str]] = frozenset({"history"})

    spatial: bool = option(True, "sweep over windows of neighbours")
    repeat: bool = option(True, "commit a token that neighbouring masks repeat")
    temporal: bool = option(True, "commit tokens that stayed the same for some turns")
    width: int = option(3, "w, positions of a window of the sweep", low=1)
    max_decided: int = option(1, "u, decided positions that a window may hold", low=0)
    confident: float = option(0.8, "confidence that the sweep and a repeat ask for", low=0.0)
    keep: str = option(
        "confidence", "which position of a repeat goes", choices=("confidence", "mid")
    )
    streak: int = option(3, "n, turns running with the same token", low=1)
    steady: float = option(0.8, "confidence that a streak asks for", low=0.0)
    evaluated: str = option(
        "last", "which confidence of a streak counts", choices=("last", "ave", "max")
    )

    def begin(self, canvas: Canvas) -> Any:
        zeros = torch.zeros_like(canvas.tokens, dtype=torch.float64)
        count = torch.zeros_like(canvas.tokens)
        return {"token": count - 1, "count": count, "sum": zeros, "max": zeros}

    @property
    def asks(self) -> bool:
        return self.inner.asks

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        if super().query(canvas, state) is not None:
            name = SAMPLERS.name_of(self.inner)
            raise CapabilityError(f"r2 cannot wrap {name}, which has a query of its own")
        return None

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        decision, inner = self.inner_decide(canvas, output, state)
        c = confidence(output).double()
        own = self._seen(canvas, output, c, self.own_state(canvas, state))
        before = canvas.eligible & ~decision.commit
        if decision.hold is not None:
            before = before & ~decision.hold[:, None]
        left = before
        if self.spatial:
            left = left & ~self._sweep(canvas, left, c)
        if self.repeat:
            left = left & ~self._repeated(output.candidate, left, c)
        if self.temporal:
            sure = {"last": c, "ave": own["sum"] / own["count"].clamp(min=1), "max": own["max"]}
            lasting = (own["count"] >= self.streak) & (sure[self.evaluated] >= self.steady)
            left = left & ~lasting
        more = before & ~left
        scores = None if decision.scores is None else decision.scores.double()
        decision = replace(
            decision,
            tokens=torch.where(more, output.candidate, decision.tokens),
            commit=decision.commit | more,
            scores=scores if scores is None else torch.where(more, c, scores),
        )
        return decision, {"own": own, "inner": inner}

    def _sweep(self, canvas: Canvas, left: Tensor, c: Tensor) -> Tensor:
        """Masks `(B, W)` of windows that are confident enough on average."""
        w = self.width
        if w > left.shape[-1]:
            return torch.zeros_like(left)
        masks = left.unfold(-1, w, 1).sum(-1)
        inside = in_window(canvas).unfold(-1, w, 1).all(-1)
        total = c.masked_fill(~left, 0.0).unfold(-1, w, 1).sum(-1)
        sure = (masks > 0) & (total >= self.confident * masks)
        passes = inside & sure & (w - masks <= self.max_decided)
        return left & F.pad(passes, (w - 1, w - 1)).unfold(-1, w, 1).any(-1)

    def _repeated(self, tokens: Tensor, left: Tensor, c: Tensor) -> Tensor:
        """The position `(B, W)` that goes of each run of masks with one token."""
        same = F.pad(left[:, 1:] & left[:, :-1] & (tokens[:, 1:] == tokens[:, :-1]), (1, 0))
        starts = left & ~same
        of_two = same | F.pad(same[:, 1:], (0, 1))
        surest = first_of_runs(ranks(c, left), left, starts) & of_two & (c > self.confident)
        if self.keep == "confidence":
            return surest
        run = starts.cumsum(-1)
        shape = (left.shape[0], left.shape[-1] + 1)
        sizes = run.new_zeros(shape).scatter_add(-1, run, left.long())
        taken = run.new_zeros(shape).scatter_add(-1, run, surest.long())
        place = torch.arange(left.shape[-1], device=run.device)
        begun = (place * starts).cummax(-1).values
        middle = place == begun + sizes.gather(-1, run) // 2
        return left & middle & (taken.gather(-1, run) > 0)

    def _seen(self, canvas: Canvas, output: Output, c: Tensor, own: Any) -> Any:
        """Streaks with this turn's tokens, where they were computed."""
        now = canvas.eligible & output.valid
        kept = own["token"] == output.candidate
        zero = torch.zeros_like(c)
        fresh = {
            "token": output.candidate,
            "count": torch.where(kept, own["count"], 0) + 1,
            "sum": torch.where(kept, own["sum"], zero) + c,
            "max": torch.maximum(torch.where(kept, own["max"], zero), c),
        }
        return {name: torch.where(now, value, own[name]) for name, value in fresh.items()}
