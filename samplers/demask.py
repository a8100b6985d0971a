"""As many tokens as their predicted dependence allows: DEMASK."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from dlm_decode.dependency import (
    AttentionSource,
    CosineSource,
    DependencySource,
    PredictorSource,
    bounded_greedy,
    read_predictor,
)
from dlm_decode.errors import OptionError
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import best, commit_candidates, confidence, ranks
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("demask")
@dataclass(frozen=True)
class Demask(Sampler):
    """Commit confident tokens, best first, as long as their summed dependence stays within tau.

    "Dependency-Guided Parallel Decoding in Discrete Diffusion Language Models", arXiv:2604.02560: a
    predictor on the final hidden states estimates the influence D_{i->j} = TV(p(x_j), p(x_j | x_i))
    of every pair from one forward. In order of confidence, j is taken if sum_{i in S} D_{i->j}
    keeps the sum over all taken ones ("cumulative"), or is itself ("per_position"), at most tau. If
    influences are sub-additive, the cumulative sum bounds the total variation between the tokens'
    joint law and the product of their marginals; it does not where a token depends only on several
    others together, as with an exclusive or. Positions are ranked before anything is drawn.

    Derived, not read from published code: the predictor's form, both selections' details, the
    default tau, and the sources to use without a predictor.
    """

    paper: ClassVar[str] = "DEMASK, arXiv:2604.02560"

    tau: float = option(0.1, "most dependence, of a step or of each of its tokens", low=0.0)
    mode: str = option(
        "cumulative",
        "whether tau bounds the dependence of the step or of each token",
        choices=("cumulative", "per_position"),
    )
    tau_min: float | None = option(
        None, "confidence that all but the best token must have too", low=0.0, high=1.0
    )
    predictor: str | None = option(
        None, 'file of a trained predictor, or "bundled" (none: use the source)'
    )
    quantile: float | None = option(
        None, "add this quantile of the predictor's error, to be conservative", low=0.0, high=1.0
    )
    source: str = option(
        "attention",
        "influences without a predictor: attention of the late layers, or hidden-state cosine",
        choices=("attention", "cosine"),
    )
    given: DependencySource | None = field(default=None, compare=False, repr=False)
    """A ready source of influences, instead of all others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.predictor is not None:
            read_predictor(self.predictor)
        elif self.quantile is not None:
            raise OptionError(f"quantile needs a predictor, got quantile={self.quantile} without")

    @property
    def dependency(self) -> DependencySource:
        """Where influences come from."""
        if self.given is not None:
            return self.given
        if self.predictor is not None:
            return PredictorSource(self.predictor, self.quantile)
        return AttentionSource() if self.source == "attention" else CosineSource()

    @property
    def needs(self) -> frozenset[str]:
        return self.dependency.needs

    @property
    def attention_layers(self) -> tuple[float, float]:
        return (0.7, 1.0)

    def init(self, canvas: Canvas) -> Any:
        return self.dependency.init(canvas)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = confidence(output, law="rank")
        influence = self.dependency.scores(canvas, output, state)
        allowed = canvas.eligible
        if self.tau_min is not None:
            allowed = allowed & ((c >= self.tau_min) | best(c, canvas.eligible))
        rank = ranks(c, canvas.eligible)
        chosen, _ = bounded_greedy(
            influence, rank, allowed, self.tau, cumulative=self.mode == "cumulative"
        )
        return commit_candidates(canvas, output, chosen, c), state
