"""Confident tokens, those that follow from certain ones, and independent ones: DAWN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from dlm_decode.dependency import among, attention_paid, independent_set, mean_received
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, best, commit_candidates, confidence, ranks
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("dawn")
@dataclass(frozen=True)
class Dawn(Sampler):
    """Commit confident tokens, likely ones that lean on certain tokens, and independent ones.

    DAWN, arXiv:2602.06953. Of the mean attention A, columns of sinks (mean above tau_sink) are
    dropped; i depends on j where A_ij >= tau_edge. F: c_i >= tau_conf. I ("induced"): c_i >=
    tau_induce and i depends on a decided token that the model still gives tau_anchor. The rest
    with c_i >= tau_low, unless it depends on a member of F and I, is thinned to an independent set,
    most confident first. F, I and that set are committed, or the best token if there is none.

    As the published code: all layers, and only what is both in F and in I blocks
    (`blockers="both"`; the text suggests either). Derived: sinks are told by the window's rows, and
    anchors are tokens of the window (`anchors="canvas"`: of all blocks), whose probability is at
    hand, so that the prompt is none. tau_sink is meant for rows of hundreds of positions: of
    N positions each gets 1 / N on average, so that in rows of less than 100 nearly all are sinks
    and all above tau_low are independent.
    """

    paper: ClassVar[str] = "DAWN, arXiv:2602.06953"

    tau_conf: float = option(0.9, "confidence that is enough by itself", low=0.0)
    tau_induce: float = option(0.7, "confidence beside a certain token leaned on", low=0.0)
    tau_low: float = option(0.7, "least confidence of independent ones", low=0.0)
    tau_anchor: float = option(0.9, "probability that makes a decided token certain", low=0.0)
    tau_edge: float = option(0.07, "attention that is a dependence", low=0.0)
    tau_sink: float = option(0.01, "mean attention above which a position is a sink", low=0.0)
    blockers: str = option(
        "both",
        "what blocks its dependants: what is confident and induced, or what is either",
        choices=("both", "either"),
    )
    anchors: str = option(
        "block", "which decided tokens can be certain", choices=("block", "canvas")
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention", "decided"})

    @property
    def scope(self) -> str:
        return self.anchors

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c, eligible = confidence(output, law=self.law), canvas.eligible
        q = self._depends(canvas, output)
        decided = canvas.editable & ~canvas.masked & output.valid
        anchors = decided & (output.p1 >= self.tau_anchor)
        confident = eligible & (c >= self.tau_conf)
        induced = eligible & (c >= self.tau_induce) & _reached(q, anchors)
        both = self.blockers == "both"
        blocking = confident & induced if both else confident | induced
        rest = eligible & (c >= self.tau_low) & ~confident & ~induced & ~_reached(q, blocking)
        conflict = q | q.transpose(-1, -2)
        chosen = confident | induced | independent_set(conflict, ranks(c, eligible), rest)
        chosen = chosen | (best(c, eligible) & ~chosen.any(-1, keepdim=True))
        return commit_candidates(canvas, output, chosen, c), state

    def _depends(self, canvas: Canvas, output: Output) -> Tensor:
        """Whether j depends on i, at [i, j] of `(B, W, W)` bool."""
        known = output.valid & canvas.editable
        columns = canvas.positions.clamp(max=output.attention.shape[-1] - 1)
        received = mean_received(output.attention, known).gather(-1, columns)
        paid = among(attention_paid(output.attention, canvas.positions), known)
        return (paid >= self.tau_edge) & (paid > 0) & (received <= self.tau_sink)[..., None]


def _reached(q: Tensor, sources: Tensor) -> Tensor:
    """Positions `(B, W)` that depend on one of `sources (B, W)`."""
    return (q & sources[..., None]).any(1)
