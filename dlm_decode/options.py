"""Options of samplers, caches and schedules: dataclass fields with a help text and a checked range.

A configuration is a frozen dataclass that derives from `Options`; its fields are declared with
`option`. The same declaration checks values in Python, parses `--set KEY=VALUE` and fills the
tables of the README.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Container, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar

from dlm_decode.errors import OptionError

T = TypeVar("T", bound="Options")

_FP32_LEAST, _FP32_MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The least and the greatest positive normal number of fp32."""


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[Any, ...] | None = None,
    only: Mapping[str, Container[Any]] = MappingProxyType({}),
) -> Any:
    """Declare a field: `low`/`high` are inclusive bounds, `above` an exclusive lower one.

    An option that some values of others leave without effect tells `only` with which it has one.
    """
    bounds = {"low": low, "high": high, "above": above, "choices": choices}
    metadata = {"help": help, "only": only, **bounds}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """What is known of one option: for messages, `dlm-decode list` and the README."""

    name: str
    type: str
    default: Any
    help: str
    allowed: str


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of all configurations: checks each declared field when an instance is made.

    Raises `OptionError` naming the field, the constraint and the value.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            if "help" in field.metadata:
                value = _coerced(field, hints[field.name], getattr(self, field.name), type(self))
                object.__setattr__(self, field.name, value)


def describe_options(config: type[Options]) -> list[OptionInfo]:
    """The declared options of a configuration class, in order."""
    hints = typing.get_type_hints(config)
    return [
        OptionInfo(f.name, _type_name(hints[f.name]), f.default, f.metadata["help"], _allowed(f))
        for f in dataclasses.fields(config)
        if "help" in f.metadata
    ]


def acts(config: type[Options], name: str) -> bool:
    """Whether a configuration has an option that has an effect while all others are the default."""
    fields = {f.name: f for f in dataclasses.fields(config) if "help" in f.metadata}
    if name not in fields:
        return False
    return all(
        fields[other].default in values for other, values in fields[name].metadata["only"].items()
    )


def build(config: type[T], values: Mapping[str, Any]) -> T:
    """Make a `config` from `values`; strings are parsed, unknown keys are refused."""
    known = {f.name for f in dataclasses.fields(config) if "help" in f.metadata}
    for key in values:
        if key not in known:
            raise OptionError(unknown_option_message(key, known, config.__name__))
    return config(**values)


def unknown_option_message(key: str, known: typing.Iterable[str], owner: str) -> str:
    names = sorted(known)
    near = get_close_matches(key, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown option {key!r} for {owner}{hint} (options: {', '.join(names) or 'none'})"


def _coerced(field: dataclasses.Field[Any], hint: Any, value: Any, owner: type) -> Any:
    kinds = _kinds(hint)
    where = f"{owner.__name__}.{field.name}"
    parsed = _parse(value, kinds) if isinstance(value, str) else value
    if isinstance(parsed, int) and not isinstance(parsed, bool) and float in kinds:
        parsed = _as_float(parsed)
    primitive = [k for k in kinds if k in (bool, int, float, str, type(None), tuple)]
    if len(primitive) == len(kinds) and type(parsed) not in kinds:
        raise OptionError(f"{where} must be {_type_name(hint)}, got {_shown(value)}")
    if parsed is not None:
        _check_range(field, parsed, where)
    return parsed


def _as_float(value: int) -> float:
    """`value` as a float, infinite where it is beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _check_range(field: dataclasses.Field[Any], value: Any, where: str) -> None:
    m = field.metadata
    bad_choice = m["choices"] is not None and value not in m["choices"]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    bad_range = number and not (
        (m["low"] is None or value >= m["low"])
        and (m["high"] is None or value <= m["high"])
        and (m["above"] is None or value > m["above"])
    )
    if bad_choice or bad_range:
        raise OptionError(f"{where} must be {_allowed(field)}, got {_shown(value)}")
    bounded = isinstance(value, int) and None not in (m["low"], m["high"])
    if number and not bounded and not _fits(value):
        raise OptionError(f"{where} must fit a 32-bit number, got {_shown(value)}")


def _fits(value: float) -> bool:
    """Whether tensors can hold `value`: a 32-bit integer, or a float that fp32 keeps apart from 0
    and infinity. Infinity itself is a value of its own, such as a threshold never reached."""
    if isinstance(value, int):
        return -(2**31) <= value < 2**31
    return value in (0.0, math.inf, -math.inf) or _FP32_LEAST <= abs(value) <= _FP32_MOST


def _shown(value: Any) -> str:
    """`value` as a message quotes it: not longer than a line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _allowed(field: dataclasses.Field[Any]) -> str:
    m = field.metadata
    if m.get("choices"):
        return "one of " + ", ".join(map(str, m["choices"]))
    parts = [f">= {m['low']}"] if m["low"] is not None else []
    parts += [f"> {m['above']}"] if m["above"] is not None else []
    parts += [f"<= {m['high']}"] if m["high"] is not None else []
    return " and ".join(parts)


def _kinds(hint: Any) -> tuple[Any, ...]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(k for arg in typing.get_args(hint) for k in _kinds(arg))
    return (origin or hint,)


def _parse(text: str, kinds: tuple[Any, ...]) -> Any:
    """The value that `text` denotes among `kinds`; unparseable text is returned as it is."""
    lowered = text.strip().lower()
    if type(None) in kinds and lowered in ("none", "null", ""):
        return None
    if bool in kinds and lowered in ("true", "false", "yes", "no", "on", "off", "1", "0"):
        return lowered in ("true", "yes", "on", "1")
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _type_name(hint: Any) -> str:
    names = ("none" if k is type(None) else getattr(k, "__name__", str(k)) for k in _kinds(hint))
    return " or ".join(names)
