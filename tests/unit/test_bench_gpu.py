"""The GPU benchmark's script, tried out on the CPU: every part runs, on whatever device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("bench") / "rows.json"
    command = ["bash", "scripts/bench_gpu.sh", "--smoke", "--runs", "1", "--json", str(file)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert len(found) == sum(line.startswith("| ") for line in done.stdout.splitlines()) - 2
    return list(found)


def test_every_part_is_measured_and_has_its_floor(rows: list[dict[str, Any]]) -> None:
    parts = {"ceiling", "statistics", "window", "turn", "decode", "attention"}
    assert {row["part"] for row in rows} == parts
    assert all(row["measured"] > 0 for row in rows)
    for row in rows:
        if row["floor"] is not None:
            assert row["ratio"] == pytest.approx(row["measured"] / row["floor"])


def test_costs_are_those_of_the_decoding(rows: list[dict[str, Any]]) -> None:
    """16 tokens, four a turn; a refresh of a block computes 48 positions, or the 16 generated."""
    whole, again, generation, _ = (row["what"] for row in rows if row["part"] == "decode")
    assert "eager" in whole and "graphs" in again
    assert "TPF 4.00" in whole and "TPF 4.00" in generation
    assert f"PPT {(2 * 48 + 2 * 8) / 16:.1f}" in whole
    assert f"PPT {(48 + 16 + 2 * 8) / 16:.1f}" in generation


def test_a_gpu_that_is_not_there_is_said() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "scripts/bench_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "sees no GPU" in done.stderr
