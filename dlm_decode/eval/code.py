"""Programs from answers: what is cut out of a generation, and what is run with it.

`extract` sees the generation alone: neither the reference solution nor a test, so it can make an
answer's form whole but not its content.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

FENCE = re.compile(r"```[ \t]*([\w+-]*)[ \t]*\r?\n(.*?)(?:\r?\n[ \t]*```|```|\Z)", re.DOTALL)
BEGIN, DONE = "[BEGIN]", "[DONE]"
MAX_LINES = 400
MAX_TRIES = 400
PYTHON_TAGS = ("", "python", "py", "python3")


def cut(text: str, stops: Iterable[str]) -> str:
    """`text` up to the earliest of the stop strings."""
    ends = [text.find(stop) for stop in stops if stop]
    return text[: min((end for end in ends if end >= 0), default=len(text))]


def extract(text: str) -> str:
    """The Python program in an answer.

    The first fenced block in Python, else what stands between `[BEGIN]` and `[DONE]` (either may
    be absent); of that, the longest run of whole lines that parses. Without any, the text itself.
    """
    body = _between_marks(_fenced(text))
    return longest_parsable(body) or body


def _fenced(text: str) -> str:
    blocks = [body for tag, body in FENCE.findall(text) if tag.lower() in PYTHON_TAGS]
    return blocks[0] if blocks else text


def _between_marks(text: str) -> str:
    return text.split(DONE, 1)[0].rpartition(BEGIN)[2]


def longest_parsable(text: str) -> str:
    """The longest run of whole lines that is Python and defines or does something, or "".

    Tries are bounded by `MAX_TRIES`: what is no Python at all is given up early.
    """
    lines = text.replace("\r\n", "\n").split("\n")[:MAX_LINES]
    best: Sequence[str] = ()
    tries = iter(range(MAX_TRIES))
    for start in _starts(lines):
        stop = _furthest_stop(lines, start, len(best), tries)
        if stop is not None and stop - start > len(best):
            best = lines[start:stop]
    return "\n".join(best).rstrip()


def _starts(lines: Sequence[str]) -> list[int]:
    """Lines at which a top-level statement can begin."""
    return [i for i, line in enumerate(lines) if line and not line[0].isspace()]


def _furthest_stop(
    lines: Sequence[str], start: int, at_least: int, tries: Iterator[int]
) -> int | None:
    """The end of the longest parsable run from `start` that beats `at_least` lines."""
    stop = len(lines)
    while stop > start + at_least and next(tries, None) is not None:
        try:
            body = ast.parse("\n".join(lines[start:stop])).body
        except SyntaxError as error:  # nothing that reaches the faulty line can parse
            stop = min(stop - 1, start + (error.lineno or 1) - 1)
        except (ValueError, RecursionError, MemoryError):
            return None
        else:
            return stop if _does_something(body) else None
    return None


def _does_something(body: Sequence[ast.stmt]) -> bool:
    """Whether there is more than bare names and constants, as prose may parse to."""
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in body)


def assemble(parts: Iterable[str]) -> str:
    """One program of several parts, in order; empty ones are left out.

    Line ends become those that Python's own reader makes of them, so that equal programs are equal.
    """
    kept = [part.replace("\r\n", "\n").rstrip() for part in parts if part.strip()]
    return "\n".join(kept) + "\n"
