"""Every value that a registered option allows can be decoded with, the outermost ones included."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from dlm_decode.api import Decoder
from dlm_decode.caches import CACHES
from dlm_decode.errors import DlmDecodeError
from dlm_decode.options import Options
from dlm_decode.samplers import SAMPLERS
from dlm_decode.schedules import SCHEDULES
from dlm_decode.types import Draw, Request
from tests.contract.cases import fit, model_of

REQUESTS = (Request([3, 5, 7], gen_length=5, block_length=3), Request([9], gen_length=1))

PARTS = [
    *(("sampler", name, SAMPLERS.get(name)) for name in SAMPLERS.names()),
    *(("cache", name, CACHES.get(name)) for name in CACHES.names()),
    *(("schedule", name, SCHEDULES.get(name)) for name in SCHEDULES.names()),
    *(("draw", name, Draw) for name in ("threshold", "dream", "imh")),
]


def extremes(config: type[Options]) -> list[tuple[str, Any]]:
    """The least and the greatest value of each numeric option, infinity where nothing forbids it.

    What `Options` itself refuses, such as a bound that is exclusive, is left out.
    """
    found = []
    for field in dataclasses.fields(config):
        for value in (field.metadata.get("low"), field.metadata.get("high"), 2**31 - 1, math.inf):
            try:
                config(**{field.name: value})
            except DlmDecodeError:
                continue
            if isinstance(value, (int, float)):
                found.append((field.name, value))
    return found


@pytest.mark.parametrize(
    ("kind", "name", "config"), PARTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_outermost_values_of_every_option_decode(
    kind: str, name: str, config: type[Options]
) -> None:
    """A number that tensors cannot hold, or that sizes one, must be refused, not crash a run."""
    model = model_of("llada")
    if kind == "sampler" and not fit(name, "none", "fixed", "llada"):
        pytest.skip("these refuse each other")
    parts = {"sampler" if kind == "draw" else kind: name}
    for option, value in extremes(config):
        for temperature in (0.0, 1.0):
            given = {"draw.temperature": temperature, f"{kind}.{option}": value}
            try:
                decoder = Decoder(model, **parts, options=given)  # type: ignore[arg-type]
            except DlmDecodeError as error:
                assert option in str(error) and "\n" not in str(error)
                continue
            for result, request in zip(decoder.generate(REQUESTS), REQUESTS, strict=True):
                assert len(result.ids) == request.gen_length
                assert model.info.mask_id not in result.ids
