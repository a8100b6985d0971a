"""Figures of a verifier and a drafter on prompts: controllers x rules x temperatures, measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlm_decode.bridge.controllers import CONTROLLERS
from dlm_decode.bridge.controllers.cost import Cost
from dlm_decode.bridge.drafters import Context, Drafter
from dlm_decode.bridge.drafters.baselines import NullDrafter
from dlm_decode.bridge.law import Sampling
from dlm_decode.bridge.loop import Speculator
from dlm_decode.bridge.stats import Speculation, Totals
from dlm_decode.bridge.verifier import Feed, Verifier
from dlm_decode.clock import clock_of

HEADER = (
    "| controller | rule | T | tokens / verifier forward | accepted / drafted "
    "| drafter forwards / token | same output | speedup |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Figures:
    """One cell of the table.

    `equal` is the share of prompts with the output of the verifier alone (None where the rule keeps
    its law but not its draws). `speedup` is seconds of the verifier alone, in the same loop and
    process, over seconds with drafts.
    """

    controller: str
    rule: str
    temperature: float
    totals: Totals
    equal: float | None
    speedup: float

    def row(self) -> str:
        """A line of a Markdown table."""
        per_token = self.totals.drafter_forwards / max(self.totals.tokens, 1)
        same = "law only" if self.equal is None else f"{self.equal:.0%}"
        return (
            f"| {self.controller} | {self.rule} | {self.temperature:g} "
            f"| {self.totals.tokens_per_verifier_forward:.2f} | {self.totals.acceptance:.2f} "
            f"| {per_token:.2f} | {same} | {self.speedup:.2f}x |"
        )


@dataclass(frozen=True)
class Comparison:
    """What to run on the same prompts."""

    verifier: Verifier
    drafter: Drafter
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int = 72
    max_batch_size: int = 8
    seed: int = 0

    def table(
        self, controllers: Sequence[str], rules: Sequence[str], temperatures: Sequence[float]
    ) -> Iterator[Figures]:
        """Every combination; at temperature 0 all rules are one."""
        for temperature in temperatures:
            sampling = Sampling(temperature=temperature)
            alone, alone_s = self._timed(NullDrafter(), "match", "fixed", sampling)
            for rule in rules[:1] if temperature == 0 else rules:
                for controller in controllers:
                    done, took_s = self._timed(self.drafter, rule, controller, sampling)
                    equal = None if rule != "match" and temperature else _equal(done, alone)
                    totals = Totals.over(done)
                    speedup = alone_s / took_s
                    yield Figures(controller, rule, temperature, totals, equal, speedup)

    def _timed(
        self, drafter: Drafter, rule: str, controller: str, sampling: Sampling
    ) -> tuple[list[Speculation], float]:
        speculator = Speculator(
            self.verifier,
            drafter,
            rule=rule,
            controller=controller,
            sampling=sampling,
            seed=self.seed,
            max_batch_size=self.max_batch_size,
        )
        clock = clock_of(self.verifier.device)
        started_s = clock()
        done = speculator.generate(self.prompts, max_new_tokens=self.max_new_tokens)
        return done, clock() - started_s


def measure_costs(
    verifier: Verifier, drafter: Drafter, prompt: Sequence[int], *, repeats: int = 5
) -> Cost:
    """A `cost` controller with the costs timed here: a draft, and a longer verification."""
    plain = Cost()
    single_s = _verify_s(verifier, prompt, 1, repeats)
    longer_s = _verify_s(verifier, prompt, 1 + plain.n, repeats)
    fixed = CONTROLLERS.create("fixed", {"length": plain.n})
    context = Context(list(prompt), len(prompt), 0, plain.n, fixed, fixed.init())
    forwards = drafter.propose([context])[0].forwards
    draft_s = _best_s(lambda: drafter.propose([context]), repeats) / max(forwards, 1)
    per_token = max(longer_s - single_s, 0.0) / plain.n
    return replace(plain, c_d=draft_s / single_s, c_tok=per_token / single_s)


def _verify_s(verifier: Verifier, prompt: Sequence[int], width: int, repeats: int) -> float:
    session = verifier.open(1)
    session.score([Feed(prompt)])
    session.commit([()])
    feed = Feed(prompt[-1:], [prompt[-1]] * (width - 1))

    def once() -> None:
        session.score([feed])
        session.commit([()])

    return _best_s(once, repeats)


def _best_s(call: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        before_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - before_s)
    return min(times)


def _equal(a: Sequence[Speculation], b: Sequence[Speculation]) -> float:
    return sum(x.ids == y.ids for x, y in zip(a, b, strict=True)) / len(a)
