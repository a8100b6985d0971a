"""Canvases and outputs for sampler tests, built by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dlm_decode.head import output_from_logits
from dlm_decode.samplers import Sampler
from dlm_decode.types import Canvas, Decision, Draw, Output

MASK = 0
GREEDY = Draw()


def make_canvas(
    rows: int = 1,
    width: int = 6,
    *,
    masked: Tensor | None = None,
    eligible: Tensor | None = None,
    step: int = 0,
    commits: int = 0,
    blocks: Sequence[int] | None = None,
    start: int = 10,
    vocab_size: int = 8,
    mask_id: int = MASK,
) -> Canvas:
    """Rows whose window begins at `start`; everything masked and eligible unless told otherwise."""
    masked = torch.ones(rows, width, dtype=torch.bool) if masked is None else masked
    rows, width = masked.shape
    one = torch.ones(rows, dtype=torch.long)
    return Canvas(
        tokens=torch.where(masked, mask_id, 1),
        positions=(start + torch.arange(width)).repeat(rows, 1),
        masked=masked,
        editable=torch.ones_like(masked),
        eligible=masked if eligible is None else eligible,
        step=one * step,
        turn=one * step,
        commits=one * commits,
        block=one * 0,
        blocks=one if blocks is None else torch.tensor(blocks),
        block_length=one * width,
        start=one * start,
        stop=one * (start + width),
        remaining=masked.sum(-1),
        total=one * width,
        keys=1000 + torch.arange(rows) * 7919,
        horizon=torch.full((rows,), width),
        ends_from=torch.zeros(rows, dtype=torch.long),
        mask_id=mask_id,
        end_ids=(1,),
        vocab_size=vocab_size,
    )


def logits_with_top(top: Tensor | Sequence[float], vocab_size: int = 8) -> Tensor:
    """Logits `(1, W, V)` whose best token (id 2 + i) has the given probability.

    The rest is spread evenly over the other ids but the mask.
    """
    p = torch.as_tensor(top, dtype=torch.float64)
    others = ((1 - p) / (vocab_size - 2)).clamp(min=1e-300)
    logits = others.log()[:, None].repeat(1, vocab_size)
    logits[torch.arange(len(p)), 2 + torch.arange(len(p)) % (vocab_size - 2)] = p.log()
    logits[:, MASK] = 50.0
    return logits[None].float()


def logits_with_entropy(entropies: Sequence[float], vocab_size: int = 8) -> Tensor:
    """Logits `(1, W, V)` of distributions with the given entropies in nats, by bisection."""
    low = torch.full((len(entropies),), 1 / (vocab_size - 1), dtype=torch.float64)
    high = torch.ones_like(low)
    wanted = torch.tensor(entropies, dtype=torch.float64)
    for _ in range(100):
        p = (low + high) / 2
        rest = (1 - p).clamp(min=1e-300)
        h = -p * p.log() - rest * (rest / (vocab_size - 2)).log()
        low, high = torch.where(h > wanted, p, low), torch.where(h > wanted, high, p)
    return logits_with_top((low + high) / 2, vocab_size)


def random_logits(canvas: Canvas, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (*canvas.tokens.shape, canvas.vocab_size)
    return scale * torch.randn(shape, generator=generator)


def output_of(sampler: Sampler, canvas: Canvas, logits: Tensor, draw: Draw = GREEDY) -> Output:
    return output_from_logits(logits, needs=sampler.needs, draw=draw, canvas=canvas)


def decide(sampler: Sampler, canvas: Canvas, logits: Tensor, draw: Draw = GREEDY) -> Decision:
    """The first decision of a block."""
    canvas = replace(canvas, draw=draw)
    return sampler.decide(canvas, output_of(sampler, canvas, logits, draw), sampler.init(canvas))[0]


def chosen(decision: Decision, row: int = 0) -> list[int]:
    """Offsets that a row commits."""
    return decision.commit[row].nonzero().flatten().tolist()


def apply(canvas: Canvas, decision: Decision) -> Canvas:
    """The canvas one turn later."""
    committed = decision.commit & canvas.eligible
    masked = canvas.masked & ~committed
    return replace(
        canvas,
        tokens=torch.where(committed, decision.tokens, canvas.tokens),
        masked=masked,
        eligible=canvas.eligible & ~committed,
        step=canvas.step + 1,
        turn=canvas.turn + 1,
        commits=canvas.commits + committed.sum(-1),
        remaining=canvas.remaining - committed.sum(-1),
    )


def run(
    sampler: Sampler, canvas: Canvas, logits: Sequence[Tensor] | Tensor, draw: Draw = GREEDY
) -> list[Decision]:
    """Decisions until nothing is eligible, on fixed logits or one tensor a turn, the last kept."""
    turns = [logits] if isinstance(logits, Tensor) else list(logits)
    canvas = replace(canvas, draw=draw)
    state = sampler.init(canvas)
    decisions = []
    for turn in range(math.prod(canvas.tokens.shape) + 1):
        if not canvas.eligible.any():
            return decisions
        output = output_of(sampler, canvas, turns[min(turn, len(turns) - 1)], draw)
        decision, state = sampler.decide(canvas, output, state)
        canvas = apply(canvas, decision)
        decisions.append(decision)
    raise AssertionError(f"{sampler} does not finish")
