"""Accept each drafted token with probability min(1, p / q); after a failure draw the residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dlm_decode.bridge.rules import RULES, Case, Rule, Verdict, chain_verdict
from dlm_decode.bridge.rules.match import Match
from dlm_decode.bridge.streams import REST, gumbel, uniform
from dlm_decode.errors import CapabilityError


@RULES.register("rejection")
@dataclass(frozen=True)
class Rejection(Rule):
    """Accept x_i with probability min(1, p_i(x_i) / q_i(x_i)), left to right, up to a failure.

    After a failure at n the token is drawn from norm(max(p_n - q_n, 0)), after a whole draft from
    p (Leviathan et al., Fast Inference from Transformers via Speculative Decoding,
    arXiv:2211.17192, Algorithm 1; Chen et al., arXiv:2302.01318). q is one-hot wherever the draft's
    law is not certified. At temperature 0 this is `match`.
    """

    paper: ClassVar[str] = "Speculative decoding, arXiv:2211.17192; arXiv:2302.01318"
    soft: ClassVar[bool] = True

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        return [self._judge(case) for case in cases]

    def chances(self, p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
        """Acceptance probabilities `(g,)` of `tokens (g,)`, for `p (g + 1, V)` and `q (g, V)`."""
        places = tokens[:, None]
        ratio = p[:-1].gather(1, places) / q.gather(1, places)
        return ratio[:, 0].clamp(max=1.0)

    def accepted(self, passed: Tensor) -> int:
        """How many tokens stand when the tests `passed (g,)` as they did."""
        return int(passed.long().cumprod(0).sum())

    def counts(self, chances: Tensor) -> Tensor:
        """Probability `(g + 1,)` that 0 .. g tokens stand, for enumerations and tests."""
        through = torch.cat([chances.new_ones(1), chances.cumprod(0)])
        return through * torch.cat([1 - chances, chances.new_ones(1)])

    def residual(self, p: Tensor, q: Tensor, tokens: Tensor, accepted: int) -> Tensor:
        """The law `(V,)` of the token after `accepted` tokens."""
        if accepted == len(tokens):
            return p[accepted]
        return _normalised((p[accepted] - q[accepted]).clamp(min=0.0))

    def _judge(self, case: Case) -> Verdict:
        if case.greedy:
            return Match().judge([case])[0]
        if case.draft.tree is not None:
            raise CapabilityError("token trees are verified by rule 'match' only")
        p, q, tokens = laws(case)
        tests = uniform(case.key, case.start, len(tokens), round_=case.start).to(p.device)
        accepted = self.accepted(tests <= self.chances(p, q, tokens))
        law = self.residual(p, q, tokens, accepted)
        place, vocab = case.start + accepted, len(law)
        noise = gumbel(case.key, place, 1, vocab, stream=REST, round_=case.start)[0]
        token = int((law.log() + noise.to(law.device)).argmax())
        return chain_verdict(case.draft, accepted, token)


def laws(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """p `(g + 1, V)` and q `(g, V)` in fp64, and the tokens `(g,)`."""
    device = case.log_p.device
    q = case.draft.laws(case.log_p.shape[1], device).exp()
    tokens = torch.tensor(case.draft.tokens, dtype=torch.long, device=device)
    return case.log_p.double().softmax(-1), q, tokens


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum()
