"""Plots are written for finished runs; without matplotlib the command says what to install."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from dlm_decode.errors import CapabilityError
from dlm_decode.eval.comparison import Run
from dlm_decode.eval.plots import commit_order, save_plots

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None

ROW = {
    "id": "1", "ids": [7, 8, 9], "tokens": 3, "prompt_tokens": 5, "scores": {"correct": True},
    "steps": [{"positions": [6]}, {"positions": [5, 7]}, {"positions": [6]}],
}  # fmt: skip


def a_run(path: Path) -> Run:
    interval = {"value": 0.5, "low": 0.3, "high": 0.7}
    figures = {"tpf": interval, "tps": interval, "accuracy": {"correct": interval}}
    method = {
        "sampler": "threshold", "sampler_options": {"threshold": 0.9}, "cache": "none",
        "schedule": "fixed", "draw": {"temperature": 0.0}, "cfg_scale": 0.0,
    }  # fmt: skip
    summary = {"task": "lists@1", "primary": "correct", "figures": figures, "run": method}
    return Run(path, summary, {"1": ROW})


def test_commit_order_is_the_turn_of_the_last_write() -> None:
    assert commit_order(ROW) == [1, 2, 1]
    never = commit_order({**ROW, "steps": ROW["steps"][:1]})
    assert math.isnan(never[0]) and never[1] == 0


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
@pytest.mark.filterwarnings("ignore")
def test_plots_are_written(tmp_path: Path) -> None:
    written = save_plots([a_run(tmp_path)], tmp_path / "plots")
    names = ["lists-accuracy-tpf.png", "lists-accuracy-tps.png", "lists-order-0.png"]
    assert [path.name for path in written] == names
    assert all(path.stat().st_size > 1000 for path in written)
    assert len(save_plots([a_run(tmp_path)], tmp_path / "plots", sample="none")) == 2


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_without_matplotlib_plots_say_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match=r"dlm-decode\[plot\]"):
        save_plots([a_run(tmp_path)], tmp_path)
