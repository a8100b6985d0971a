"""Adaptive parallel decoding: the inverse bridge, a small AR model decides how far a dLLM goes.

Letters: M masks, V vocabulary. This is a decoder of its own: its output is neither model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_decode.bridge.drafters.diffusion import check_drafter
from dlm_decode.bridge.marginals import Reuse, Span, Stored, marginals
from dlm_decode.bridge.streams import gumbel
from dlm_decode.bridge.verifier import Feed, Session, Verifier
from dlm_decode.errors import CapabilityError, RequestError
from dlm_decode.models import DiffusionLM
from dlm_decode.noise import request_key
from dlm_decode.options import Options, option


@dataclass(frozen=True)
class ParallelConfig(Options):
    """R, W and M of adaptive parallel decoding, and how tokens are drawn."""

    r: float = option(
        0.5, "R: weight of the dLLM in the target; 1 keeps all it says", low=0, high=1
    )
    window: int = option(16, "W: last prefix positions whose K/V are computed anew", low=1)
    lookahead: int = option(100, "M: most masks after the prefix", low=1)
    temperature: float = option(0.0, "0 takes the most probable token", low=0.0)
    rule: str = option(
        "paper",
        "paper: both draws share their noise; code: the published code's target draw has none",
        choices=("paper", "code"),
    )


@dataclass(frozen=True)
class ParallelResult:
    """New `ids`, why they end ("eos" or "length"), and the forwards of each model."""

    ids: tuple[int, ...]
    finish_reason: str
    forwards: int
    guide_forwards: int
    accepted: tuple[int, ...]


def adaptive_parallel(
    model: DiffusionLM,
    guide: Verifier,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 128,
    config: ParallelConfig | None = None,
    seed: int = 0,
) -> ParallelResult:
    """Decode left to right; each dLLM forward keeps the tokens that a mixed target draws too.

    x_i is drawn from the dLLM's marginal p_D, y_i from the target p_T ~ p_D^R p_AR^(1-R), where
    p_AR sees x_<i, with the same Gumbel noise; x stands up to the first x_i != y_i, and its first
    token always (Israel et al., Accelerating Diffusion LLMs via Adaptive Parallel Decoding,
    arXiv:2506.00413).
    """
    config = config or ParallelConfig()
    check_drafter(model)
    guide.check_ids("the prompt", prompt_ids)
    if model.info.vocab_size != guide.vocab_size:
        raise CapabilityError(
            f"the two must share their ids, got {model.info.vocab_size} and {guide.vocab_size}"
        )
    most = min(model.info.max_positions, guide.max_positions or model.info.max_positions)
    if max_new_tokens < 1 or len(prompt_ids) + max_new_tokens > most:
        raise RequestError(
            f"max_new_tokens must be from 1 to {most - len(prompt_ids)} after this prompt, got "
            f"{max_new_tokens}"
        )
    run = _Run(model, guide.open(1), config, request_key(seed, prompt_ids), list(prompt_ids))
    limit, ends = len(prompt_ids) + max_new_tokens, guide.end_ids
    accepted: list[int] = []
    ended = False
    while len(run.ids) < limit and not ended:
        accepted.append(run.turn(limit - len(run.ids), ends))
        ended = run.ids[-1] in ends
    return ParallelResult(
        tuple(run.ids[len(prompt_ids) :]),
        "eos" if ended else "length",
        len(accepted),
        run.session.forwards,
        tuple(accepted),
    )


@dataclass
class _Run:
    """One sequence under way."""

    model: DiffusionLM
    session: Session
    config: ParallelConfig
    key: int
    ids: list[int]

    def __post_init__(self) -> None:
        self.stored = Stored()

    def turn(self, room: int, ends: Sequence[int]) -> int:
        """One forward of each model; appends at least one token and returns how many."""
        masks = min(self.config.lookahead, room)
        law = self._scaled(self._marginals(masks))
        noise = self._noise(*law.shape)
        drawn = (law + noise).argmax(-1)
        guided = self._scaled(self._guided(drawn))
        mixed = self.config.r * law + (1 - self.config.r) * guided
        target = torch.where(law == -torch.inf, law, mixed)  # 0 * -inf is no number
        shared = noise if self.config.rule == "paper" else torch.zeros_like(noise)
        agrees = (target + shared).argmax(-1) == drawn
        count = max(int(agrees.long().cumprod(0).sum()), 1)
        tokens = drawn[:count].tolist()
        stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), count)
        self.session.commit([range(stop - 1)])
        self.ids += tokens[:stop]
        return stop

    def _marginals(self, masks: int) -> Tensor:
        start, mask_id = len(self.ids), self.model.info.mask_id
        span = Span([*self.ids, *[mask_id] * masks], start, start, masks, self.stored)
        reuse = Reuse(overlap=self.config.window, refresh_every=None)
        return marginals(self.model, [span], reuse)[0].cpu()

    def _guided(self, drawn: Tensor) -> Tensor:
        """AR logits `(M, V)`; each position sees the drawn tokens before it."""
        pending = self.ids[self.session.cached[0] :]
        return self.session.score([Feed(pending, drawn[:-1].tolist())])[0].cpu()

    def _scaled(self, logits: Tensor) -> Tensor:
        """log p `(M, V)` at the temperature."""
        return (logits / (self.config.temperature or 1.0)).log_softmax(-1)

    def _noise(self, masks: int, vocab: int) -> Tensor:
        if self.config.temperature == 0:
            return torch.zeros(masks, vocab)
        return gumbel(self.key, len(self.ids), masks, vocab)
