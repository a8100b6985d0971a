"""Draw the verifier's own token at each position; the draft stands as far as it names the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dlm_decode.bridge.rules import RULES, Case, Rule, Verdict, chain_verdict
from dlm_decode.bridge.streams import gumbel


@RULES.register("match")
@dataclass(frozen=True)
class Match(Rule):
    """Emit y = argmax(log p + noise of its position); go on as long as the draft holds y.

    At temperature 0 there is no noise. The output is a function of (seed, verifier) alone, so any
    draft is exact; a drafter that uses the same noise is accepted with a probability of at least
    (1 - TV) / (1 + TV) (Daliri et al., Coupling without Communication, arXiv:2408.07978).
    """

    paper: ClassVar[str] = "Coupling without Communication, arXiv:2408.07978"

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        drawn = torch.cat([own_tokens(case) for case in cases]).tolist()
        verdicts = []
        for case in cases:
            own, drawn = drawn[: len(case.log_p)], drawn[len(case.log_p) :]
            verdicts.append(_verdict(case, own))
        return verdicts


def own_tokens(case: Case) -> Tensor:
    """What the verifier emits after the sequence and after each drafted token, `(g + 1,)`."""
    if case.greedy:
        return case.log_p.argmax(-1)
    rows, vocab = case.log_p.shape
    noise = gumbel(case.key, case.start, rows, vocab).to(case.log_p.device)
    if case.draft.tree is not None:
        tree = case.draft.tree
        depths = torch.tensor([0, *(len(tree.path(node)) for node in range(len(tree)))])
        noise = noise[depths.to(noise.device)]
    return (case.log_p + noise).argmax(-1)


def _verdict(case: Case, own: Sequence[int]) -> Verdict:
    if case.draft.tree is not None:
        path = case.draft.tree.follow(own)
        last = path[-1] + 1 if path else 0
        return Verdict(tuple(path), (*(case.draft.tree.tokens[i] for i in path), own[last]))
    pairs = zip(case.draft.tokens, own, strict=False)
    accepted = next((i for i, (x, y) in enumerate(pairs) if x != y), len(case.draft))
    return chain_verdict(case.draft, accepted, own[accepted])
