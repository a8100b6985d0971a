"""Arithmetic in model output, parsed and computed exactly; nothing is ever evaluated as Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

MAX_CHARACTERS = 200
OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def compute(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression of whole numbers, `+ - * /` and parentheses, and its numbers.

    None for anything else, and for a division by zero.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    numbers: list[int] = []
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    raise ValueError(f"not plain arithmetic: {type(node).__name__}")


def is_true_equation(text: str) -> bool:
    """Whether `text` is `expression=expression` with equal values."""
    sides = [compute(side) for side in text.split("=")]
    return len(sides) == 2 and None not in sides and sides[0][0] == sides[1][0]  # type: ignore[index]
