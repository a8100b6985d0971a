"""A pool of decoders gives what one decoder gives, also when a worker dies on the way.

Skipped where Ray is not installed; scripts/test_extras.sh installs it and runs this.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlm_decode.cli import main
from dlm_decode.eval.results import RESULTS
from tests.unit.eval_cases import write_model

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)

TASK = ["lists", "--gen-length", "16", "--block-length", "8", "--quiet", "--no-warm-up"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def command(model: Path, out: Path, *more: str) -> list[str]:
    start = [sys.executable, "-m", "dlm_decode", "eval", *TASK, "--model", str(model)]
    return [*start, "--out", str(out), *more]


def ids_of(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (path / "requests.jsonl").read_text().splitlines()]


@needs_ray
def test_two_workers_give_the_result_of_one(model: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    few = ["--limit", "8", "--batch-size", "2"]
    assert main([*command(model, one, *few)[3:]]) == 0
    subprocess.run(command(model, two, *few, "--workers", "2"), check=True)
    assert (two / RESULTS).read_bytes() == (one / RESULTS).read_bytes()


@needs_ray
def test_a_worker_killed_mid_run_loses_nothing_and_doubles_nothing(
    model: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    many = ["--limit", "40", "--batch-size", "1"]
    assert main([*command(model, one, *many)[3:]]) == 0
    process = subprocess.Popen(command(model, two, *many, "--workers", "2"))
    victim = _first_worker(process, two)
    os.kill(victim, signal.SIGKILL)
    assert process.wait(timeout=600) == 0
    assert (two / RESULTS).read_bytes() == (one / RESULTS).read_bytes()
    assert sorted(ids_of(two)) == sorted(ids_of(one))


def _first_worker(process: subprocess.Popen[bytes], out: Path) -> int:
    """The process of one decoder, as soon as the first row is written."""
    while process.poll() is None:
        if (out / "requests.jsonl").is_file() and (out / "requests.jsonl").stat().st_size:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                if _is_decoder(path):
                    return int(path.parent.name)
        time.sleep(0.05)
    raise AssertionError("the run ended before a worker was found")


def _is_decoder(path: Path) -> bool:
    try:
        return path.read_bytes().startswith(b"ray::") and b"DecodingWorker" in path.read_bytes()
    except OSError:
        return False


def test_torchrun_shares_the_work(model: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    few = ["--limit", "5", "--batch-size", "2"]
    assert main([*command(model, one, *few)[3:]]) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    shared = [*launch, "-m", *command(model, two, *few)[2:]]
    subprocess.run(shared, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (two / RESULTS).read_bytes() == (one / RESULTS).read_bytes()
    assert len(list(two.glob("requests.*.jsonl"))) == 2
