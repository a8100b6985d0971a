"""How many tokens a turn decides, for samplers with a fixed budget of steps. Nothing here syncs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import Sampler
from dlm_decode.scores import commit_candidates, top
from dlm_decode.types import Canvas, Decision, Output


def window_masks(canvas: Canvas) -> Tensor:
    """Undecided positions of each row's window, `(B,)`."""
    return (canvas.masked & canvas.editable).sum(-1)


def block_steps(canvas: Canvas, masks: Tensor, steps: int | None) -> Tensor:
    """Steps S `(B,)` of the current block: an equal share of `steps`, at least 1.

    Without `steps` it is one step for each of the block's `masks (B,)`.
    """
    if steps is None:
        return masks.clamp(min=1)
    return (steps // canvas.blocks.clamp(min=1)).clamp(min=1)


def llada_quota(masks: Tensor, steps: Tensor, step: Tensor) -> Tensor:
    """Tokens `(B,)` of step `step`, when `masks` are spread over `steps` and the rest goes first.

    LLaDA (arXiv:2502.09992): m = 10 over S = 4 is 3, 3, 2, 2. It is 0 in the tail if S > m.
    """
    return masks // steps + (step < masks % steps)


def block_share(canvas: Canvas, steps: int) -> Tensor:
    """Tokens `(B,)` of this turn when a block's whole length is spread over `steps` of its own."""
    return llada_quota(canvas.stop - canvas.start, torch.full_like(canvas.step, steps), canvas.step)


def rounded_quota(masks: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens `(B,)` of a step when `masks (B,)` are expected to go evenly in `left (B,)` steps.

    n / r, rounded to the nearest, halves down (dllm, github.com/ZHZisZZ/dllm, linear schedule):
    m = 13 over S = 5 is 3, 2, 3, 2, 3. Steps that would decide nothing, r > 2n - 1, are skipped;
    what is left of the steps afterwards is returned too.
    """
    r = torch.minimum(left, 2 * masks - 1).clamp(min=1)
    return (2 * masks + r - 1) // (2 * r), r - 1


def dream_times(steps: Tensor, eps: float, width: int) -> Tensor:
    """Times t_0 = 1 ... t_S = eps of S = `steps (B,)` equal steps, fp32 `(B, width + 1)`.

    Bit for bit `torch.linspace(1, eps, S + 1)`, on which the published rounding to whole tokens
    depends: fp32 increments, fused products, from both ends to the middle. eps beyond S.
    """
    s = steps[:, None]
    j = torch.arange(width + 1, device=steps.device)
    end = torch.full_like(s, eps, dtype=torch.float32)
    delta = ((end - 1) / s).double()
    times = torch.where(j < (s + 1) // 2, 1 + delta * j, end.double() - delta * (s - j))
    return torch.where(j < s, times.float(), end)


def dream_quotas(masks: Tensor, steps: Tensor, eps: float, width: int) -> Tensor:
    """Tokens `(B, width)` that step j decides if `masks (B,)` are left when it begins.

    Dream (arXiv:2508.15487): int(n * (1 - t_{j+1} / t_j)) in fp32, everything in the last of the
    S = `steps (B,)` steps, 0 beyond.
    """
    t = dream_times(steps, eps, width)
    share = 1 - t[:, 1:] / t[:, :-1]
    quota = (masks[:, None].float() * share).long()
    j = torch.arange(width, device=masks.device)
    last = steps[:, None] - 1
    return torch.where(j < last, quota, masks[:, None] * (j == last))


def next_step(quotas: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """First step `(B,)` from `index (B,)` on with a quota of at least 1, and that quota `(B,)`.

    `quotas (B, S)` of steps before it are 0, so the canvas is the same when it begins. A row
    without any such step gets step 0 and its quota masked to 0.
    """
    steps = torch.arange(quotas.shape[-1], device=quotas.device)
    open_steps = (quotas >= 1) & (steps >= index[:, None])
    step = open_steps.to(torch.int8).argmax(dim=-1)
    quota = quotas.gather(-1, step[:, None]).squeeze(-1)
    return step, quota * open_steps.any(dim=-1)


@dataclass(frozen=True)
class QuotaSampler(Sampler):
    """Base of samplers that decide a block in a fixed number of steps, best scores first."""

    steps: int | None = option(
        None, "steps of the whole request, shared by its blocks (none: one token a step)", low=1
    )

    whole_blocks: bool = option(
        False, "share a block's length over its steps, not its masks, which may end it early (SDAR)"
    )

    def init(self, canvas: Canvas) -> Any:
        return {"masks": canvas.stop - canvas.start if self.whole_blocks else window_masks(canvas)}

    def quota(self, canvas: Canvas, state: Any) -> Tensor:
        """Tokens `(B,)` of this turn, at least 1: a step that decides nothing wastes a forward."""
        masks = state["masks"]
        steps = block_steps(canvas, masks, self.steps)
        return llada_quota(masks, steps, canvas.step).clamp(min=1)

    def take(self, canvas: Canvas, output: Output, state: Any, scores: Tensor) -> Decision:
        """Commit the candidates of the turn's quota of highest `scores (B, W)`."""
        chosen = top(scores, canvas.eligible, self.quota(canvas, state))
        return commit_candidates(canvas, output, chosen, scores)
