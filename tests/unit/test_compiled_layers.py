"""Compiled layers compute what the others do, and are compiled once for the whole model."""

from __future__ import annotations

import shutil

import pytest
import torch

from dlm_decode.api import Decoder, load
from dlm_decode.errors import CapabilityError
from dlm_decode.models import toy
from dlm_decode.models.backbone import compile_layers
from dlm_decode.types import Request
from tests.contract.cases import tabular

REQUESTS = [Request([3, 5, 7, 2], 12, block_length=4), Request([9, 1], 9, block_length=4)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_layers_give_the_same_tokens() -> None:
    """With biases, grouped queries and windows of several lengths, in fp64."""
    from torch._dynamo.utils import counters

    settings = {"layers": 3, "hidden": 16, "heads": 2, "kv_heads": 1, "vocab": 32}
    plain, compiled = (toy.random_dream(2, **settings, dtype=torch.float64) for _ in range(2))
    compile_layers(compiled)
    counters.clear()
    for cache in ("dual", "none"):
        expected, found = (
            Decoder(model, "threshold", cache, options={"threshold": 0.4}).generate(REQUESTS)
            for model in (plain, compiled)
        )
        assert [r.ids for r in found] == [r.ids for r in expected]
        assert [r.trace.steps for r in found] == [r.trace.steps for r in expected]
    assert counters["stats"]["unique_graphs"] == 2, "one for each half of a layer"


def test_other_models_say_that_they_cannot_be_compiled() -> None:
    with pytest.raises(CapabilityError, match="leave compile out"):
        compile_layers(tabular())


def test_load_compiles_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: seen.append(f.__name__) or f)
    load()
    assert seen == []
    layers = load(compile=True).model.info.layers
    assert seen == ["project", "feed"] * layers
