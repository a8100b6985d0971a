"""Generated task families for models of any size, worded in full, with exact verifiers.

Countdown, 4x4 Sudoku and Latin squares and operations on a waiting line, the last three after the
task definitions of ParallelBench (arXiv:2510.04767); all words, names and numbers are our own. An
answer is read leniently (`read_*`: the last thing in the text that has the asked-for form); whether
the whole text has that form is scored apart, as "strict".
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from dlm_decode.eval.arithmetic import compute
from dlm_decode.tasks import grids
from dlm_decode.tasks.items import Family, Item, new_item

NAMES = (
    "Ada Bell", "Bo Carver", "Cy Dunn", "Di Ellery", "Ed Frost", "Fay Grant", "Gil Hart",
    "Hal Iver",
    "Ida Jarvis", "Jon Keller", "Kit Lowe", "Lea Marsh", "Max Noble", "Nan Oakes", "Ole Price",
    "Pia Quill", "Ray Stone", "Sue Tully", "Tom Usher", "Una Vance", "Vic Wells", "Wim York",
)  # fmt: skip
MIN_LINE, MAX_LINE = 3, 6
MAX_NUMBER, MAX_TARGET = 25, 100
LIST = re.compile(r"\[([^\[\]\n]*)\]")
GRID = re.compile(r"(?:[1-4] ?){3}[1-4](?:\n(?:[1-4] ?){3}[1-4]){3}")


def make_countdown(rng: random.Random) -> Item:
    """Three or four numbers and a target that some expression of all of them reaches."""
    while True:
        numbers = [rng.randint(1, MAX_NUMBER) for _ in range(rng.choice((3, 4)))]
        expression, value = _random_expression(rng, numbers)
        if value.denominator == 1 and 0 < value <= MAX_TARGET:
            break
    asked = ", ".join(map(str, numbers))
    prompt = (
        f"Use each of the numbers {asked} exactly once, with + - * / and parentheses, to make"
        f" {value}. Answer with the expression alone."
    )
    meta = {"numbers": tuple(numbers), "target": int(value)}
    return new_item("countdown", prompt, expression, meta)


def _random_expression(rng: random.Random, numbers: Sequence[int]) -> tuple[str, Fraction]:
    """Join two terms at a time until one is left."""
    terms = [(str(n), Fraction(n)) for n in rng.sample(list(numbers), len(numbers))]
    while len(terms) > 1:
        (a, x), (b, y) = terms.pop(), terms.pop()
        sign = rng.choice("+-*/" if y else "+-*")
        value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else x}[sign]
        text = f"{a} {sign} {b}"
        terms.append((f"({text})" if terms else text, value))
    return terms[0]


def verify_countdown(item: Item, text: str) -> bool:
    """Whether the last line, up to any `=`, uses each number once and is exactly the target."""
    lines = [line for line in text.strip().split("\n") if line.strip()]
    return bool(lines) and _reaches(item, lines[-1].split("=", 1)[0])


def _reaches(item: Item, expression: str) -> bool:
    found = compute(expression)
    if found is None:
        return False
    value, numbers = found
    return value == item.meta["target"] and Counter(numbers) == Counter(item.meta["numbers"])


def make_sudoku(rng: random.Random) -> Item:
    """A 4x4 Sudoku with exactly one solution."""
    while True:
        item = grids.make(rng)
        if item.meta["kind"] == "sudoku":
            break
    return _grid_item("sudoku-4x4", item, ", in every column and in each of the four 2x2 boxes")


def make_latin(rng: random.Random) -> Item:
    """A 4x4 Latin square with some cells given."""
    while True:
        item = grids.make(rng)
        if item.meta["kind"] == "latin":
            break
    return _grid_item("latin-4x4", item, " and in every column")


def _grid_item(name: str, item: Item, rule: str) -> Item:
    shown = grids.render(item.meta["givens"])
    prompt = (
        f"Fill every _ so that each of 1, 2, 3 and 4 is once in every row{rule}. Answer with the"
        f" four rows.\n{shown}"
    )
    return new_item(name, prompt, item.answer, item.meta)


def verify_grid(item: Item, text: str) -> bool:
    """Whether the last four rows of digits are a right completion."""
    found = GRID.findall(text)
    return bool(found) and grids.verify(item, found[-1].replace(" ", ""))


Line = list[str]


def _insert(rng: random.Random, line: Line, new: str) -> tuple[str, Line]:
    place = rng.randint(0, len(line))
    return f"Insert {new} at position {place + 1}", [*line[:place], new, *line[place:]]


def _remove(rng: random.Random, line: Line, new: str) -> tuple[str, Line]:
    place = rng.randrange(len(line))
    return f"Remove the person at position {place + 1}", line[:place] + line[place + 1 :]


def _replace(rng: random.Random, line: Line, new: str) -> tuple[str, Line]:
    place = rng.randrange(len(line))
    return (
        f"Replace the person at position {place + 1} with {new}",
        [*line[:place], new, *line[place + 1 :]],
    )


def _fixed(words: str, change: Callable[[Line], Line]) -> Callable[..., tuple[str, Line]]:
    return lambda rng, line, new: (words, change(line))


OPERATIONS: Mapping[str, Callable[[random.Random, Line, str], tuple[str, Line]]] = {
    "copy": _fixed("Copy the line", list),
    "reverse": _fixed("Reverse the line", lambda line: line[::-1]),
    "sort": _fixed("Sort the line by name", sorted),
    "insert": _insert,
    "remove": _remove,
    "replace": _replace,
    "shuffle": _fixed("Put the line into any other order", lambda line: [*line[1:], line[0]]),
    "insert-random": lambda r, line, new: (
        f"Insert {new} at any one position", _insert(r, line, new)[1]
    ),
    "remove-random": lambda r, line, new: ("Remove any one person", _remove(r, line, new)[1]),
    "replace-random": lambda r, line, new: (
        f"Replace any one person with {new}", _replace(r, line, new)[1]
    ),
}  # fmt: skip


def make_list(rng: random.Random) -> Item:
    """An operation on a line of three to six people; random ones have many answers."""
    operation = rng.choice(list(OPERATIONS))
    *line, new = rng.sample(NAMES, rng.randint(MIN_LINE, MAX_LINE) + 1)
    words, answer = OPERATIONS[operation](rng, line, new)
    prompt = f"{words}. Answer with the list alone.\n{_shown(line)}"
    meta = {"operation": operation, "line": tuple(line), "new": new, "answer": tuple(answer)}
    return new_item("list-operations", prompt, _shown(answer), meta)


def _shown(line: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in line) + "]"


def read_list(text: str) -> Line | None:
    """The last bracketed list of the text, quotes optional."""
    found = LIST.findall(text)
    return [part.strip().strip("\"'") for part in found[-1].split(",")] if found else None


def verify_list(item: Item, text: str) -> bool:
    """Whether the last list is the answer, or one of the answers of a random operation."""
    got = read_list(text)
    if got is None:
        return False
    line, new = list(item.meta["line"]), item.meta["new"]
    operation = item.meta["operation"]
    if operation == "shuffle":
        return got != line and sorted(got) == sorted(line)
    if operation == "insert-random":
        return got.count(new) == 1 and [name for name in got if name != new] == line
    if operation == "remove-random":
        return any(got == line[:i] + line[i + 1 :] for i in range(len(line)))
    if operation == "replace-random":
        return any(got == [*line[:i], new, *line[i + 1 :]] for i in range(len(line)))
    return got == list(item.meta["answer"])


PUZZLES: Mapping[str, Family] = {
    "countdown": Family("countdown", make_countdown, verify_countdown),
    "sudoku-4x4": Family("sudoku-4x4", make_sudoku, verify_grid),
    "latin-4x4": Family("latin-4x4", make_latin, verify_grid),
    "list-operations": Family("list-operations", make_list, verify_list),
}


def is_whole_answer(item: Item, text: str) -> bool:
    """Whether the text is a right answer and nothing else but white space."""
    stripped = text.strip()
    if item.family == "countdown":
        return "\n" not in stripped and "=" not in stripped and verify_countdown(item, text)
    form = LIST if item.family == "list-operations" else GRID
    return form.fullmatch(stripped) is not None and PUZZLES[item.family].verify(item, text)
