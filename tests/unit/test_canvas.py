"""What a sampler sees of a row is the row's own, whatever runs beside it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dlm_decode.api import Decoder, load
from dlm_decode.models.loading import LoadedModel
from dlm_decode.types import Generation, Request
from tests.golden import golden_path, requires_golden

pytestmark = requires_golden


@cache
def model() -> LoadedModel:
    return load(golden_path("llada-tiny-a"), dtype=torch.float64)


def steps(results: list[Generation]) -> list[list[tuple[int, ...]]]:
    return [[s.positions for s in result.trace.steps] for result in results]


@pytest.mark.parametrize("sampler", ["llada", "klass", "threshold"])
def test_a_step_budget_counts_the_rows_own_window(sampler: str) -> None:
    """A neighbour with longer blocks widens the tensors, not the window a quota is shared over."""
    decoder = Decoder(model(), sampler=sampler, options={"steps": 8}, debug=True)
    requests = [
        Request(range(10, 22), gen_length=32, block_length=length, stop_at_eos=False)
        for length in (8, 32, 12)
    ]
    alone = [decoder.generate(request)[0] for request in requests]
    assert steps(decoder.generate(requests)) == steps(alone)
