"""Final answers of word problems, extracted in three ways that are reported side by side.

`strict` and `flexible` are lm-evaluation-harness's filters of task gsm8k (version 3), reproduced
with their quirks: "18.00" is not 18, a trailing full stop is forgiven. `numeric` compares values.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

INVALID = "[invalid]"
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
STRICT_COT = re.compile(r"The answer is (\-?[0-9\.\,]+).")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
MARKED = re.compile(r"####\s*([^\n]*)")
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
UNITS = " \t\n$€£%."


def strict(text: str, pattern: re.Pattern[str] = STRICT) -> str:
    """The first number after the marker that the protocol's examples use, or `INVALID`."""
    found = pattern.findall(text)
    return found[0].strip() if found else INVALID


def flexible(text: str) -> str:
    """The last thing that looks like a number, or `INVALID`."""
    found = FLEXIBLE.findall(text)
    return next((group.strip() for group in found[-1] if group), INVALID) if found else INVALID


def is_exact_match(answer: str, gold: str) -> bool:
    """lm-eval's `exact_match` with the task's ignored patterns and without regard to case."""
    return _plain(answer) == _plain(gold)


def _plain(text: str) -> str:
    for pattern in IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def numeric(text: str) -> Decimal | None:
    r"""The value of the last `\boxed{}`, else of the last `####` line, else the last number."""
    for pattern in (BOXED, MARKED):
        found = pattern.findall(text)
        if found:
            return _value(found[-1])
    numbers = NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def _value(text: str) -> Decimal | None:
    """The number that `text` is, without thousands commas, currency and percent signs."""
    bare = text.replace(",", "").replace("$", "").strip(UNITS)
    try:
        value = Decimal(bare) if bare.isascii() else None
    except InvalidOperation:
        found = NUMBER.findall(bare)
        value = Decimal(found[-1].replace("$", "")) if found else None
    return value if value is not None and value.is_finite() else None


def gold_number(answer: str) -> str:
    """The number after the last `#### ` of a reference solution."""
    return answer.rpartition("####")[2].strip()
