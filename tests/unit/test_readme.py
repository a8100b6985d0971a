"""The README says what the code does: its tables, commands and example are checked against it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlm_decode.cli import build_parser
from dlm_decode.models.loading import bundled_model_path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_registries() -> None:
    script = [sys.executable, "scripts/readme_tables.py", "--check"]
    result = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_command_in_the_readme_parses() -> None:
    text = README.replace("\\\n", " ")
    lines = re.findall(r"^ +dlm-decode (.+)$", text, flags=re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]
        build_parser().parse_args(words)


@pytest.mark.skipif(not bundled_model_path().is_dir(), reason="the bundled model is not there")
def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.+?)```", README, flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.count(" eos ") == 2


@pytest.mark.parametrize("name", re.findall(r"bash (\S+\.sh)", README))
def test_every_script_in_the_readme_is_there_and_is_bash(name: str) -> None:
    result = subprocess.run(["bash", "-n", name], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_result_row_is_documented_whole() -> None:
    from dlm_decode.jsonl import KEYS, result_row
    from dlm_decode.types import Generation, Step, Trace

    trace = Trace({"full": 1}, 1, (Step((0,), (1,), (0.5,)),), 0.0)
    written = result_row("1", Generation("1", (1,), "a", 1, "length", trace), trace=True)
    for key in {*written, *KEYS}:
        assert f"`{key}`" in README


def test_no_path_of_anyones_machine_is_in_the_readme() -> None:
    assert not re.findall(r"(?<![\w.])/(?:home|root|work|tmp|Users)\b", README)
