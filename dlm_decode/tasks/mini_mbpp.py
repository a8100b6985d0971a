"""Write a short Python function; the answer is run against asserts in a separate process.

The answer's variable names are drawn at random and must agree with themselves: a dependence between
distant tokens that parallel decoding has to respect.
"""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlm_decode.tasks.items import Family, Item, new_item

NAME = "mini-mbpp"
ACCUMULATORS = ("total", "result", "out")
ELEMENTS = ("x", "v", "n")
TIMEOUT_S = 5.0
CPU_LIMIT_S = 2
MAX_BYTES = 512 << 20
MAX_CHARACTERS = 2000
MAX_CONSTANT = 20


@dataclass(frozen=True, slots=True)
class _Phrase:
    """English, Python over the element `e`, and the same as a function."""

    words: str
    code: str
    apply: Callable[[int], int]


def _conditions(rng: random.Random) -> _Phrase:
    n = rng.randint(2, MAX_CONSTANT)
    return rng.choice(
        [
            _Phrase("numbers", "", lambda x: True),
            _Phrase("even numbers", "{e} % 2 == 0", lambda x: x % 2 == 0),
            _Phrase("odd numbers", "{e} % 2 == 1", lambda x: x % 2 == 1),
            _Phrase("positive numbers", "{e} > 0", lambda x: x > 0),
            _Phrase("negative numbers", "{e} < 0", lambda x: x < 0),
            _Phrase(f"numbers above {n}", f"{{e}} > {n}", lambda x: x > n),
            _Phrase(f"numbers below {n}", f"{{e}} < {n}", lambda x: x < n),
            _Phrase(f"multiples of {n}", f"{{e}} % {n} == 0", lambda x: x % n == 0),
        ]
    )


def _transforms(rng: random.Random) -> _Phrase:
    n = rng.randint(2, MAX_CONSTANT)
    return rng.choice(
        [
            _Phrase("", "{e}", lambda x: x),
            _Phrase("squared", "{e} * {e}", lambda x: x * x),
            _Phrase(f"plus {n}", f"{{e}} + {n}", lambda x: x + n),
            _Phrase(f"minus {n}", f"{{e}} - {n}", lambda x: x - n),
            _Phrase(f"times {n}", f"{{e}} * {n}", lambda x: x * n),
        ]
    )


def make(rng: random.Random) -> Item:
    """Sum, count or list of the (condition) numbers, each transformed; a `for` loop with an
    accumulator.
    """
    condition, transform = _conditions(rng), _transforms(rng)
    goal = rng.choice(["sum", "list", "count"])
    if goal == "count":
        transform = _Phrase("", "1", lambda x: 1)
    words = " ".join(filter(None, [condition.words, transform.words]))
    prompt = f"Write a function f(xs) to return the {goal} of the {words}."
    answer = _program(rng, goal, condition.code, transform.code)
    tests = tuple((xs, _expected(goal, condition, transform, xs)) for xs in _inputs(rng))
    return new_item(NAME, prompt, answer, {"tests": tests})


def _program(rng: random.Random, goal: str, condition: str, value: str) -> str:
    acc, element = rng.choice(ACCUMULATORS), rng.choice(ELEMENTS)
    start = "[]" if goal == "list" else "0"
    update = f"{acc}.append({value})" if goal == "list" else f"{acc} += {value}"
    body = f"        if {condition}:\n            {update}" if condition else f"        {update}"
    template = f"def f(xs):\n    {acc} = {start}\n    for {{e}} in xs:\n{body}\n    return {acc}"
    return template.replace("{e}", element)


def _inputs(rng: random.Random) -> list[tuple[int, ...]]:
    spread = tuple(range(-12, 22))
    return [(), spread, *(tuple(rng.choices(spread, k=6)) for _ in range(3))]


def _expected(
    goal: str, condition: _Phrase, transform: _Phrase, xs: Sequence[int]
) -> int | tuple[int, ...]:
    kept = tuple(transform.apply(x) for x in xs if condition.apply(x))
    return kept if goal == "list" else sum(kept)


_ALLOWED_NODES = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Assign, ast.AugAssign, ast.For,
    ast.If, ast.Return, ast.Expr, ast.Compare, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp,
    ast.Name, ast.Constant, ast.List, ast.ListComp, ast.comprehension, ast.Call, ast.Attribute,
    ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_ALLOWED_CALLS = frozenset({"sum", "len", "max", "min", "sorted", "abs", "range"})
_FORBIDDEN_OPERATORS = (ast.Pow, ast.LShift, ast.RShift, ast.MatMult)


def is_safe(source: str) -> bool:
    """Whether `source` is one plain function `f` made of whitelisted syntax: no imports, no
    attributes but `append`.
    """
    if len(source) > MAX_CHARACTERS:
        return False
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    one_function = (
        len(tree.body) == 1
        and isinstance(tree.body[0], ast.FunctionDef)
        and tree.body[0].name == "f"
    )
    return one_function and all(map(_is_allowed, ast.walk(tree)))


def _is_allowed(node: ast.AST) -> bool:
    if not isinstance(node, _ALLOWED_NODES) or isinstance(node, _FORBIDDEN_OPERATORS):
        return False
    if isinstance(node, ast.FunctionDef):
        return not node.decorator_list and node.returns is None and not node.args.defaults
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, bool)
    if isinstance(node, ast.Attribute):
        return node.attr == "append"
    if isinstance(node, ast.Name):
        return not node.id.startswith("_")
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) or (
            isinstance(node.func, ast.Name) and node.func.id in _ALLOWED_CALLS
        )
    return True


def _checked_program(
    source: str, tests: Sequence[tuple[Sequence[int], int | Sequence[int]]]
) -> str:
    """The candidate followed by limits-first asserts; printing the last line proves that all of
    them passed.
    """
    limits = {"RLIMIT_CPU": CPU_LIMIT_S, "RLIMIT_AS": MAX_BYTES, "RLIMIT_FSIZE": 0}
    preamble = [
        "import resource",
        *(f"resource.setrlimit(resource.{name}, ({n}, {n}))" for name, n in limits.items()),
        "del resource",
    ]
    asserts = [f"assert f({list(xs)!r}) == {_literal(expected)}" for xs, expected in tests]
    return "\n".join([*preamble, source, *asserts, "print('passed')"])


def _literal(value: int | Sequence[int]) -> str:
    return repr(value if isinstance(value, int) else list(value))


def verify(item: Item, text: str) -> bool:
    """Whether `text` is a safe function that passes every assert of the item within the limits.

    The syntax is checked first; then a fresh isolated interpreter (`python -I`) runs it with limits
    on CPU, memory and file size.
    """
    source = text.strip()
    if not is_safe(source):
        return False
    program = _checked_program(source, item.meta["tests"])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            capture_output=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout == b"passed\n"


FAMILY = Family(NAME, make, verify)
