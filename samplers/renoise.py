"""A canvas of random tokens that is denoised as a whole: DiffusionGemma's sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.noise import DENOISE, RENOISE, token_gumbel, uniform
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import longest_prefix, ranks, sorted_by_rank
from dlm_decode.types import Canvas, Decision, Output, Query

TILE = 4096
"""Columns of the vocabulary that noise is made for at a time."""


@SAMPLERS.register("renoise")
@dataclass(frozen=True)
class Renoise(Sampler):
    """Keep the surest draws of a canvas, make the rest noise again, until the best ids settle.

    DiffusionGemma's loop, from transformers 5.24 (`generation_diffusion_gemma`). The canvas begins
    as uniformly random tokens. A turn predicts it all at temperature t_min + (t_max - t_min) n / N
    with n turns of N left, draws a token for each position, accepts the draws of the longest list
    of lowest entropies with sum_{l <= k} H_l - H_k <= `entropy_bound` nats (arXiv:2505.24857), and
    replaces all others by new random tokens. What was predicted is told to the next forward
    (self-conditioning). The canvas is decided, with the most probable ids, after N turns, or once
    they were the same in `stable_turns` turns before and the mean entropy is below `confident`.

    Derived: N is at most the number of open positions; given tokens inside the canvas stay. With a
    model that has a mask, noise is the mask. Tokens are drawn at the sampler's own temperatures.
    """

    paper: ClassVar[str] = "DiffusionGemma, transformers 5.24; arXiv:2505.24857"
    traits: ClassVar[frozenset[str]] = frozenset({"history", "random", "renoises"})

    steps: int = option(48, "most turns of a canvas", low=1)
    entropy_bound: float = option(0.1, "bound in nats on what is accepted together", low=0.0)
    t_max: float = option(0.8, "temperature of the first turn", above=0.0)
    t_min: float = option(0.4, "temperature that the turns approach", above=0.0)
    stable_turns: int = option(
        1, "turns that the best ids must have been the same", low=0, high=1024
    )
    confident: float = option(0.005, "mean entropy in nats below which it may end", low=0.0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logits"})

    def init(self, canvas: Canvas) -> Any:
        shape, device = tuple(canvas.tokens.shape), canvas.tokens.device
        turns = canvas.masked.sum(-1).clamp(1, self.steps)
        return {
            "tokens": random_tokens(canvas, canvas.turn),
            "beliefs": torch.full((*shape, canvas.vocab_size), -torch.inf, device=device),
            "best": torch.full((*shape, self.stable_turns), -1, device=device),
            "turns": turns,
            "left": turns,
        }

    def query(self, canvas: Canvas, state: Any) -> Query:
        tokens = torch.where(canvas.masked, state["tokens"], canvas.tokens)
        return Query(tokens=tokens[:, None], beliefs=state["beliefs"][:, None])

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        now = canvas.eligible & output.valid
        logits = output.logits / self._temperature(state)[:, None, None]
        entropy = entropies(logits).masked_fill(~now, 0.0)
        best = logits.argmax(-1)
        accepted = self._accepted(entropy, now)
        tokens = torch.where(now, random_tokens(canvas, canvas.turn + 1), state["tokens"])
        tokens = torch.where(accepted, drawn_tokens(canvas, logits), tokens)
        stable = (state["best"] == best[..., None]).all(-1) | ~now
        mean = entropy.sum(-1) / now.sum(-1).clamp(min=1)
        ends = (stable.all(-1) & (mean < self.confident)) | (state["left"] <= 1)
        decision = Decision(best, now & ends[:, None], hold=~ends, scores=-entropy)
        return decision, {
            "tokens": tokens,
            "beliefs": torch.where(now[..., None], logits.float(), state["beliefs"]),
            "best": torch.cat([state["best"], best[..., None]], -1)[..., 1:],
            "turns": state["turns"],
            "left": (state["left"] - 1).clamp(min=1),
        }

    def _temperature(self, state: Any) -> Tensor:
        return self.t_min + (self.t_max - self.t_min) * (state["left"] / state["turns"])

    def _accepted(self, entropy: Tensor, now: Tensor) -> Tensor:
        rank = ranks(-entropy, now)
        h = sorted_by_rank(entropy, rank)
        return longest_prefix(h.cumsum(-1) - h <= self.entropy_bound, rank, now)


def entropies(logits: Tensor) -> Tensor:
    """Entropies `(B, W)` in nats of `logits (B, W, V)`."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


def random_tokens(canvas: Canvas, counter: Tensor) -> Tensor:
    """Noise `(B, W)`, another one for each `counter (B,)`: any token, or the mask if there is one.

    A number in (0, 1) has 23 bits, enough for vocabularies of millions.
    """
    if canvas.mask_id < canvas.vocab_size:
        return torch.full_like(canvas.tokens, canvas.mask_id)
    return (uniform(canvas, RENOISE, counter).double() * canvas.vocab_size).long()


def drawn_tokens(canvas: Canvas, logits: Tensor) -> Tensor:
    """A token `(B, W)` for each position, by its law `logits (B, W, V)`; another one each turn."""
    rows, width, vocab = logits.shape
    keys, turns = (x[:, None].expand(rows, width).flatten() for x in (canvas.keys, canvas.turn))
    flat, at = logits.flatten(0, 1), canvas.positions.flatten()
    value = torch.full_like(flat[:, 0], -torch.inf)
    token = torch.zeros_like(at)
    for start in range(0, vocab, TILE):
        stop = min(start + TILE, vocab)
        noisy = flat[:, start:stop] + token_gumbel(keys, at, turns, start, stop, DENOISE)
        found = noisy.max(-1)
        token = torch.where(found.values > value, found.indices + start, token)
        value = torch.maximum(value, found.values)
    return token.view(rows, width)
