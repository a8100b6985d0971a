"""4x4 grids to complete: Sudoku with one solution, Latin squares with many.

A Latin square from a few givens is ambiguous: its cells depend on each other through rows and
columns, so that filling several at once from their marginals breaks a constraint. A Sudoku has one
solution, found by elimination.
"""

from __future__ import annotations

import itertools
import random

from dlm_decode.tasks.items import Family, Item, new_item

NAME = "grids"
SIDE = 4
BLANK = "_"
SUDOKU_BLANKS = (4, 8)
"""Fewest and most blanks of a Sudoku."""
LATIN_GIVENS = (4, 8)
"""Fewest and most givens of a Latin square."""

Grid = tuple[int, ...]
"""16 digits from 1 to 4, row by row; 0 is a blank."""


def _lines(sudoku: bool) -> list[tuple[int, ...]]:
    """Index sets that must each hold 1 to 4 once: rows, columns and, for Sudoku, the four 2x2
    boxes.
    """
    rows = [tuple(range(SIDE * r, SIDE * r + SIDE)) for r in range(SIDE)]
    columns = [tuple(range(c, SIDE * SIDE, SIDE)) for c in range(SIDE)]
    boxes = [(c, c + 1, c + SIDE, c + SIDE + 1) for c in (0, 2, 8, 10)]
    return rows + columns + (boxes if sudoku else [])


_LATIN_LINES, _SUDOKU_LINES = _lines(False), _lines(True)


def is_complete(grid: Grid, *, sudoku: bool) -> bool:
    """Whether every row, column (and box) holds 1, 2, 3 and 4."""
    wanted = set(range(1, SIDE + 1))
    return all(
        {grid[i] for i in line} == wanted for line in (_SUDOKU_LINES if sudoku else _LATIN_LINES)
    )


def _all_squares() -> tuple[Grid, ...]:
    """All 576 Latin squares of order 4."""
    rows = list(itertools.permutations(range(1, SIDE + 1)))
    clash_free = {
        row: [r for r in rows if all(a != b for a, b in zip(row, r, strict=True))] for row in rows
    }
    return tuple(
        a + b + c + d
        for a in rows
        for b in clash_free[a]
        for c in clash_free[a]
        for d in clash_free[a]
        if is_complete(a + b + c + d, sudoku=False)
    )


LATIN_SQUARES = _all_squares()
SUDOKUS = tuple(grid for grid in LATIN_SQUARES if is_complete(grid, sudoku=True))


def render(grid: Grid) -> str:
    """Four lines of four digits; blanks as `_`."""
    cells = [str(digit) if digit else BLANK for digit in grid]
    return "\n".join("".join(cells[SIDE * r : SIDE * r + SIDE]) for r in range(SIDE))


def parse(text: str) -> Grid | None:
    """The grid that `render` wrote as `text`, or None for anything else or a grid with blanks."""
    rows = text.strip().split("\n")
    if len(rows) != SIDE or any(len(row) != SIDE or not set(row) <= set("1234") for row in rows):
        return None
    return tuple(int(cell) for row in rows for cell in row)


def _with_blanks(rng: random.Random, grid: Grid, blanks: int) -> Grid:
    hidden = set(rng.sample(range(SIDE * SIDE), blanks))
    return tuple(0 if i in hidden else digit for i, digit in enumerate(grid))


def _agrees(grid: Grid, givens: Grid) -> bool:
    return all(given in (0, digit) for digit, given in zip(grid, givens, strict=True))


def make(rng: random.Random) -> Item:
    """A Sudoku with one solution, or a Latin square whose answer is drawn uniformly from all
    completions.
    """
    if rng.random() < 0.5:
        while True:
            grid = rng.choice(SUDOKUS)
            givens = _with_blanks(rng, grid, rng.randint(*SUDOKU_BLANKS))
            if sum(_agrees(other, givens) for other in SUDOKUS) == 1:
                return _item("sudoku", givens, grid)
    grid = rng.choice(LATIN_SQUARES)
    return _item("latin", _with_blanks(rng, grid, SIDE * SIDE - rng.randint(*LATIN_GIVENS)), grid)


def _item(kind: str, givens: Grid, grid: Grid) -> Item:
    ask = "Solve the sudoku" if kind == "sudoku" else "Complete the square"
    return new_item(
        NAME, f"{ask}\n{render(givens)}", render(grid), {"kind": kind, "givens": givens}
    )


def verify(item: Item, text: str) -> bool:
    """Whether `text` is a complete grid of the item's kind that keeps every given."""
    grid = parse(text)
    sudoku = item.meta["kind"] == "sudoku"
    return (
        grid is not None and _agrees(grid, item.meta["givens"]) and is_complete(grid, sudoku=sudoku)
    )


FAMILY = Family(NAME, make, verify)
