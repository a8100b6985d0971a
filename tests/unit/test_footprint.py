"""The memory forecast against what the engine really allocates, counted tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlm_decode.api import Decoder
from dlm_decode.cli import main
from dlm_decode.footprint import Allocations, forecast, weight_bytes
from dlm_decode.kv import page_bytes, pages_of
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.loading import save_model
from dlm_decode.models.toy import random_dream, random_llada, random_sdar
from dlm_decode.storage import PAGE_LENGTH, Storage
from dlm_decode.types import Request

Maker = Callable[[], Backbone]
MAKERS: dict[str, Maker] = {
    "llada": lambda: random_llada(0, hidden=64, vocab=600, layers=2),
    "dream": lambda: random_dream(0, hidden=48, vocab=300, layers=2),
    "sdar": lambda: random_sdar(0, hidden=48, vocab=300, layers=2, block=32),
}
CACHE = {"llada": "dual", "dream": "prefix", "sdar": "block_causal"}


def measured(model: Backbone, cache: str, batch: int, kv_dtype: str = "model") -> int:
    """Most bytes that are live at a time while rows of 96 positions are decoded."""
    requests = [
        Request([1] * 64, gen_length=32, block_length=32, stop_at_eos=False) for _ in range(batch)
    ]
    storage = Storage(dtype=kv_dtype)
    with Allocations() as counted:
        Decoder(
            model, "llada", cache, options={"steps": 2}, max_batch_size=batch, storage=storage
        ).generate(requests)
    return counted.peak


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_forecast_is_within_5_percent_of_what_is_allocated(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without the weights, which would hide an error in the rest."""
    model = MAKERS[name]()
    real = measured(model, CACHE[name], batch)
    monkeypatch.setattr("dlm_decode.models.toy.randomise", lambda made, seed: made)
    found = forecast(MAKERS[name], batch=batch, length=96, window=32)
    assert found.weight_bytes == weight_bytes(model)
    assert found.peak_bytes - found.weight_bytes == pytest.approx(real, rel=0.05)


def test_the_forecast_counts_int8_with_its_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    real = measured(MAKERS["llada"](), "dual", 3, "int8")
    monkeypatch.setattr("dlm_decode.models.toy.randomise", lambda made, seed: made)
    found = forecast(MAKERS["llada"], batch=3, length=96, window=32, kv_dtype=torch.int8)
    assert found.peak_bytes - found.weight_bytes == pytest.approx(real, rel=0.05)


def test_pages_are_those_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MAKERS["llada"]()
    monkeypatch.setattr("dlm_decode.models.toy.randomise", lambda made, seed: made)
    found = forecast(MAKERS["llada"], batch=2, length=97, window=32, kv_dtype=torch.float16)
    assert found.page_bytes == 2 * pages_of(97, PAGE_LENGTH) * page_bytes(
        model.info, 32, torch.float16
    )
    assert forecast(MAKERS["llada"], batch=2, length=97, window=8, stores=False).page_bytes == 0


def test_counting_follows_the_life_of_tensors() -> None:
    """Views count once, what is dropped no more, what was there before not at all."""
    before = torch.zeros(1000)
    with Allocations() as counted:
        a = torch.zeros(100)
        view = a[10:].view(9, 10)
        assert counted.live == 400
        b = before + 1
        assert counted.live == 4400
        del b
        assert counted.live == 400 and counted.peak == 4400
        del a
        assert counted.live == 400, "the view holds it"
        del view
        assert counted.live == 0


def test_the_command_reads_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(MAKERS["llada"](), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    given = ["memory", "--model", str(tmp_path), "--batch", "2", "--length", "96"]
    assert main([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak_bytes"] > found["weight_bytes"] > 0
    assert main([*given, "--cache", "none", "--dtype", "float16"]) == 0
    shown = capsys.readouterr().out
    assert "K/V pages" in shown and "0.00 MiB" in shown
