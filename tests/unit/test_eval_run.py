"""Runs resume to the identical result file, refuse what is not theirs, and mean what they say."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlm_decode.api import Decoder
from dlm_decode.cli import main
from dlm_decode.eval.decoding import Asking, decode, encode, make_requests
from dlm_decode.eval.problems import load_problems
from dlm_decode.eval.protocols import load_protocol
from dlm_decode.eval.results import RESULTS, RUN, SUMMARY, TABLE
from tests.unit.eval_cases import write_model

SHORT = ["--gen-length", "8", "--block-length", "4", "--quiet", "--no-warm-up"]
EACH = {"threshold": ["threshold"], "sampled": ["threshold", "--temperature", "1"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


Evaluate = Callable[..., int]


@pytest.fixture
def evaluate(model: Path) -> Evaluate:
    def run(*args: str) -> int:
        return main(["eval", *args, "--model", str(model), *SHORT])

    return run


def test_a_run_leaves_all_its_files(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("lists", "--limit", "3", "--out", str(tmp_path), "--trace") == 0
    shown = capsys.readouterr().out
    assert "| lists@1 | threshold (threshold=0.9) | 3 | correct |" in shown
    assert (tmp_path / TABLE).read_text() == shown
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    worked = sum(row["decode_s"] for row in rows)
    for row in rows:
        assert row["forwards"] == sum(row["forwards_by_kind"].values())
        assert row["tokens"] <= row["forwards"] * 4
        assert 0 < row["ttfb_s"] <= row["seconds"] <= worked + 0.1
        assert sum(len(step["positions"]) for step in row["steps"]) <= 8
    summary = json.loads((tmp_path / SUMMARY).read_text())
    figures = summary["figures"]
    assert figures["tokens"] == sum(row["tokens"] for row in rows)
    assert figures["forwards"] == sum(row["forwards"] for row in rows)
    run = json.loads((tmp_path / RUN).read_text())["run"]
    assert run["protocol"] == "lists@1" and run["gen_length"] == 8
    assert set(run["data_sha256"]) == {"lists"}


@pytest.mark.parametrize("kind", EACH)
def test_a_stopped_run_goes_on_to_the_identical_result(
    evaluate: Evaluate, tmp_path: Path, kind: str
) -> None:
    """Cut anywhere, in the middle of a row too: what is decoded later is the same."""
    settings = ["mini-gsm8k", "--limit", "6", "--batch-size", "2", "--sampler", *EACH[kind]]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert evaluate(*settings, "--out", str(whole)) == 0
    assert evaluate(*settings, "--out", str(stopped)) == 0
    journal = stopped / "requests.jsonl"
    expected, content = (whole / RESULTS).read_bytes(), journal.read_bytes()
    assert (stopped / RESULTS).read_bytes() == expected
    for place in random.Random(kind).sample(range(1, len(content)), 3):
        journal.write_bytes(content[:place])
        (stopped / RESULTS).unlink()
        assert evaluate(*settings, "--out", str(stopped)) == 0
        assert (stopped / RESULTS).read_bytes() == expected


def test_a_killed_process_goes_on_to_the_identical_result(model: Path, tmp_path: Path) -> None:
    settings = ["lists", "--limit", "8", "--batch-size", "2", "--model", str(model), *SHORT]
    assert main(["eval", *settings, "--out", str(tmp_path / "whole")]) == 0
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "dlm_decode", "eval", *settings, "--out", str(killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = killed / "requests.jsonl"
    while process.poll() is None and not (journal.is_file() and journal.stat().st_size):
        pass
    process.kill()
    process.wait()
    assert main(["eval", *settings, "--out", str(killed)]) == 0
    assert (killed / RESULTS).read_bytes() == (tmp_path / "whole" / RESULTS).read_bytes()


def test_a_finished_run_is_not_decoded_again_and_can_be_extended(
    evaluate: Evaluate, tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path)]
    assert evaluate("lists", "--limit", "2", *out) == 0
    journal = (tmp_path / "requests.jsonl").read_bytes()
    assert evaluate("lists", "--limit", "2", *out) == 0
    assert (tmp_path / "requests.jsonl").read_bytes() == journal
    assert evaluate("lists", "--limit", "3", *out) == 0
    assert (tmp_path / "requests.jsonl").read_bytes().startswith(journal)


def test_another_runs_folder_is_refused(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--limit", "1", "--out", str(tmp_path)]
    assert evaluate("lists", *out) == 0
    assert evaluate("lists", "--seed", "5", *out) == 2
    assert "holds another run (seed differ" in capsys.readouterr().err
    assert evaluate("lists", "--compile", *out) == 2
    assert "holds another run (compile differ" in capsys.readouterr().err
    assert evaluate("lists", "--seed", "5", "--overwrite", *out) == 0


def test_what_does_not_fit_counts_as_wrong(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has 512 positions."""
    out = ["--limit", "2", "--out", str(tmp_path), "--model", str(model), "--quiet"]
    assert main(["eval", "lists", "--gen-length", "510", *out]) == 1
    assert "cannot be asked and count as wrong" in capsys.readouterr().err
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert (summary["refused"], summary["figures"]["requests"]) == (2, 2)
    assert summary["figures"]["accuracy"]["correct"]["value"] == 0


