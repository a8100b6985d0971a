"""Candidates, confidence and selection: the few tensor functions that samplers are made of.

One total order everywhere: score descending, then position ascending. Nothing here syncs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlm_decode.errors import OptionError
from dlm_decode.types import Canvas, Decision, Output

LAWS = ("propose", "rank")
"""At temperature > 0: draw a token at every position and rank the draws, or rank, then draw."""
CONFIDENCES = ("raw", "filtered")
"""Which distribution confidence is read from: the model's own, or the tempered, filtered one."""


def confidence(output: Output, *, law: str = "propose", on: str = "raw") -> Tensor:
    """Probability `(B, W)` that a position is ranked by.

    That of the drawn token under "propose", of the most probable one under "rank" (the same thing
    at temperature 0).
    """
    prefix = {"raw": "p", "filtered": "q"}[on]
    drawn = output.is_sampled and law == "propose"
    return getattr(output, f"{prefix}_sampled" if drawn else f"{prefix}1")


def placed(output: Output) -> Tensor:
    """Probability `(B, W)` of the token that stands at each position; 0 where that is the mask.

    For samplers whose query is `Query(probe=canvas.tokens[..., None])` and that need "decided".
    """
    return (output.probed[..., 0] - output.lse).exp()


def margin(output: Output, *, on: str = "raw") -> Tensor:
    """Difference `(B, W)` of the two highest probabilities."""
    return output.p1 - output.p2 if on == "raw" else output.q1 - output.q2


def negative_entropy(output: Output, *, on: str = "raw") -> Tensor:
    """Minus the entropy `(B, W)` in nats."""
    return -(output.entropy if on == "raw" else output.q_entropy)


def ranks(scores: Tensor, eligible: Tensor) -> Tensor:
    """Rank `(B, W)` of each position by score descending, position ascending; 0 is the best.

    Positions that are not eligible come after all that are.
    """
    keyed = scores.double().masked_fill(~eligible, -torch.inf)
    first = torch.argsort((~eligible).to(torch.int8), dim=-1, stable=True)
    order = first.gather(-1, keyed.gather(-1, first).argsort(dim=-1, descending=True, stable=True))
    return inverse_permutation(order)


def inverse_permutation(order: Tensor) -> Tensor:
    """The permutation `(..., W)` that undoes `order (..., W)`."""
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def top(scores: Tensor, eligible: Tensor, count: Tensor | int) -> Tensor:
    """The `count` (an int or `(B,)`) best eligible positions of each row, `(B, W)` bool."""
    limit = count[:, None] if isinstance(count, Tensor) else count
    return eligible & (ranks(scores, eligible) < limit)


def best(scores: Tensor, eligible: Tensor) -> Tensor:
    """The best eligible position of each row (none where nothing is eligible), `(B, W)` bool.

    The same as `top(scores, eligible, 1)` without its sorts; NaN counts as highest there too.
    """
    keyed = scores.nan_to_num(torch.inf, torch.inf, -torch.inf).masked_fill(~eligible, -torch.inf)
    highest = eligible & (keyed == keyed.amax(-1, keepdim=True))
    return highest & (highest.cumsum(-1) == 1)


def sorted_by_rank(values: Tensor, rank: Tensor) -> Tensor:
    """`values (B, W)` in rank order."""
    return torch.empty_like(values).scatter_(-1, rank, values)


def longest_prefix(passes: Tensor, rank: Tensor, eligible: Tensor) -> Tensor:
    """Positions whose rank lies before the first failure, `(B, W)` bool.

    `passes (B, W)` is in rank order: whether the candidate of that rank may still be taken.
    """
    unbroken = passes.to(torch.int8).cumprod(dim=-1).bool()
    return eligible & unbroken.gather(-1, rank)


def commit_candidates(canvas: Canvas, output: Output, chosen: Tensor, scores: Tensor) -> Decision:
    """Commit the candidates of the eligible ones of `chosen (B, W)`; `scores` go into the trace.

    What stands in `scores (B, W)` where nothing is eligible is dropped.
    """
    kept = scores.masked_fill(~canvas.eligible, 0.0)
    return Decision(output.candidate, chosen & canvas.eligible, scores=kept)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise `OptionError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise OptionError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
