"""Tokens that stayed sure from one context to the next: coherent contextual decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import commit_candidates, negative_entropy, ranks, top
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("ccd")
@dataclass(frozen=True)
class Ccd(QuotaSampler):
    """Commit low-entropy positions that were runners-up a turn ago and kept their best token.

    Coherent Contextual Decoding (CCD), arXiv:2512.02044, as the released code has it. Masks are
    ranked by entropy; b is the step's quota, V grows from 1 by one a turn after `warm` turns up to
    b + int(b * expand_ratio). The first b ("top") go while warming up, or when none of them is in
    the buffer; else S, those of the first V ranks in the buffer whose most probable token is that
    of the last turn: the first b of S (CCD), all of S (`variant="ds"`, CCD-DS), or top if S has
    fewer than b. The next buffer is the first V ranks not committed.

    Derived: turns count from the block's start; a position keeps the token of the last turn that
    computed it. The paper's averaging of buffered distributions is not in the released code.
    """

    paper: ClassVar[str] = "CCD, arXiv:2512.02044"
    traits: ClassVar[frozenset[str]] = frozenset({"history"})

    variant: str = option(
        "ccd", "commit a quota of the steady ones, or all of them", choices=("ccd", "ds")
    )
    warm: int = option(5, "last turn, from 0, that goes by entropy alone", low=0)
    expand_ratio: float = option(4.0, "how many quotas the buffer grows beyond one", low=0.0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"entropy"})

    def init(self, canvas: Canvas) -> Any:
        return super().init(canvas) | {
            "buffer": torch.zeros_like(canvas.masked),
            "token": torch.full_like(canvas.tokens, -1),
        }

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        score, b = negative_entropy(output), self.quota(canvas, state)
        v = self._buffered(canvas.step, b)[:, None]
        rank = ranks(score, canvas.eligible)
        first = top(score, canvas.eligible, b)
        steady = canvas.eligible & (rank < v) & state["buffer"] & (output.top1 == state["token"])
        plain = (canvas.step <= self.warm) | ~(first & state["buffer"]).any(-1)
        plain = plain | (steady.sum(-1) < b)
        limit = steady.sum(-1) if self.variant == "ds" else b
        chosen = torch.where(plain[:, None], first, top(score, steady, limit))
        left = canvas.eligible & ~chosen
        after = {
            "masks": state["masks"],
            "buffer": left & (ranks(score, left) < v),
            "token": torch.where(output.valid, output.top1, state["token"]),
        }
        return commit_candidates(canvas, output, chosen, score), after

    def _buffered(self, step: Tensor, b: Tensor) -> Tensor:
        """V `(B,)`: how many ranks are looked at and remembered."""
        most = b + (b * self.expand_ratio).long()
        return torch.minimum(1 + (step - self.warm).clamp(min=0), most)
