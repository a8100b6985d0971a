"""Rows in and out: what is refused, with which words, and what a cut-short write leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlm_decode import jsonl
from dlm_decode.errors import RequestError
from dlm_decode.jsonl import FileFormatError, RowWriter, encode_row, parse_row, read_rows
from dlm_decode.types import Generation, Step, Trace


def parse(content: Any) -> jsonl.Row:
    return parse_row(json.dumps(content).encode(), 7)


@pytest.mark.parametrize(
    ("content", "source"),
    [
        ({"prompt": "Hi"}, "Hi"),
        (
            {"messages": [{"role": "user", "content": "Hi"}]},
            [{"role": "user", "content": "Hi"}],
        ),
        ({"prompt_ids": [3, 1, 2]}, [3, 1, 2]),
    ],
)
def test_each_kind_of_prompt_is_read(content: dict[str, Any], source: Any) -> None:
    row = parse(content)
    assert (row.id, row.line, row.source, row.overrides) == ("7", 7, source, {})


def test_overrides_and_a_numeric_id_are_kept() -> None:
    row = parse({"id": 12, "prompt": "Hi", "gen_length": 8, "seed": 3, "answer": 42})
    assert (row.id, row.key, row.overrides) == (12, "12", {"gen_length": 8, "seed": 3})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"prompt": "Hi"', "not valid JSON: .* .column 16"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[" * 100_000, "not valid JSON"),
        (b'"Hi"', "must be a JSON object"),
        (b"{}", "exactly one of prompt, messages, prompt_ids; it has none"),
        (b'{"prompt": "a", "prompt_ids": [1]}', "it has prompt and prompt_ids"),
        (b'{"promt": "a"}', "unknown key 'promt'; did you mean 'prompt'"),
        (b'{"prompt": "a", "gen_lenght": 4}', "did you mean 'gen_length'"),
        (b'{"prompt": " \\n"}', "prompt is empty"),
        (b'{"prompt": 5}', "prompt must be a text, got 5"),
        (b'{"prompt": "a\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "id": true}', "id must be a text or a whole number, got true"),
        (b'{"prompt": "a", "id": ""}', "id must be"),
        (b'{"prompt": "a", "seed": 1.5}', "seed must be a whole number, got 1.5"),
        (b'{"prompt": "a", "gen_length": "8"}', "gen_length must be a whole number"),
        (b'{"messages": []}', "messages must be a list"),
        (b'{"messages": [{"role": "user"}]}', r"messages\[0\] must have role and content"),
        (b'{"messages": [{"role": "user", "content": ""}]}', r"messages\[0\].content is empty"),
        (b'{"prompt_ids": []}', "prompt_ids must be a list of token ids"),
        (b'{"prompt_ids": [1, -2]}', r"prompt_ids\[1\] must be a token id, got -2"),
        (b'{"prompt_ids": [true]}', r"prompt_ids\[0\] must be"),
        (b'{"prompt_ids": "1 2"}', "prompt_ids must be a list"),
    ],
)
def test_a_bad_row_says_what_is_wrong(raw: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_row(raw, 1)


def test_bad_rows_keep_their_line_numbers_and_good_ones_pass() -> None:
    lines = [b'\xef\xbb\xbf{"prompt": "a"}\n', b"\n", b"{\n", b'{"id": "1", "prompt": "b"}\n']
    rows, problems = read_rows([*lines, b'{"id": 9, "prompt": "c"}'])
    assert [(row.line, row.id) for row in rows] == [(1, "1"), (5, 9)]
    assert [problem.line for problem in problems] == [3, 4]
    assert "already used on line 1" in problems[1].message


def make_generation() -> Generation:
    step = Step((3, 4), (10, 11), (0.5, float("-inf")))
    trace = Trace({"full": 2, "window": 1}, 40, (step,), 0.25)
    return Generation("1", (10, 11), "ä\u2028b", 2, "length", trace)


def test_a_result_row_has_the_documented_fields() -> None:
    row = jsonl.result_row(5, make_generation())
    assert row == {
        "id": 5,
        "text": "ä\u2028b",
        "ids": [10, 11],
        "finish_reason": "length",
        "forwards": 3,
        "forwards_by_kind": {"full": 2, "window": 1},
        "computed_positions": 40,
        "tokens": 2,
        "seconds": 0.25,
    }


def test_a_traced_row_is_strict_json_even_with_infinite_confidence() -> None:
    line = encode_row(jsonl.result_row("1", make_generation(), trace=True))
    content = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert content["steps"] == [
        {"positions": [3, 4], "tokens": [10, 11], "confidence": [0.5, None]}
    ]


@pytest.mark.parametrize("text", ["ä", "a\nb", "\u2028", "\ud800"])
def test_any_text_makes_one_line_that_reads_back(text: str) -> None:
    line = encode_row({"id": text})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"id": text}


def result(name: str) -> bytes:
    return encode_row({"id": name, "finish_reason": "eos"})


@pytest.mark.parametrize("rest", [b"", b'{"id', b'{"id": "c", "fin', result("c")[:-1]])
def test_resume_takes_the_whole_lines_and_drops_a_half_written_one(
    tmp_path: Path, rest: bytes
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(result("a") + result("b") + rest)
    finished = jsonl.read_finished(path)
    assert finished.ids == {"a", "b"}
    with RowWriter(path, keep_bytes=finished.size) as writer:
        writer.write({"id": "c", "finish_reason": "eos"})
    assert path.read_bytes() == result("a") + result("b") + result("c")


@pytest.mark.parametrize(
    "content",
    [b"not a row\n", b"not a row", b"{}\n", b"{}", b"7\n", b"\0\0", b'{"id": "a"}\n', b"\xff\n"],
)
@pytest.mark.parametrize("before", [b"", result("a")])
def test_resume_refuses_a_file_of_something_else(
    tmp_path: Path, before: bytes, content: bytes
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(before + content)
    with pytest.raises(FileFormatError, match=f"line {1 + bool(before)} is no result row"):
        jsonl.read_finished(path)


def test_resume_refuses_a_file_that_holds_a_row_twice(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(result("a") + result("b") + result("a"))
    with pytest.raises(FileFormatError, match="line 3 repeats row 'a'"):
        jsonl.read_finished(path)


def test_a_write_cut_short_leaves_whole_lines_only(tmp_path: Path) -> None:
    """Half a line would be a row that no reader can parse, in the middle after a resume."""
    path = tmp_path / "out.jsonl"
    with RowWriter(path) as writer:
        writer.write({"id": "a"})
        whole = path.read_bytes()
        real = writer._file
        writer._file = HalfWriter(real)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            writer.write({"id": "b"})
        assert path.read_bytes() == whole
        writer._file = real
        writer.write({"id": "c"})
    assert path.read_bytes() == whole + b'{"id": "c"}\n'


class HalfWriter:
    """A file that takes three bytes and is then interrupted."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._writes = 0

    def write(self, data: memoryview) -> int:
        self._writes += 1
        if self._writes > 1:
            raise KeyboardInterrupt
        return int(self._file.write(data[:3]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_rows_can_go_to_a_device() -> None:
    with RowWriter(Path("/dev/null")) as writer:
        writer.write({"id": "a"})


def test_rows_go_to_standard_output_without_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    with RowWriter(None) as writer:
        writer.write({"id": "ä"})
    assert capsys.readouterr().out == '{"id": "ä"}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_write_that_fails_names_the_file() -> None:
    with RowWriter(Path("/dev/full")) as writer, pytest.raises(OSError) as refused:
        writer.write({"id": "1"})
    assert refused.value.filename == "/dev/full"
