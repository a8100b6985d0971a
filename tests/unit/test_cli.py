"""The command line: what it writes, how it words mistakes, and that a killed run can go on."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlm_decode import api, cli
from dlm_decode.commands import commands
from dlm_decode.models.loading import save_model
from dlm_decode.models.toy import random_llada

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--gen-length", "12", "--block-length", "8"]
SPECIALS = ["<eos>", "<user>", "<mask>", "<assistant>", "<spare1>", "<spare2>"]
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<assistant>"

Captured = pytest.CaptureFixture[str]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; the special ids are those that `random_llada(vocab=262)` expects."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", mask_token="<mask>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random model and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    save_model(random_llada(vocab=262, max_positions=96), folder, byte_tokenizer())
    return str(folder)


@pytest.fixture(scope="module")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    save_model(random_llada(max_positions=96), folder)
    return str(folder)


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by id, without the only figure that differs from run to run."""
    return sorted(({**row, "seconds": None} for row in rows), key=lambda row: str(row["id"]))


def generate(*args: str | Path) -> int:
    return cli.main(["generate", "--threads", "1", *map(str, args)])


class TestPrompt:
    def test_the_text_alone_is_printed(self, model: str, capsys: Captured) -> None:
        assert generate("--model", model, "--prompt", "Hi", *SHORT) == 0
        out, err = capsys.readouterr()
        decoder = api.Decoder(api.load(model))
        (expected,) = decoder.generate("Hi", gen_length=12, block_length=8)
        assert out == f"{expected.text}\n"
        assert err == ""

    def test_progress_adds_the_cost_on_stderr(self, model: str, capsys: Captured) -> None:
        assert generate("--model", model, "--prompt", "Hi", *SHORT, "--progress") == 0
        assert "tokens/forward" in capsys.readouterr().err

    def test_graphs_are_refused_on_a_cpu(self, model: str, capsys: Captured) -> None:
        assert generate("--model", model, "--prompt", "Hi", *SHORT, "--graphs") == 2
        assert "graphs need a GPU, and the model is on cpu" in capsys.readouterr().err

    def test_json_and_trace_print_a_row(self, model: str, capsys: Captured) -> None:
        assert generate("--model", model, "--prompt", "Hi", *SHORT, "--trace") == 0
        row = json.loads(capsys.readouterr().out)
        assert row["id"] == "1"
        assert len(row["ids"]) == 12
        assert sum(row["forwards_by_kind"].values()) == row["forwards"] == len(row["steps"])
        assert set(row["steps"][0]) >= {"positions", "tokens", "confidence"}
        assert generate("--model", model, "--prompt", "Hi", *SHORT, "--json") == 0
        assert "steps" not in json.loads(capsys.readouterr().out)

    def test_without_chat_the_text_is_encoded_as_it_is(self, model: str, capsys: Captured) -> None:
        ids = byte_tokenizer()("Hi")["input_ids"]
        decoder = api.Decoder(api.load(model))
        (expected,) = decoder.generate([ids], gen_length=12, block_length=8)
        args = ["--model", model, "--prompt", "Hi", *SHORT, "--no-chat", "--json"]
        assert generate(*args) == 0
        assert json.loads(capsys.readouterr().out)["ids"] == list(expected.ids)

    def test_options_reach_the_parts(self, model: str, capsys: Captured) -> None:
        args = ["--model", model, "--prompt", "Hi", *SHORT, "--json", "--no-stop-at-eos"]
        method = ["--sampler", "llada", "--cache", "dual", "--set", "steps=6", "refresh_every=2"]
        assert generate(*args, *method) == 0
        row = json.loads(capsys.readouterr().out)
        assert row["forwards"] == 6
        assert row["forwards_by_kind"] == {"refresh": 4, "window": 2}

    def test_the_seed_decides_at_a_temperature(self, model: str, capsys: Captured) -> None:
        args = ["--model", model, "--prompt", "Hi", *SHORT, "--json", "--temperature", "2"]
        ids = []
        for seed in ("1", "1", "2"):
            assert generate(*args, "--seed", seed) == 0
            ids.append(json.loads(capsys.readouterr().out)["ids"])
        assert ids[0] == ids[1] != ids[2]

    def test_stop_strings_cut_the_text(self, model: str, capsys: Captured) -> None:
        args = ["--model", model, "--prompt", "Hi", *SHORT]
        assert generate(*args) == 0
        text = capsys.readouterr().out[:-1]
        assert generate(*args, "--stop", text[2]) == 0
        assert capsys.readouterr().out == text.split(text[2])[0] + "\n"

    def test_eos_can_be_banned(self, model: str, capsys: Captured) -> None:
        args = ["--model", model, "--prompt", "Hi", "--json", "--temperature", "5"]
        assert generate(*args, "--gen-length", "60", "--eos-policy", "banned") == 0
        assert 256 not in json.loads(capsys.readouterr().out)["ids"]

    def test_guidance_computes_two_lanes(self, model: str, capsys: Captured) -> None:
        args = ["--model", model, "--prompt", "Hi", *SHORT, "--json", "--sampler", "llada"]
        computed = []
        for scale in ("0", "1.5"):
            assert generate(*args, "--set", "steps=4", "--cfg-scale", scale) == 0
            computed.append(json.loads(capsys.readouterr().out)["computed_positions"])
        assert computed[1] == 2 * computed[0]


