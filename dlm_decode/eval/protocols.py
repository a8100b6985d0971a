"""Protocols: what exactly a task runs, one JSON file each in `protocols/`.

A protocol pins data and their sha256, documents, examples, template, chat mode, lengths,
end-of-text policy, stop strings and scoring. A change that can move a score needs a new `version`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dlm_decode.errors import UnknownNameError

FOLDER = Path(__file__).with_name("protocols")
BUNDLED = ("mini-gsm8k", "mini-mbpp", "lists", "grids")
"""The task families that the bundled model was trained for; "bundled" on the command line."""


@dataclass(frozen=True)
class Protocol:
    """One protocol file; `sha256` is the file's own.

    `data`: `files` with their `sha256` and the `hub` data set, or `family` for generated items and
    the `sha256` of all their prompts and gold answers. `documents`: `split`, optionally `from` and
    `to` (inclusive ids), and the expected `count`. `shots`: `first` n, `ids`, `random` n with
    `seed`, or `generated` n. Templates name fields of a document. `answer_prefix` is put before the
    answer and is part of the prompt. `chat`: "single" puts the whole prompt into one user message
    if the tokenizer has a chat template, "never" does not. `gold` is an answer that must score
    100%, `corrupted` one that must score 0.
    """

    name: str
    version: int
    summary: str
    source: str
    lm_eval: str | None
    data: Mapping[str, Any]
    documents: Mapping[str, Any]
    shots: Mapping[str, Any] | None
    template: Mapping[str, str]
    gold: str
    corrupted: str
    chat: str
    gen_length: int
    block_length: int
    eos: str
    stops: Sequence[str]
    scorer: str
    primary: str
    answer_prefix: str = ""
    sha256: str = ""

    @property
    def id(self) -> str:
        """Name and version, as recorded with every result."""
        return f"{self.name}@{self.version}"

    @property
    def is_generated(self) -> bool:
        return "family" in self.data


def names() -> list[str]:
    """All protocols, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_protocol(name: str) -> Protocol:
    """The protocol called `name`; raises `UnknownNameError` with the nearest name and the list."""
    known = names()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"unknown task {name!r}{hint} (known: bundled, {', '.join(known)})")
    content = (FOLDER / f"{name}.json").read_bytes()
    return parse_protocol(json.loads(content), hashlib.sha256(content).hexdigest())


def parse_protocol(content: Mapping[str, Any], sha256: str) -> Protocol:
    """A protocol from a file's content; raises `ValueError` for unknown or missing keys."""
    known = {f.name for f in fields(Protocol)} - {"sha256"}
    missing = known - content.keys() - {"answer_prefix"}
    if missing or content.keys() - known:
        unknown = sorted(content.keys() - known)
        raise ValueError(f"protocol lacks {sorted(missing)}, has unknown {unknown}")
    return Protocol(**content, sha256=sha256)


def expand(tasks: Sequence[str]) -> list[str]:
    """Task names with "bundled" replaced by the bundled model's families, each name once."""
    listed = [name for task in tasks for name in (BUNDLED if task == "bundled" else (task,))]
    return list(dict.fromkeys(listed))
