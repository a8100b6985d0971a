"""Test what needs the optional extras: lm-eval, Ray and matplotlib, in an environment of their own.

    python scripts/eval_extras.py              # makes build/extras if needed, then runs the tests
    python scripts/eval_extras.py --here       # in this environment

Further arguments go to pytest. DLM_DATA names the benchmark data; DLM_PARITY_DOCUMENTS is how many
documents of each task are compared with lm-eval's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "extras"
TESTS = ["tests/unit/test_eval_harness.py", "tests/unit/test_eval_pool.py",
         "tests/unit/test_eval_plots.py"]  # fmt: skip


def main() -> int:
    given = sys.argv[1:]
    here = "--here" in given
    python = sys.executable if here else str(make_environment())
    given = [argument for argument in given if argument != "--here"]
    command = [python, "-m", "pytest", "-q", *TESTS, *given]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode


def make_environment() -> Path:
    """The interpreter of `build/extras`, with the extras installed."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / "installed").is_file():
        venv.create(FOLDER, with_pip=True, clear=True)
        extras = ".[test,eval,distributed,plot]"
        pip = [str(python), "-m", "pip", "install", "-q", "-c", "constraints.txt", "-e", extras]
        subprocess.run(pip, cwd=ROOT, check=True)
        (FOLDER / "installed").touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
