"""Prompts in, results out, one JSON object a line: reading, checking, writing and resuming."""

from __future__ import annotations

import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dlm_decode.errors import DlmDecodeError, RequestError

if TYPE_CHECKING:
    from dlm_decode.types import Generation

SOURCES = ("prompt", "messages", "prompt_ids")
OVERRIDES = ("gen_length", "block_length", "seed")
KEYS = ("id", *SOURCES, *OVERRIDES)

Source = str | list[dict[str, str]] | list[int]


class FileFormatError(DlmDecodeError, ValueError):
    """A file that cannot be read or continued as it is."""


@dataclass(frozen=True)
class Row:
    """One input row: a text, chat messages or token ids, and the options it overrides."""

    line: int
    id: str | int
    source: Source
    overrides: Mapping[str, int]

    @property
    def key(self) -> str:
        """The id as text; two rows of one file must differ in it."""
        return str(self.id)

    @property
    def texts(self) -> list[str]:
        """What the row says in words: its prompt, or the contents of its messages."""
        if isinstance(self.source, str):
            return [self.source]
        return [part["content"] for part in self.source if isinstance(part, dict)]


@dataclass(frozen=True)
class Problem:
    """Why the row on `line` is not decoded."""

    line: int
    message: str


def read_rows(lines: Iterable[bytes]) -> tuple[list[Row], list[Problem]]:
    """Rows and problems of a file's lines, both in file order; blank lines are skipped."""
    rows: dict[str, Row] = {}
    problems: list[Problem] = []
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            row = parse_row(raw, number)
            _refuse_duplicate(row, rows)
            rows[row.key] = row
        except RequestError as error:
            problems.append(Problem(number, str(error)))
    return list(rows.values()), problems


def parse_row(raw: bytes, number: int) -> Row:
    """The row that one line holds; raises `RequestError` saying what is wrong with it."""
    content = _parse_object(raw)
    _refuse_misspelt(content)
    given = [key for key in SOURCES if key in content]
    if len(given) != 1:
        have = " and ".join(given) or "none"
        raise RequestError(f"a row must have exactly one of {', '.join(SOURCES)}; it has {have}")
    source = _CHECKS[given[0]](content[given[0]])
    overrides = {key: _whole_number(key, content[key]) for key in OVERRIDES if key in content}
    return Row(number, _row_id(content.get("id"), number), source, overrides)


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 text (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"a row must be a JSON object, got {_shown(content)}")
    return content


def _refuse_misspelt(content: Mapping[str, Any]) -> None:
    """Other keys are the user's own and ignored, unless they look like a misspelt one of ours."""
    for key in content:
        near = get_close_matches(key, KEYS, n=1, cutoff=0.8)
        if key not in KEYS and near and near[0] not in content:
            raise RequestError(f"unknown key {key!r}; did you mean {near[0]!r}?")


def _refuse_duplicate(row: Row, rows: Mapping[str, Row]) -> None:
    if row.key not in rows:
        return
    first = rows[row.key]
    unnamed = any(one.key == str(one.line) for one in (row, first))
    why = " (a row without an id takes the number of its line)" if unnamed else ""
    raise RequestError(f"id {row.id!r} is already used on line {first.line}; ids must differ{why}")


def _row_id(value: Any, number: int) -> str | int:
    if value is None:
        return str(number)
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise RequestError(f"id must be a text or a whole number, got {_shown(value)}")
    return value


