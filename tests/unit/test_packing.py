"""Which rows of a forward are attended together."""

from __future__ import annotations

import pytest
import torch

from dlm_decode.api import Decoder
from dlm_decode.kv import Pool
from dlm_decode.models.toy import random_llada
from dlm_decode.packing import regular_runs
from dlm_decode.types import Request


@pytest.mark.parametrize(
    "bases, reaches, expected",
    [
        ([0], [5], [(0, 1)]),
        ([0, 8, 16], [5, 5, 5], [(0, 3)]),
        ([0, 8, 16], [8, 6, 7], [(0, 3)]),
        ([0, 8, 16, 32, 48], [5] * 5, [(0, 3), (3, 5)]),
        ([0, 8, 24, 32], [5] * 4, [(0, 2), (2, 4)]),
        ([0, 8, 16], [8, 8, 1], [(0, 2), (2, 3)]),
        ([0, 8, 16, 24], [1, 8, 1, 8], [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_runs_are_regular_and_hold_little_padding(
    bases: list[int], reaches: list[int], expected: list[tuple[int, int]]
) -> None:
    assert list(regular_runs(bases, reaches)) == expected


@pytest.mark.parametrize("cache", ["dual", "prefix", "delayed"])
def test_rows_attended_together_see_nothing_of_one_another(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged rows over a store that is full of nan: what leaked would be seen."""

    def poisoned(*args: object) -> Pool:
        pool = empty(*args)
        pool.data.fill_(torch.nan)
        return pool

    model = random_llada(0, hidden=16, heads=2, vocab=40, dtype=torch.float64)
    requests = [Request([n % 7] * n, 12, block_length=4) for n in (40, 33, 45, 38, 41, 36)]
    alone = [Decoder(model, "threshold", cache).generate(r)[0] for r in requests]
    empty = Pool.empty
    monkeypatch.setattr(Pool, "empty", poisoned)
    found = Decoder(model, "threshold", cache, max_batch_size=3, debug=True).generate(requests)
    assert [r.ids for r in found] == [r.ids for r in alone]
    assert [r.trace.steps for r in found] == [r.trace.steps for r in alone]
