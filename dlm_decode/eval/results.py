"""A run's folder: what it is, its requests as they were completed, and its results in order.

- run.json: what was run (`run`: protocol, data, model, method; a folder belongs to one of these)
  and on what (`machine`).
- requests.jsonl: one row a request in order of completion, with times; a stopped run goes on here.
- results.jsonl: the same in the protocol's order, scored and without times: identical however
  often the run was stopped and however the work was shared out.
- summary.json, summary.md: the figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_decode.jsonl import FileFormatError, RowWriter, encode_row, read_finished

RUN, REQUESTS, RESULTS = "run.json", "requests", "results.jsonl"
SUMMARY, TABLE = "summary.json", "summary.md"
TIMES = ("seconds", "ttfb_s", "decode_s", "steps")
"""Keys of a request row that its result row leaves out."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """One run's files; `rank` names the process when several write side by side."""

    path: Path
    rank: int | None = None

    @property
    def journal(self) -> Path:
        suffix = "" if self.rank is None else f".{self.rank}"
        return self.path / f"{REQUESTS}{suffix}.jsonl"

    def open(self, run: Row, machine: Row, *, overwrite: bool = False) -> None:
        """Make the folder, or go on in it; another run's folder is refused unless `overwrite`."""
        self.path.mkdir(parents=True, exist_ok=True)
        if overwrite:
            self.clear()
        elif (self.path / RUN).is_file():
            _require_same(self.read(RUN)["run"], run, self.path)
        elif self._journals():
            raise FileFormatError(f"{self.path} has requests but no {RUN}: add --overwrite")
        self.write(RUN, {"run": run, "machine": machine})

    def clear(self) -> None:
        for path in [*self._journals(), *(self.path / n for n in (RUN, RESULTS, SUMMARY, TABLE))]:
            path.unlink(missing_ok=True)

    def finished(self) -> dict[str, Row]:
        """The request rows of all processes by id, the first of each; half-written ones not."""
        rows: dict[str, Row] = {}
        for path in self._journals():
            whole = path.read_bytes()[: read_finished(path).size]
            for row in map(json.loads, whole.splitlines()):
                rows.setdefault(str(row["id"]), row)
        return rows

    def writer(self) -> RowWriter:
        """Appends to this process's requests, after the last whole row."""
        exists = self.journal.is_file()
        return RowWriter(self.journal, keep_bytes=read_finished(self.journal).size if exists else 0)

    def _journals(self) -> list[Path]:
        return sorted(self.path.glob(f"{REQUESTS}*.jsonl"))

    def read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise FileFormatError(f"{self.path / name} cannot be read: {error}") from None

    def write(self, name: str, content: Row) -> None:
        self.write_text(name, json.dumps(content, indent=2, ensure_ascii=True) + "\n")

    def write_text(self, name: str, text: str) -> None:
        _replace(self.path / name, text.encode())

    def write_results(self, rows: Iterable[Row]) -> None:
        """`results.jsonl`, whole or not at all."""
        _replace(self.path / RESULTS, b"".join(map(encode_row, map(_timeless, rows))))

    def read_results(self) -> list[Row]:
        """Scored rows with their times."""
        try:
            lines = (self.path / RESULTS).read_bytes().splitlines()
        except OSError:
            raise FileFormatError(f"{self.path} holds no finished run ({RESULTS})") from None
        times = self.finished()
        return [{**times.get(str(row["id"]), {}), **row} for row in map(json.loads, lines)]


def _timeless(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in TIMES}


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that it is never seen half done."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _require_same(old: Row, new: Row, path: Path) -> None:
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if differing:
        key = differing[0]
        raise FileFormatError(
            f"{path} holds another run ({', '.join(differing)} differ; {key} was"
            f" {old.get(key)!r}, is {new.get(key)!r}): give another --out, or --overwrite"
        )


def in_order(rows: Mapping[str, Row], ids: Sequence[str]) -> list[Row]:
    """The rows of `ids`, in their order; those that are not there are left out."""
    return [rows[identifier] for identifier in ids if identifier in rows]