def test_a_sweep_gives_a_folder_and_a_line_for_each(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = ["llada", "threshold,threshold=0.5,cache=dual"]
    assert (
        evaluate("lists", "grids", "--limit", "1", "--out", str(tmp_path), "--sweep", *specs) == 0
    )
    assert capsys.readouterr().out.count("| 1 | correct |") == 4
    assert (tmp_path / "grids" / "threshold_threshold=0.5_cache=dual" / RESULTS).is_file()
    assert main(["report", str(tmp_path)]) == 0
    assert "AUP" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "lists"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["runs"]) == 2 and len(told["comparisons"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--list"),
        (["gsm9k"], "unknown task 'gsm9k'"),
        (["lists", "--sampler", "treshold"], "did you mean 'threshold'"),
        (["lists", "--sweep", "threshold,x"], "--sweep takes"),
        (["mbpp-3shot"], "--allow-code-execution"),
        (["gsm8k-cot-0shot", "--data", "nowhere"], "--data"),
    ],
)
def test_mistakes_are_one_line(
    evaluate: Evaluate, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(*arguments) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


def test_reports_need_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no finished run" in capsys.readouterr().err


def test_protocols_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--list"]) == 0
    assert "gsm8k-5shot-fixed@1: " in capsys.readouterr().out


def test_the_answers_beginning_is_part_of_the_prompt(model: Path) -> None:
    from dlm_decode.api import load

    decoder = Decoder(load(model))
    problem = load_problems(load_protocol("lists"), limit=1).problems[0]
    plain = encode(decoder, problem, chat=True)
    begun = encode(decoder, type(problem)(**{**vars_of(problem), "prefix": "[ ant"}), chat=True)
    assert begun[: len(plain)] == plain and len(begun) > len(plain)
    assert encode(decoder, problem, chat=False) == plain[1:-1]


def vars_of(problem: object) -> dict[str, object]:
    return dict(vars(problem))


def test_equal_problems_are_different_draws_whatever_is_left_to_do(model: Path) -> None:
    from dlm_decode.api import load

    decoder = Decoder(load(model), temperature=1.0)
    problem = load_problems(load_protocol("lists"), limit=1).problems[0]
    twins = [type(problem)(**{**vars_of(problem), "id": name}) for name in ("a", "b")]
    asking = Asking(8, 4, "none", stop_at_eos=True, chat=True)
    requests, refused = make_requests(decoder, twins, asking)
    assert not refused and [request.sample for request in requests] == [0, 1]
    both = {row["id"]: row["ids"] for row in decode(decoder, requests)}
    (alone,) = decode(decoder, requests[1:])
    assert alone["ids"] == both["b"] != both["a"]
