"""Intervals and paired tests: how much of a difference is noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

Z_95 = 1.959963984540054
T = TypeVar("T")


@dataclass(frozen=True)
class Interval:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """A share with its 95% Wilson score interval (Wilson 1927, JASA 22:209)."""
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(
            f"successes must be in [0, trials] of at least 1, got {successes}/{trials}"
        )
    p, z2 = successes / trials, Z_95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    low = 0.0 if successes == 0 else centre - half
    return Interval(p, low, 1.0 if successes == trials else centre + half)


def bootstrap(
    rows: Sequence[T],
    statistic: Callable[[Sequence[T]], float],
    *,
    draws: int = 1000,
    seed: int = 0,
) -> Interval:
    """A statistic of rows with its 95% percentile interval over resampled rows."""
    rng = random.Random(seed)
    values = sorted(statistic(rng.choices(rows, k=len(rows))) for _ in range(draws))
    low, high = (values[round(q * (draws - 1))] for q in (0.025, 0.975))
    return Interval(statistic(rows), low, high)


@dataclass(frozen=True)
class Paired:
    """Two runs over the same problems.

    `only_a` and `only_b` count problems that one run alone has right; `p_value` is McNemar's exact
    two-sided test of these being equally likely.
    """

    both: int
    only_a: int
    only_b: int
    neither: int
    p_value: float

    @property
    def difference(self) -> float:
        """Accuracy of B less that of A."""
        total = self.both + self.only_a + self.only_b + self.neither
        return (self.only_b - self.only_a) / total


def mcnemar(a: Mapping[str, bool], b: Mapping[str, bool]) -> Paired:
    """The exact paired test over the problems that both have (McNemar 1947)."""
    shared = a.keys() & b.keys()
    if not shared:
        raise ValueError("the two runs share no problem")
    counts = {pair: 0 for pair in ((x, y) for x in (True, False) for y in (True, False))}
    for key in shared:
        counts[a[key], b[key]] += 1
    only_a, only_b = counts[True, False], counts[False, True]
    return Paired(
        counts[True, True], only_a, only_b, counts[False, False], _sign_test(only_a, only_b)
    )


def _sign_test(first: int, second: int) -> float:
    """Two-sided exact binomial test of `first` against `second` at one half."""
    n, k = first + second, min(first, second)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    return min(1.0, 2 * tail)


def aup(points: Sequence[tuple[float, float]], best: float, *, alpha: float = 3.0) -> float:
    """Accuracy under parallelism of `(TPF, accuracy in percent)` points (d3LLM, ICML 2026).

    Points are sorted by TPF and those more than 5 percentage points below the first are left out.
    `best` is the best accuracy of any method on the task; an accuracy y counts with the weight
    `min(exp(-alpha (1 - y / best)), 1)`.
    """
    if not points or best <= 0:
        return 0.0
    ordered = sorted(points)
    kept = [point for point in ordered if point[1] >= ordered[0][1] - 5]
    weighted = [(rho, y * min(math.exp(-alpha * (1 - y / best)), 1.0)) for rho, y in kept]
    area = kept[0][0] * kept[0][1]
    for (rho, y), (next_rho, next_y) in pairwise(weighted):
        area += (next_rho - rho) * (y + next_y) / 2
    return area
