"""What is said of the CPU, and the dtype and threads that follow from it."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from dlm_decode import api, machine
from dlm_decode.cli import main
from dlm_decode.errors import OptionError
from dlm_decode.eval import identity

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16"])
def test_bf16_is_taken_where_the_cpu_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_capabilities", lambda: {name: True})
    assert machine.automatic_dtype(CPU) == torch.bfloat16
    monkeypatch.setattr(machine, "cpu_capabilities", lambda: {name: False, "avx2": True})
    assert machine.automatic_dtype(CPU) == torch.float32
    monkeypatch.setattr(machine, "cpu_capabilities", dict)
    assert machine.automatic_dtype(CPU) == torch.float32, "unknown is no"
    assert machine.automatic_dtype(torch.device("cuda")) is None


def test_auto_loads_in_that_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(machine, "cpu_capabilities", lambda has=has: {"avx512_bf16": has})
        assert api.load(dtype="auto").model.dtype == dtype
    with pytest.raises(OptionError, match="floating-point"):
        api.load(dtype="int8")


def test_a_run_is_identified_by_the_dtype_that_auto_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_capabilities", lambda: {"amx_bf16": True})
    asked = {"auto": "bfloat16", "float64": "float64", None: None}
    for dtype, recorded in asked.items():
        assert identity._dtype(argparse.Namespace(dtype=dtype, device=None)) == recorded
    assert identity._dtype(argparse.Namespace(dtype="auto", device="cuda")) == "auto"
    with pytest.raises(OptionError, match="device 'nowhere' cannot be used"):
        identity._dtype(argparse.Namespace(dtype="auto", device="nowhere"))


def test_advice_names_the_number_of_threads() -> None:
    assert machine.thread_advice(4, 4) == "none"
    assert "--threads 4" in machine.thread_advice(8, 4)
    assert "3 of 4 cores idle" in machine.thread_advice(1, 4)


def test_inspect_tells_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(api.bundled_model_path()), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["cpu"]
    assert found["threads"] == torch.get_num_threads() and found["cores"] >= 1
    assert found["dtype_auto"] == ("bfloat16" if found["bf16_in_hardware"] else "float32")
