"""Tokens that stay as they are when others are revealed: PUNT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.scores import LAWS, commit_candidates, confidence, ranks
from dlm_decode.types import Canvas, Decision, Output, Query


@SAMPLERS.register("punt")
@dataclass(frozen=True)
class Punt(Sampler):
    """Commit the tokens whose law hardly moves when more confident halves of them are revealed.

    PUNT, "Parallel Sampling from Masked Diffusion Models via Conditional Independence Testing",
    arXiv:2510.21961. The m eligible positions are ranked by confidence and all survive at first. In
    round b the survivors whose rank has bit b = 0 are revealed, and every other survivor j with
    KL(p_j || p_j given them) > epsilon is dropped; after ceil(log2 m) rounds the survivors are
    committed. A decision takes 1 + ceil(log2 m) forwards, of which the rounds reveal tokens but
    decide nothing (`Decision.hold`). Any two survivors differ in some bit, so one was tested beside
    the other. The most confident one is never dropped: all its bits are 0.

    With a K/V cache, a refresh in a round stores K/V of the other positions that have seen the
    revealed tokens.
    """

    paper: ClassVar[str] = "PUNT, arXiv:2510.21961"
    traits: ClassVar[frozenset[str]] = frozenset({"history"})

    epsilon: float = option(0.1, "divergence in nats that is still independent", low=0.0)
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"logits"})

    def init(self, canvas: Canvas) -> Any:
        """`round (B,)`: 0 before the plain forward, b + 1 while round b is asked for."""
        device, shape = canvas.tokens.device, tuple(canvas.tokens.shape)
        return {
            "rank": torch.zeros(shape, dtype=torch.long, device=device),
            "alive": torch.zeros(shape, dtype=torch.bool, device=device),
            "token": torch.zeros(shape, dtype=torch.long, device=device),
            "confidence": torch.zeros(shape, device=device),
            "rounds": torch.zeros(shape[0], dtype=torch.long, device=device),
            "round": torch.zeros(shape[0], dtype=torch.long, device=device),
            "log_p": torch.zeros((*shape, canvas.vocab_size), device=device),
        }

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        shown = torch.where(_revealed(state), state["token"], canvas.tokens)
        return Query(tokens=shown[:, None])

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        plain = (state["round"] == 0)[:, None]
        log_p = output.logits.float().log_softmax(-1)
        begun = self._begun(canvas, output)
        alive = torch.where(plain, begun["alive"], self._tested(state, log_p))
        kept = {name: torch.where(plain, begun[name], state[name]) for name in begun}
        kept["rounds"] = torch.where(plain[:, 0], _rounds(canvas.eligible), state["rounds"])
        over = state["round"] >= kept["rounds"]
        after = kept | {
            "alive": alive,
            "round": torch.where(over, 0, state["round"] + 1),
            "log_p": torch.where(plain[..., None], log_p, state["log_p"]),
        }
        decision = commit_candidates(canvas, output, alive & over[:, None], kept["confidence"])
        held = Decision(kept["token"], decision.commit, hold=~over, scores=decision.scores)
        return held, after

    def _begun(self, canvas: Canvas, output: Output) -> dict[str, Tensor]:
        """What a decision starts from, each `(B, W)`."""
        c = confidence(output, law=self.law).masked_fill(~canvas.eligible, 0.0)
        return {
            "rank": ranks(c, canvas.eligible),
            "alive": canvas.eligible,
            "token": output.candidate,
            "confidence": c.float(),
        }

    def _tested(self, state: Any, log_p: Tensor) -> Tensor:
        """Survivors `(B, W)` of a round, given what the revealed forward says."""
        before = state["log_p"]
        terms = before.exp() * (before - log_p)
        divergence = terms.masked_fill(before == -torch.inf, 0.0).sum(-1)
        return state["alive"] & (_revealed(state) | (divergence <= self.epsilon))


def _revealed(state: Any) -> Tensor:
    """Survivors `(B, W)` that the round under way reveals; none before a plain forward."""
    b = (state["round"] - 1).clamp(min=0)[:, None]
    zero_bit = (state["rank"] >> b) & 1 == 0
    return state["alive"] & zero_bit & (state["round"] > 0)[:, None]


def _rounds(eligible: Tensor) -> Tensor:
    """ceil(log2 m) `(B,)` of m eligible positions."""
    powers = 2 ** torch.arange(eligible.shape[1].bit_length(), device=eligible.device)
    return (powers < eligible.sum(-1, keepdim=True)).sum(-1)
