"""Dream's sampler: a schedule of times fixes how many tokens each step decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.noise import ORDER, gumbel, uniform
from dlm_decode.options import option
from dlm_decode.quotas import block_steps, dream_quotas, dream_times, next_step, window_masks
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import commit_candidates, confidence, margin, negative_entropy, top
from dlm_decode.types import Canvas, Decision, Output

NEEDS = {
    "origin": frozenset[str](),
    "maskgit_plus": frozenset({"filtered"}),
    "topk_margin": frozenset({"filtered", "p2"}),
    "entropy": frozenset({"filtered", "entropy"}),
}


@SAMPLERS.register("dream")
@dataclass(frozen=True)
class Dream(Sampler):
    """Each step from time t to s commits the share 1 - s/t of what is left, the most certain first.

    "Dream 7B: Diffusion Large Language Models", arXiv:2508.15487. Times fall equally
    from 1 to `eps`; the last step commits the rest. Certainty is read from the tempered and
    top-p/top-k filtered distribution. A step whose share rounds to nothing costs no forward, since
    the next one sees the same canvas.
    """

    paper: ClassVar[str] = "Dream 7B, arXiv:2508.15487"
    traits: ClassVar[frozenset[str]] = frozenset({"history"})

    alg: str = option(
        "entropy",
        "order: random times, probability, lead over the second token, or low entropy",
        choices=tuple(NEEDS),
    )
    steps: int | None = option(
        None,
        "steps of the whole request, shared by its blocks (none: one per token)",
        low=1,
        high=65536,
    )
    eps: float = option(1e-3, "time at which the schedule ends", above=0.0, high=1.0)
    alg_temp: float | None = option(
        None, "draw positions with weights exp(certainty / alg_temp) (none, 0: the best)", low=0.0
    )
    schedule: str = option(
        "dream",
        "rounding: down, as published, which piles up tokens at the end; or at least one a step",
        choices=("dream", "repaired"),
    )

    @property
    def needs(self) -> frozenset[str]:
        return NEEDS[self.alg]

    def init(self, canvas: Canvas) -> Any:
        masks = window_masks(canvas)
        return {"masks": masks, "index": torch.zeros_like(masks)}

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        steps = block_steps(canvas, state["masks"], self.steps)
        index = torch.minimum(state["index"], steps - 1)
        if self.alg == "origin":
            score = self._reveal_steps(canvas, steps, index)
            step = score.masked_fill(~canvas.eligible, torch.inf).amin(dim=-1)
            chosen = score == step[:, None]
        else:
            score = self._certainty(canvas, output)
            step, k = next_step(self._quotas(canvas, steps), index)
            chosen = top(score, canvas.eligible, k)
        moved = torch.where(canvas.eligible.any(dim=-1), step + 1, index).to(index.dtype)
        decision = commit_candidates(canvas, output, chosen, score)
        return decision, {"masks": state["masks"], "index": moved}

    def _width(self, canvas: Canvas) -> int:
        return canvas.tokens.shape[-1] if self.steps is None else self.steps

    def _quotas(self, canvas: Canvas, steps: Tensor) -> Tensor:
        """Tokens of every step if it came now, `(B, S)`."""
        n, width = window_masks(canvas), self._width(canvas)
        quotas = dream_quotas(n, steps, self.eps, width)
        if self.schedule == "dream":
            return quotas
        inside = torch.arange(width, device=n.device) < steps[:, None]
        return torch.maximum(quotas, inside.to(quotas.dtype))

    def _certainty(self, canvas: Canvas, output: Output) -> Tensor:
        """What the k positions are chosen by, `(B, W)`; k without replacement by Gumbel top-k."""
        if self.alg == "topk_margin":
            score = margin(output, on="filtered")
        elif self.alg == "entropy":
            score = negative_entropy(output, on="filtered")
        else:
            score = confidence(output, on="filtered")
        return score / self.alg_temp + gumbel(canvas, ORDER) if self.alg_temp else score

    def _reveal_steps(self, canvas: Canvas, steps: Tensor, index: Tensor) -> Tensor:
        """The step `(B, W)` in which each position is revealed, when seen from step `index`.

        Revealing with probability 1 - s/t in every step leaves a position masked at time s with
        probability s / t_index, so one number u tells its step: the first with s <= u t_index.
        """
        times = dream_times(steps, self.eps, self._width(canvas))
        t = uniform(canvas, ORDER) * times.gather(-1, index[:, None])
        delta = (1 - self.eps) / steps[:, None]
        step = ((1 - t) / delta).clamp(max=2.0**31).floor()
        return torch.minimum(torch.maximum(step, index[:, None]), steps[:, None] - 1)
