"""Word problems of one to four steps; the answer is one equation a line, then `#### N`.

Later equations use earlier results, and a two-digit result is two tokens that belong together: what
parallel decoding gets wrong first.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from dlm_decode.tasks.items import Family, Item, new_item

NAME = "mini-gsm8k"
NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jo", "Kim", "Leo")
OBJECTS = (
    "apples", "books", "cards", "coins", "eggs", "hats", "keys", "pens", "shells", "stamps",
    "toys", "nuts",
)  # fmt: skip
CONTAINERS = ("bags", "boxes", "packs")
MAX_VALUE = 99
MAX_EQUATIONS = 6

Step = Callable[[random.Random, str, str, int], tuple[str, list[str], int]]
"""`(rng, name, objects, have) -> (sentence, equations, have after)`."""


def _buys(rng: random.Random, name: str, objects: str, have: int) -> tuple[str, list[str], int]:
    n = rng.randint(2, 15)
    return f"{name} buys {n} more.", [f"{have}+{n}={have + n}"], have + n


def _gives(rng: random.Random, name: str, objects: str, have: int) -> tuple[str, list[str], int]:
    n = rng.randint(1, min(have - 1, 15))
    friend = rng.choice([other for other in NAMES if other != name])
    return f"{name} gives {n} to {friend}.", [f"{have}-{n}={have - n}"], have - n


def _finds_containers(
    rng: random.Random, name: str, objects: str, have: int
) -> tuple[str, list[str], int]:
    many, each = rng.randint(2, 6), rng.randint(2, 9)
    total = have + many * each
    sentence = f"{name} finds {many} {rng.choice(CONTAINERS)} of {each} {objects}."
    return sentence, [f"{many}*{each}={many * each}", f"{have}+{many * each}={total}"], total


def _doubles(rng: random.Random, name: str, objects: str, have: int) -> tuple[str, list[str], int]:
    factor, verb = rng.choice([(2, "doubles"), (3, "triples")])
    return f"Then the number {verb}.", [f"{have}*{factor}={have * factor}"], have * factor


STEPS: tuple[Step, ...] = (_buys, _gives, _finds_containers, _doubles)


def make(rng: random.Random) -> Item:
    """A start and one to four steps, no value above `MAX_VALUE`, at most `MAX_EQUATIONS` lines."""
    while True:
        name, objects, have = rng.choice(NAMES), rng.choice(OBJECTS), rng.randint(2, 20)
        sentences, equations = [f"{name} has {have} {objects}."], []
        largest = have
        k = rng.choices((1, 2, 3, 4), (2, 3, 3, 2))[0]
        for step in rng.choices(STEPS, (3, 3, 2, 2), k=k):
            sentence, new_equations, have = step(rng, name, objects, have)
            sentences.append(sentence)
            equations += new_equations
            largest = max(largest, have)
            if have < 2:
                break
        if largest <= MAX_VALUE and len(equations) <= MAX_EQUATIONS and have >= 2:
            sentences.append(f"How many {objects} does {name} have?")
            return new_item(
                NAME, " ".join(sentences), "\n".join([*equations, f"#### {have}"]), {"result": have}
            )


_EQUATION = re.compile(r"(\d{1,6})([-+*])(\d{1,6})=(\d{1,6})")
_RESULT = re.compile(r"#### (\d{1,6})")


def _holds(line: str) -> bool:
    match = _EQUATION.fullmatch(line)
    if match is None:
        return False
    left, sign, right, result = int(match[1]), match[2], int(match[3]), int(match[4])
    return {"+": left + right, "-": left - right, "*": left * right}[sign] == result


def verify(item: Item, text: str) -> bool:
    """Whether every line but the last is a true equation and the last is `#### ` and the right
    number.
    """
    *equations, last = text.strip().split("\n")
    match = _RESULT.fullmatch(last)
    return (
        match is not None and int(match[1]) == item.meta["result"] and all(map(_holds, equations))
    )


FAMILY = Family(NAME, make, verify)