class TestRows:
    rows: tuple[Any, ...] = (
        {"id": "text", "prompt": "Hi"},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"id": 7, "prompt_ids": [5, 6, 7], "gen_length": 5},
        {"id": "seeded", "prompt": "Hi", "seed": 4, "block_length": 4, "note": "ignored"},
    )

    def test_every_row_is_written_with_its_own_id(self, model: str, tmp_path: Path) -> None:
        source = write_rows(tmp_path / "in.jsonl", self.rows)
        out = tmp_path / "out.jsonl"
        assert generate("--model", model, "--input", source, "--output", out, *SHORT) == 0
        rows = {row["id"]: row for row in read_rows(out)}
        assert rows.keys() == {"text", "2", 7, "seeded"}
        assert [len(rows[key]["ids"]) for key in ("text", "2", 7)] == [12, 12, 5]

    def test_text_is_one_user_message(self, model: str, tmp_path: Path) -> None:
        source = write_rows(tmp_path / "in.jsonl", self.rows[:2])
        out = tmp_path / "out.jsonl"
        assert generate("--model", model, "--input", source, "--output", out, *SHORT) == 0
        assert len({row["text"] for row in read_rows(out)}) == 1

    def test_the_batch_size_changes_nothing(self, model: str, tmp_path: Path) -> None:
        source = write_rows(tmp_path / "in.jsonl", self.rows)
        found = []
        for size in ("1", "3"):
            out = tmp_path / f"out{size}.jsonl"
            args = ["--model", model, "--input", source, "--output", out, "--batch-size", size]
            assert generate(*args, *SHORT, "--temperature", "1") == 0
            found.append(timeless(read_rows(out)))
        assert found[0] == found[1]

    def test_rows_come_from_stdin_and_go_to_stdout(
        self, model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stdin = io.TextIOWrapper(io.BytesIO(b'{"prompt_ids": [1, 2]}\n'))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert generate("--model", model, "--input", "-", *SHORT) == 0
        assert json.loads(capsys.readouterr().out)["id"] == "1"

    def test_a_model_without_a_tokenizer_decodes_ids(
        self, bare_model: str, tmp_path: Path, capsys: Captured
    ) -> None:
        rows = [{"prompt_ids": [1, 2]}, {"prompt": "Hi"}]
        source = write_rows(tmp_path / "in.jsonl", rows)
        assert generate("--model", bare_model, "--input", source, *SHORT) == 1
        out, err = capsys.readouterr()
        assert json.loads(out)["text"] is None
        assert "line 2: a text prompt needs a tokenizer" in err

    def test_no_rows_is_no_error(self, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        source = write_rows(tmp_path / "in.jsonl", [""])
        assert generate("--model", "nowhere", "--input", source, "--output", out) == 0
        assert out.read_bytes() == b""

    def test_bad_rows_are_reported_by_line_and_the_others_run(
        self, model: str, tmp_path: Path, capsys: Captured
    ) -> None:
        rows = [
            {"prompt": "Hi"},
            '{"prompt": "Hi"',
            {"prompt": ""},
            {"prompt_ids": [1, 9999]},
            {"prompt": "long" * 50},
            {"prompt": "Hi", "gen_length": 0},
            {"prompt": "fill <mask> in"},
            {"prompt_ids": [1, 258]},
            {"id": "1", "prompt": "Hi"},
            {"id": "last", "prompt": "Hi"},
        ]
        source = write_rows(tmp_path / "in.jsonl", rows)
        out = tmp_path / "out.jsonl"
        assert generate("--model", model, "--input", source, "--output", out, *SHORT) == 1
        assert sorted(row["id"] for row in read_rows(out)) == ["1", "last"]
        lines = capsys.readouterr().err.splitlines()
        words = {
            2: "not valid JSON",
            3: "prompt is empty",
            4: "ids of this model run from 0 to 261",
            5: "the model has 96",
            6: "gen_length must be at least 1, got 0",
            7: "the prompt holds '<mask>', which is the model's mask token",
            8: "is the mask id 258",
            9: "already used on line 1",
        }
        for number, expected in words.items():
            (line,) = [text for text in lines if f"line {number}:" in text]
            assert line.startswith(f"dlm-decode: error: {source} line {number}:")
            assert expected in line
        assert len(lines) == len(words)


class TestMistakes:
    """Each prints one line that says what was given and what is allowed, and no traceback."""

    cases: tuple[tuple[list[str], str], ...] = (
        (["--sampler", "treshold"], "unknown sampler 'treshold'; did you mean 'threshold'?"),
        (["--cache", "duel"], "unknown cache 'duel'; did you mean 'dual'?"),
        (["--schedule", "fixt"], "unknown schedule 'fixt'; did you mean 'fixed'?"),
        (["--set", "treshold=1"], "unknown option 'treshold' for this combination; did you mean"),
        (["--set", "threshold=-1"], "Threshold.threshold must be >= 0"),
        (["--set", "threshold=high"], "Threshold.threshold must be float, got 'high'"),
        (["--set", "threshold"], "--set takes KEY=VALUE, got 'threshold'"),
        (["--set", "top_k=1", "--set", "top_k=2"], "option 'top_k' is given twice: '1' and '2'"),
        (["--temperature", "-1"], "Draw.temperature must be >= 0.0 and <= 1000000.0, got -1.0"),
        (["--temperature", "warm"], "Draw.temperature must be float, got 'warm'"),
        (["--model", "no-such-folder"], "no folder 'no-such-folder'"),
        (["--device", "toaster"], "device 'toaster' cannot be used"),
        (["--prompt", " "], "prompt is empty"),
        (["--prompt", "<mask>"], "the model's mask token"),
        (["--gen-length", "500"], "the model has 96"),
        (["--resume"], "--resume and --overwrite need --output"),
        (["--output", "no-such-folder/out.jsonl"], "there is no folder no-such-folder"),
    )

    @pytest.mark.parametrize(
        ("args", "words"), cases, ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else ""
    )
    def test_a_mistake_is_one_line_and_status_2(
        self, args: list[str], words: str, model: str, capsys: Captured
    ) -> None:
        given = {"--model": model, "--prompt": "Hi"}
        rest = [word for pair in given.items() if pair[0] not in args for word in pair]
        assert generate(*rest, *args) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("dlm-decode: error: ")
        assert words in err
        assert err.count("\n") == 1

    usage: tuple[tuple[list[str], str], ...] = (
        (["generate"], "one of the arguments --prompt --input is required"),
        (["generate", "--prompt", "a", "--input", "b"], "not allowed with argument"),
        (["generate", "--prompt", "a", "--gen-length", "0"], "at least 1, got '0'"),
        (["generate", "--prompt", "a", "--block-length", "x"], "at least 1, got 'x'"),
        (["generate", "--prompt", "a", "--batch-size", "-1"], "at least 1, got '-1'"),
        (["generate", "--prompt", "a", "--cfg-scale", "nan"], "at least 0, got 'nan'"),
        (["generate", "--prompt", "a", "--cfg-scale", "x"], "at least 0, got 'x'"),
        (["generate", "--prompt", "a", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["generate", "--prompt", "a", "--eos-policy", "no"], "invalid choice: 'no'"),
        (["generate", "--prompt", "a", "--gen", "4"], "unrecognized arguments: --gen"),
        (["list", "sampler"], "invalid choice: 'sampler'"),
        (["generat"], "invalid choice: 'generat'"),
        ([], "required: COMMAND"),
    )

    @pytest.mark.parametrize(
        ("args", "words"), usage, ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else ""
    )
    def test_usage_errors_have_status_2(
        self, args: list[str], words: str, capsys: Captured
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main(args)
        assert caught.value.code == 2
        assert words in capsys.readouterr().err

    def test_a_missing_input_file(self, capsys: Captured, tmp_path: Path) -> None:
        missing = tmp_path / "missing.jsonl"
        assert generate("--input", missing) == 2
        expected = f"dlm-decode: error: {missing}: No such file or directory\n"
        assert capsys.readouterr().err == expected

    def test_a_folder_as_input(self, capsys: Captured, tmp_path: Path) -> None:
        assert generate("--input", tmp_path) == 2
        assert "Is a directory" in capsys.readouterr().err

    def test_an_existing_output_is_not_overwritten_unless_asked(
        self, model: str, tmp_path: Path, capsys: Captured
    ) -> None:
        source = write_rows(tmp_path / "in.jsonl", [{"prompt": "Hi"}])
        out = tmp_path / "out.jsonl"
        out.write_text("precious\n")
        args = ["--model", model, "--input", source, "--output", out, *SHORT]
        assert generate(*args) == 2
        assert "exists: add --resume to go on or --overwrite" in capsys.readouterr().err
        assert generate(*args, "--resume") == 2
        assert "line 1 is no result row" in capsys.readouterr().err
        assert out.read_text() == "precious\n"
        assert generate(*args, "--overwrite") == 0
        assert len(read_rows(out)) == 1

    def test_a_failed_run_does_not_destroy_what_it_would_overwrite(self, tmp_path: Path) -> None:
        source = write_rows(tmp_path / "in.jsonl", [{"prompt": "Hi"}])
        out = tmp_path / "out.jsonl"
        out.write_text("precious\n")
        args = ["--model", "nowhere", "--input", source, "--output", out, "--overwrite"]
        assert generate(*args) == 2
        assert out.read_text() == "precious\n"

    def test_the_input_is_never_the_output(self, tmp_path: Path, capsys: Captured) -> None:
        source = write_rows(tmp_path / "in.jsonl", [{"prompt": "Hi"}])
        assert generate("--input", source, "--output", source, "--overwrite") == 2
        assert "is the input file" in capsys.readouterr().err

    def test_resume_refuses_results_of_other_prompts(
        self, model: str, tmp_path: Path, capsys: Captured
    ) -> None:
        source = write_rows(tmp_path / "in.jsonl", [{"id": "a", "prompt": "Hi"}])
        out = write_rows(tmp_path / "out.jsonl", [{"id": "other", "finish_reason": "eos"}])
        args = ["--model", model, "--input", source, "--output", out, "--resume"]
        assert generate(*args) == 2
        assert "has a row 'other' that the input lacks" in capsys.readouterr().err


class TestResume:
    rows = tuple({"prompt": f"Number {i % 3}"} for i in range(6))
    method = (*SHORT, "--temperature", "1", "--batch-size", "2")

    def run(self, model: str, source: Path, out: Path, *more: str) -> int:
        return generate("--model", model, "--input", source, "--output", out, *self.method, *more)

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return write_rows(tmp_path / "in.jsonl", self.rows)

    @pytest.fixture
    def undisturbed(self, model: str, source: Path, tmp_path: Path) -> list[bytes]:
        out = tmp_path / "undisturbed.jsonl"
        assert self.run(model, source, out) == 0
        return out.read_bytes().splitlines(keepends=True)

    @pytest.mark.parametrize("kept", [0, 1, 4, 6])
    def test_a_cut_file_is_completed_with_the_same_rows(
        self, kept: int, model: str, source: Path, undisturbed: list[bytes], tmp_path: Path
    ) -> None:
        """Prompts that occur twice draw differently, also when only one of them is left."""
        out = tmp_path / "out.jsonl"
        out.write_bytes(b"".join(undisturbed[:kept]) + b'{"id": "3", "te')
        assert self.run(model, source, out, "--resume") == 0
        assert out.read_bytes().startswith(b"".join(undisturbed[:kept]))
        expected = timeless([json.loads(line) for line in undisturbed])
        assert timeless(read_rows(out)) == expected
        assert len({tuple(row["ids"]) for row in expected}) == len(self.rows)

    def test_a_finished_run_loads_no_model(
        self, source: Path, undisturbed: list[bytes], tmp_path: Path
    ) -> None:
        out = tmp_path / "undisturbed.jsonl"
        assert self.run("nowhere", source, out, "--resume") == 0
        assert out.read_bytes() == b"".join(undisturbed)

    def test_without_a_file_resume_begins(self, model: str, source: Path, tmp_path: Path) -> None:
        assert self.run(model, source, tmp_path / "new.jsonl", "--resume") == 0
        assert len(read_rows(tmp_path / "new.jsonl")) == len(self.rows)


ROWS = 24
LONG = ("--gen-length", "64", "--sampler", "llada", "--batch-size", "1", "--temperature", "1")


def _heed_interrupts() -> None:
    """A process started in the background of a script would inherit that they are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class TestProcess:
    """What only a process of its own can show."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return write_rows(tmp_path / "in.jsonl", [{"prompt": f"Row {i}"} for i in range(ROWS)])

    def start(self, *args: str | Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dlm_decode", "generate", *map(str, args)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, preexec_fn=_heed_interrupts
        )

    def stop_midway(self, process: subprocess.Popen[bytes], out: Path, how: int) -> bytes:
        """Send signal `how` once some rows are there; returns what was written on stderr."""
        deadline = time.monotonic() + 300
        while not out.exists() or out.read_bytes().count(b"\n") < 2:
            assert process.poll() is None and time.monotonic() < deadline, "no rows in time"
            time.sleep(0.002)
        process.send_signal(how)
        return process.communicate(timeout=300)[1]

    def test_a_killed_run_is_resumed_to_the_rows_of_an_undisturbed_one(
        self, model: str, source: Path, tmp_path: Path
    ) -> None:
        out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
        args = ["--model", model, "--input", source, *LONG, "--output"]
        process = self.start(*args, out)
        self.stop_midway(process, out, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert 2 <= out.read_bytes().count(b"\n") < ROWS, "the run was not stopped midway"
        assert generate(*args, out, "--resume") == 0
        assert generate(*args, whole) == 0
        assert timeless(read_rows(out)) == timeless(read_rows(whole))

    def test_an_interrupt_leaves_whole_lines_and_status_130(
        self, model: str, source: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out.jsonl"
        process = self.start("--model", model, "--input", source, *LONG, "--output", out)
        err = self.stop_midway(process, out, signal.SIGINT)
        assert process.returncode == 130
        assert err == b"dlm-decode: interrupted\n"
        assert out.read_bytes().endswith(b"\n")
        assert 2 <= len(read_rows(out)) < ROWS

    def test_a_reader_that_goes_away_is_no_traceback(self, model: str, source: Path) -> None:
        process = self.start("--model", model, "--input", source, *LONG)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        assert process.wait(timeout=300) == 141
        assert err == b""

    def test_any_text_can_be_printed_in_any_encoding(self) -> None:
        code = (
            "import sys; from dlm_decode import cli, jsonl; cli._tolerate_any_text();"
            "print('\\u00e4', flush=True); jsonl.RowWriter(None).write({'id': '\\u00e4'})"
        )
        env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        command = [sys.executable, "-c", code]
        out = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True).stdout
        assert out == b'\\xe4\n{"id": "\xc3\xa4"}\n'

    def test_help_and_version_answer_without_torch(self) -> None:
        code = "import sys; from dlm_decode import cli; cli.build_parser(); print(*sys.modules)"
        command = [sys.executable, "-c", code]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert not {"torch", "transformers", "numpy"} & set(out.split())


class TestList:
    @pytest.mark.parametrize("kind", ["samplers", "caches", "schedules", "models"])
    def test_every_entry_is_listed_with_its_options(self, kind: str, capsys: Captured) -> None:
        assert cli.main(["list", kind, "--json"]) == 0
        described = json.loads(capsys.readouterr().out)
        assert cli.main(["list", kind]) == 0
        text = capsys.readouterr().out
        assert described
        for entry in described:
            assert f"{entry['name']}: {entry['summary']}\n" in text
            assert entry["paper"] in text
            for info in entry["options"]:
                assert f"--set {info['name']}=" in text
                assert info.keys() == {"name", "type", "default", "help", "allowed"}

    def test_samplers_come_with_the_options_of_drawing(self, capsys: Captured) -> None:
        assert cli.main(["list", "samplers"]) == 0
        assert "--set temperature=0.0  (float, >= 0.0 and <= 1000000.0)" in capsys.readouterr().out


class TestMain:
    """Errors of the machine, not of the arguments."""

    def fail(self, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
        def run(args: Any) -> int:
            raise error

        monkeypatch.setattr(commands()["list"], "run", run)
        return cli.main(["list", "samplers"])

    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
            RuntimeError("CUDA out of memory. Tried to allocate\nmore"),
        ],
    )
    def test_memory_that_runs_out_is_one_line(
        self, error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: Captured
    ) -> None:
        assert self.fail(error, monkeypatch) == 2
        err = capsys.readouterr().err
        assert err.startswith("dlm-decode: error: not enough memory: ")
        assert err.count("\n") == 1

    def test_a_defect_of_ours_keeps_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(RuntimeError, match="shape"):
            self.fail(RuntimeError("shape mismatch"), monkeypatch)

    def test_an_interrupt_is_130(self, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
        assert self.fail(KeyboardInterrupt(), monkeypatch) == 130
        assert capsys.readouterr().err == "dlm-decode: interrupted\n"

    def test_a_full_disk_is_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: Captured
    ) -> None:
        error = OSError(28, "No space left on device", "out.jsonl")
        assert self.fail(error, monkeypatch) == 2
        assert capsys.readouterr().err == (
            "dlm-decode: error: out.jsonl: No space left on device\n"
        )