def _whole_number(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{key} must be a whole number, got {_shown(value)}")
    return value


def check_text(value: Any, name: str = "prompt") -> str:
    """`value` if it is a text that a tokenizer can read; raises `RequestError` otherwise."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a text, got {_shown(value)}")
    if not value.strip():
        raise RequestError(f"{name} is empty; it must have at least one visible character")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RequestError(f"{name} holds half of a surrogate pair, which is no character")
    return value


def check_messages(value: Any) -> list[dict[str, str]]:
    """`value` if it is a list of `{"role", "content"}`; raises `RequestError` otherwise."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"messages must be a list of role and content, got {_shown(value)}")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or {"role", "content"} - message.keys():
            raise RequestError(f"messages[{index}] must have role and content: {_shown(message)}")
        check_text(message["role"], f"messages[{index}].role")
        check_text(message["content"], f"messages[{index}].content")
    return value


def check_ids(value: Any) -> list[int]:
    """`value` if it is a list of token ids; raises `RequestError` otherwise."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"prompt_ids must be a list of token ids, got {_shown(value)}")
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise RequestError(f"prompt_ids[{index}] must be a token id, got {_shown(token)}")
    return value


_CHECKS: Mapping[str, Any] = {
    "prompt": check_text,
    "messages": check_messages,
    "prompt_ids": check_ids,
}


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def result_row(row_id: str | int, generation: Generation, *, trace: bool = False) -> dict[str, Any]:
    """What is written for one finished request."""
    cost = generation.trace
    content: dict[str, Any] = {
        "id": row_id,
        "text": generation.text,
        "ids": list(generation.ids),
        "finish_reason": generation.finish_reason,
        "forwards": cost.forwards,
        "forwards_by_kind": dict(cost.forwards_by_kind),
        "computed_positions": cost.computed_positions,
        "tokens": generation.tokens,
        "seconds": round(cost.elapsed_s, 6),
    }
    if cost.drafted is not None:
        content |= {"drafted": cost.drafted, "accepted": cost.accepted}
    return content | ({"steps": [_finite(s.as_dict()) for s in cost.steps]} if trace else {})


def _finite(step: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a confidence that is none is null."""
    step["confidence"] = [c if math.isfinite(c) else None for c in step["confidence"]]
    return step


def encode_row(content: Mapping[str, Any]) -> bytes:
    """One line, newline included; readable text stays readable."""
    try:
        text = json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        text = json.dumps(content).encode()
    return text + b"\n"


@dataclass(frozen=True)
class Finished:
    """What an earlier run left: ids of its whole rows, and the bytes that these take."""

    ids: frozenset[str] = frozenset()
    size: int = 0


def read_finished(path: Path) -> Finished:
    """The whole result rows of `path`; a half-written last one is left out.

    Raises `FileFormatError` for any other line that is no result row: the file is not ours.
    """
    ids: set[str] = set()
    size = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n") and line.startswith(_ROW_BEGINS[: len(line)]):
                break
            row = _finished_id(line, f"{path} line {number}")
            if row in ids:
                raise FileFormatError(f"{path} line {number} repeats row {row!r}: cannot resume")
            ids.add(row)
            size += len(line)
    return Finished(frozenset(ids), size)


_ROW_BEGINS = b'{"id": '


def _finished_id(line: bytes, where: str) -> str:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if line.endswith(b"\n") and isinstance(content, dict) and "finish_reason" in content:
        return str(content.get("id"))
    raise FileFormatError(f"{where} is no result row: cannot resume")


class RowWriter:
    """Appends whole lines to a file, or to standard output when `path` is None.

    A write that is cut short by an interrupt or a full disk is taken back. `keep_bytes` of an
    existing file stay, the rest goes.
    """

    def __init__(self, path: Path | None, *, keep_bytes: int = 0) -> None:
        self._file: FileIO | None = None
        if path is not None:
            self._file = path.open("ab", buffering=0)
            self._truncate(keep_bytes)

    def write(self, content: Mapping[str, Any]) -> None:
        """Write one row; it is with the operating system when this returns."""
        line = encode_row(content)
        if self._file is None:
            sys.stdout.buffer.write(line)  # UTF-8, whatever the terminal's encoding is
            sys.stdout.flush()
        else:
            self._write_whole(self._file, line)

    def _write_whole(self, file: FileIO, line: bytes) -> None:
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException as error:
            self._truncate(self._end)
            if isinstance(error, OSError):
                error.filename = str(file.name)
            raise
        self._end += len(line)

    def _truncate(self, size: int) -> None:
        self._end = size
        if self._file is not None and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.truncate(size)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
