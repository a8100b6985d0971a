"""Prepacked weights: the same products, dropped when the weights change, refused where useless."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_decode.api import Decoder, load
from dlm_decode.cli import main
from dlm_decode.errors import CapabilityError
from dlm_decode.footprint import Allocations, forecast, weight_bytes
from dlm_decode.models import toy
from dlm_decode.models.backbone import prepack_layers, prepackable
from dlm_decode.models.prepacked import CHUNK, columns, linear, prepack
from dlm_decode.types import Request
from tests.contract.cases import tabular
from tests.families import made

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)
SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 2 * CHUNK + 70}


class Products(TorchDispatchMode):
    """Counts products with prepacked weights and with others."""

    def __init__(self) -> None:
        super().__init__()
        self.prepacked = self.plain = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.prepacked += name == "_linear_pointwise"
        self.plain += name in ("mm", "addmm", "linear")
        return func(*args, **(kwargs or {}))


def weight(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("tokens", [1, 3, 32, 200])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_weight(tokens: int, bias: bool) -> None:
    plain, packed, x = weight(70, 48), weight(70, 48), weight(2 * tokens, 48)[::2]
    added = weight(1, 70)[0] if bias else None
    prepack(packed)
    with torch.inference_mode(), Products() as products:
        found = linear(x, packed, added)
    assert (products.prepacked, products.plain) == (1, 0)
    torch.testing.assert_close(found, F.linear(x, plain, added), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "start, stop, copies",
    [
        (0, CHUNK, 1),
        (CHUNK, 2 * CHUNK + 70, 2),
        (0, 2 * CHUNK + 70, 3),
        (256, 512, 0),
        (CHUNK, CHUNK + 256, 0),
        (2 * CHUNK, 2 * CHUNK + 100, 0),
    ],
)
def test_columns_are_those_of_the_weight(start: int, stop: int, copies: int) -> None:
    """Where the tile is no whole number of chunks, the weight itself is read; also behind the
    vocabulary, where rows of padding were not copied."""
    table, x = weight(2 * CHUNK + 100, 16), weight(5, 16)
    prepack(table, rows=2 * CHUNK + 70)
    with torch.inference_mode(), Products() as products:
        found = columns(x, table, start, stop)
    assert products.prepacked == copies
    torch.testing.assert_close(found, F.linear(x, table[start:stop]), atol=1e-5, rtol=1e-5)


def test_no_tokens_at_all() -> None:
    packed = weight(8, 4)
    prepack(packed)
    assert linear(weight(1, 4)[:0], packed).shape == (0, 8)


def test_changed_weights_are_read_anew() -> None:
    packed, x = weight(8, 4), weight(3, 4)
    prepack(packed)
    packed.mul_(2)
    torch.testing.assert_close(linear(x, packed), 2 * F.linear(x, weight(8, 4)))


def test_gradients_flow_past_the_copies() -> None:
    packed, x = weight(8, 4), weight(3, 4).requires_grad_()
    prepack(packed)
    linear(x, packed).sum().backward()
    torch.testing.assert_close(x.grad, weight(8, 4).sum(0).expand(3, 4))


@pytest.mark.parametrize("family", ["llada", "dream", "sdar", "llada2"])
@pytest.mark.parametrize("cache", ["none", "stored"])
def test_a_prepacked_model_decodes_the_same(family: str, cache: str) -> None:
    """No weights but those of experts and their routers are multiplied as they lie any more."""
    plain, packed = made(family), made(family)
    prepack_layers(packed)
    if cache == "stored":
        cache = "dual" if plain.info.regime == "full" else "block_causal"
    requests = [Request([3, 5, 7, 2], 12, block_length=4), Request([9, 1], 9, block_length=4)]
    expected = Decoder(plain, "threshold", cache, max_batch_size=2).generate(requests)
    with Products() as products:
        found = Decoder(packed, "threshold", cache, max_batch_size=2).generate(requests)
    assert [r.ids for r in found] == [r.ids for r in expected]
    assert products.prepacked > 0 and (products.plain == 0) == (family != "llada2")


def test_a_cast_drops_the_copies() -> None:
    model = toy.random_llada(0, **SIZES)
    whole = weight_bytes(model)
    prepack_layers(model)
    assert weight_bytes(model) > whole
    model.double()
    assert weight_bytes(model) == pytest.approx(2 * whole, rel=0.01)
    Decoder(model, "threshold").generate(Request([3, 5], 4))


def test_the_forecast_counts_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy.random_llada(0, **SIZES)
    prepack_layers(model)
    monkeypatch.setattr("dlm_decode.models.toy.randomise", lambda made, seed: made)
    found = forecast(
        lambda: toy.random_llada(0, **SIZES), batch=1, length=32, window=8, prepack=True
    )
    assert found.weight_bytes == pytest.approx(weight_bytes(model), rel=0.01)
    assert sum(w.nbytes for w in prepackable(model)) < weight_bytes(model)


def test_bytes_of_a_prepacked_decoding_are_counted() -> None:
    """The same as with the weights as they lie: the copies were there before."""
    model = toy.random_llada(0, **SIZES)
    peaks = []
    for _ in range(2):
        with Allocations() as counted:
            Decoder(model, "threshold", "dual").generate(Request([3, 5], 8, block_length=4))
        peaks.append(counted.peak)
        prepack_layers(model)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


def test_others_say_that_they_cannot_be_prepacked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CapabilityError, match="leave prepack out"):
        prepack_layers(tabular())
    with pytest.raises(CapabilityError, match=r"float64 on cpu.*leave prepack out"):
        prepack_layers(toy.random_llada(0, **SIZES, dtype=torch.float64))
    assert main(["generate", "--prompt", "a", "--prepack", "--dtype", "float64"]) == 2
    assert "leave prepack out" in capsys.readouterr().err


def test_load_prepacks_when_asked() -> None:
    plain, packed = load(), load(prepack=True)
    assert weight_bytes(packed.model) > 1.5 * weight_bytes(plain.model)


def test_memory_counts_what_loading_makes(capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model is stored in fp16 and runs in fp32; other dtypes have no copies."""
    assert main(["memory", "--prepack", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)["weight_bytes"]
    assert counted == weight_bytes(load(prepack=True).model)
    assert main(["memory", "--prepack", "--dtype", "bfloat16"]) == 2
    assert "these are bfloat16 on cpu: leave prepack out" in capsys.readouterr().err
