"""LOSSY: accept drafted tokens that the verifier finds likely enough; needs `lossless=False`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dlm_decode.bridge.rules import RULES, Case, Rule, Verdict, chain_verdict
from dlm_decode.bridge.rules.match import own_tokens
from dlm_decode.errors import CapabilityError
from dlm_decode.options import option


@RULES.register("typical")
@dataclass(frozen=True)
class Typical(Rule):
    """LOSSY: a drafted token stands if p(x) >= min(epsilon, delta exp(-H(p))), H in nats.

    Typical acceptance (Medusa, arXiv:2401.10774, section 3.3.1). The output depends on the drafter.
    """

    paper: ClassVar[str] = "Medusa, arXiv:2401.10774"
    lossless: ClassVar[bool] = False

    epsilon: float = option(0.09, "highest threshold", low=0.0, high=1.0)
    delta: float = option(0.3, "threshold at entropy 0", low=0.0, high=1.0)

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        return [self._judge(case) for case in cases]

    def _judge(self, case: Case) -> Verdict:
        if case.draft.tree is not None:
            raise CapabilityError("token trees are verified by rule 'match' only")
        law = case.log_p.softmax(-1)
        entropy = -(law * law.clamp(min=1e-12).log()).sum(-1)
        least = (self.delta * (-entropy).exp()).clamp(max=self.epsilon).tolist()
        chosen = [float(law[i, x]) for i, x in enumerate(case.draft.tokens)]
        fails = (i for i, x in enumerate(chosen) if x < least[i])
        accepted = next(fails, len(case.draft))
        return chain_verdict(case.draft, accepted, int(own_tokens(case)[accepted]))
