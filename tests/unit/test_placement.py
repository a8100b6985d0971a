"""Layers over several devices: which go where, and that nothing is used where it does not lie."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_decode import api, memory
from dlm_decode.errors import CapabilityError, CapacityError, OptionError
from dlm_decode.graphs import check_static
from dlm_decode.kv import KVStore
from dlm_decode.models import layer_devices
from dlm_decode.models import placement as placing
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.loading import save_model
from dlm_decode.models.placement import balanced, layer_homes
from dlm_decode.models.published import Family, Published
from dlm_decode.models.toy import random_model
from tests.families import made

CPU, META = torch.device("cpu"), torch.device("meta")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("sizes", "first", "last", "room", "counts"),
    [
        ([1] * 8, 0, 0, [1, 1], [4, 4]),
        ([1] * 8, 0, 0, [3, 1], [6, 2]),
        ([1] * 8, 2, 0, [1, 1], [3, 5]),
        ([1] * 8, 2, 4, [1, 1], [5, 3]),
        ([1] * 9, 0, 0, [1, 1, 1], [3, 3, 3]),
        ([5, 1, 1, 1, 1, 1], 0, 0, [1, 1], [1, 5]),
        ([1, 1, 1], 100, 0, [1, 1, 1], [1, 1, 1]),
        ([1] * 6, 0, 100, [1, 1, 1], [2, 3, 1]),
    ],
)
def test_layers_are_balanced(
    sizes: list[int], first: int, last: int, room: list[float], counts: list[int]
) -> None:
    assert balanced(sizes, first, last, room=room) == counts


def test_no_other_way_leaves_the_fullest_device_less_full() -> None:
    sizes, first, last, room = [3, 1, 4, 1, 5, 9, 2, 6], 4, 7, [10.0, 25.0, 13.0]
    counts = balanced(sizes, first, last, room=room)

    def fullest(a: int, b: int) -> float:
        loads = first + sum(sizes[:a]), sum(sizes[a:b]), sum(sizes[b:]) + last
        return max(load / space for load, space in zip(loads, room, strict=True))

    n = len(sizes)
    ways = {(a, b): fullest(a, b) for a in range(1, n - 1) for b in range(a + 1, n)}
    assert fullest(counts[0], counts[0] + counts[1]) == min(ways.values())
    assert len({*ways.values()}) > 5


def test_room_is_what_is_free_and_shared_where_a_device_is_named_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = {CPU: 300, META: 100}
    monkeypatch.setattr(placing, "available_bytes", free.__getitem__)
    assert placing._room([CPU, META]) == [300, 100]
    assert placing._room([CPU, CPU, META]) == [150, 150, 100]
    monkeypatch.setattr(placing, "available_bytes", lambda device: None)
    assert placing._room([CPU, META]) == [1, 1]


def test_counts_of_layers_are_obeyed_or_refused() -> None:
    model = made("llada2")
    assert isinstance(model, Backbone) and model.config.layers == 3
    assert layer_homes(model, {CPU: 1, META: 2}) == (CPU, META, META)
    for wrong in ({CPU: 1, META: 1}, {CPU: 3, META: 0}):
        with pytest.raises(OptionError, match=r"the model has 3: give each device 1 or more, 3 in"):
            layer_homes(model, wrong)
    with pytest.raises(OptionError, match="names 4 devices for 3 layers"):
        layer_homes(model, [CPU] * 4)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_stored_keys_lie_where_their_layer_does(tied: bool) -> None:
    """Weights are allocated there at once; the meta device takes the place of a second one."""
    whole = random_model("dream", 3, changes={"tie_word_embeddings": tied})
    model = emptied(whole)
    placing.place(model, {META: 1, CPU: 1})
    assert model.layer_devices == layer_devices(model) == (META, CPU)
    assert model.embed.device == META and (model.head is model.embed) == tied
    assert model.device == model.norm.device == (META if tied else CPU)
    assert {p.device for p in model.blocks[1].parameters()} == {CPU}
    store = KVStore(
        model.info, pages=2, page_length=4, dtype=torch.float32, device=model.layer_devices
    )
    for pools in (store.keys, store.values):
        assert [pool.data.device for pool in pools] == [META, CPU]


def emptied(model: Family) -> Backbone:
    """The same model on the meta device."""
    files, dtype = Published(model.published), model.dtype
    bare = type(model).from_published(files, device="meta", dtype=dtype)
    assert isinstance(bare, Backbone)
    return bare


@pytest.mark.parametrize("device", ["cpu,cpu", ["cpu", CPU], {"cpu": 2}])
def test_a_checkpoint_loads_over_several_devices(device: Any, tmp_path: Path) -> None:
    save_model(made("llada"), tmp_path)
    loaded, plain = api.load(tmp_path, device=device), api.load(tmp_path)
    weights = loaded.model.weights()
    assert all(torch.equal(weights[n], view) for n, view in plain.model.weights().items())
    settings: dict[str, Any] = {"gen_length": 8, "block_length": 4}
    found, expected = (
        api.Decoder(m, cache="interval").generate([[1, 2, 3]], **settings) for m in (loaded, plain)
    )
    assert found[0].ids == expected[0].ids


@pytest.mark.parametrize("device", ["cpu,nowhere", ["cpu", "nowhere"], {"nowhere": 2}])
def test_devices_that_are_not_there_are_refused(device: Any) -> None:
    with pytest.raises(OptionError, match="device 'nowhere' cannot be used"):
        api.load(device=device)


@pytest.mark.parametrize("device", [[], {}, "", "cpu,", ",", ["cpu", ""], 3.5])
def test_no_device_is_left_out(device: Any) -> None:
    """An empty name would be another CPU, and so a model on a GPU half on the CPU."""
    with pytest.raises(OptionError, match="device names none"):
        api.load(device=device)


def test_a_device_that_is_too_full_is_named_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = emptied(made("llada"))
    layer = sum(p.nbytes for p in model.blocks[0].parameters())
    ends = model.embed.nbytes, model.norm.nbytes + model.head.nbytes
    needed = placing.weight_bytes(model, (META, CPU))
    assert needed == {META: layer + ends[0], CPU: layer + ends[1]}
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed[CPU] - 1)
    monkeypatch.setattr(placing, "available_bytes", lambda device: None)
    with pytest.raises(CapacityError, match=f"comes to cpu take {needed[CPU]:,} bytes"):
        placing.place(model, [META, CPU])


def test_what_does_not_go_over_several_devices_says_so() -> None:
    other = made("bd3lm")
    with pytest.raises(CapabilityError, match="bd3lm has layers of its own"):
        placing.place(other, [CPU, CPU])
    model = emptied(made("llada"))
    placing.place(model, [META, CPU])
    with pytest.raises(CapabilityError, match=r"cache interval looks into .* several devices"):
        api.Decoder(model, cache="interval")
    with pytest.raises(CapabilityError, match="graphs need a whole model on one device"):
        check_static(model)


def test_every_tensor_that_crosses_is_moved_and_the_ids_stay_the_same(tmp_path: Path) -> None:
    """Decoding over two devices gives the same ids; where a tensor was left behind, it fails."""
    tied = {"tie_word_embeddings": True}
    models = {"llada": {}, "dream": tied, "llada2": {}}
    for name, changes in models.items():
        save_model(random_model(name, 3, changes=changes), tmp_path / name)
    command = [sys.executable, "-m", "tests.unit.placement_cases"]
    paths = [str(tmp_path / name) for name in models]
    done = subprocess.run(
        [*command, *paths],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "all in place"), done.stderr
