"""Options: what is accepted, how text is parsed, and what a refusal says."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest

from dlm_decode.errors import DlmDecodeError, OptionError
from dlm_decode.options import Options, build, describe_options, option
from dlm_decode.types import Draw


@dataclass(frozen=True)
class Example(Options):
    """A configuration with one field of each kind."""

    steps: int = option(8, "forwards", low=1, high=64)
    threshold: float = option(0.9, "least confidence", above=0, high=1)
    remask: bool = option(False, "mask again")
    rule: str | None = option(None, "rule", choices=(None, "low", "high"))
    limit: int | None = option(None, "at most this many", low=1)
    scale: float = option(1.0, "any number")
    internal: int = 3


def test_defaults_hold() -> None:
    example = Example()
    assert (example.steps, example.threshold, example.remask) == (8, 0.9, False)
    assert (example.rule, example.limit, example.internal) == (None, None, 3)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"steps": "16"}, 16),
        ({"steps": 16}, 16),
        ({"threshold": "0.5"}, 0.5),
        ({"threshold": "1e-3"}, 0.001),
        ({"threshold": 1}, 1.0),
        ({"threshold": "1"}, 1.0),
        ({"remask": "true"}, True),
        ({"remask": "Off"}, False),
        ({"remask": "1"}, True),
        ({"rule": "low"}, "low"),
        ({"rule": "none"}, None),
        ({"limit": "None"}, None),
        ({"limit": " 4 "}, 4),
    ],
)
def test_text_and_values_are_parsed_to_the_declared_type(
    values: dict[str, Any], expected: Any
) -> None:
    got = getattr(build(Example, values), next(iter(values)))
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "Example.steps must be >= 1 and <= 64, got 0"),
        ({"steps": "65"}, "Example.steps must be >= 1 and <= 64, got 65"),
        ({"steps": "2.5"}, "Example.steps must be int, got '2.5'"),
        ({"steps": 2.0}, "Example.steps must be int, got 2.0"),
        ({"steps": True}, "Example.steps must be int, got True"),
        ({"steps": "many"}, "Example.steps must be int, got 'many'"),
        ({"steps": None}, "Example.steps must be int, got None"),
        ({"threshold": 0}, "Example.threshold must be > 0 and <= 1, got 0.0"),
        ({"threshold": "nan"}, "Example.threshold must be > 0 and <= 1, got nan"),
        ({"threshold": "inf"}, "Example.threshold must be > 0 and <= 1, got inf"),
        ({"remask": "maybe"}, "Example.remask must be bool, got 'maybe'"),
        ({"remask": 2}, "Example.remask must be bool, got 2"),
        ({"rule": "middle"}, "Example.rule must be one of None, low, high, got 'middle'"),
        ({"limit": 0}, "Example.limit must be >= 1, got 0"),
        ({"limit": 2**31}, "Example.limit must fit a 32-bit number, got 2147483648"),
        ({"threshold": 1e-300}, "Example.threshold must fit a 32-bit number, got 1e-300"),
        ({"scale": 1e39}, "Example.scale must fit a 32-bit number, got 1e+39"),
        ({"scale": "nan"}, "Example.scale must fit a 32-bit number, got nan"),
        ({"limit": "9" * 5000}, "Example.limit must be int or none, got '" + "9" * 56 + "..."),
    ],
)
def test_a_refused_value_names_field_constraint_and_value(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        build(Example, values)
    assert str(caught.value) == message
    assert isinstance(caught.value, DlmDecodeError)


@pytest.mark.parametrize("value", [math.inf, -math.inf, "inf", 10**400, 0.0, 2.0**-126, 3.4e38])
def test_infinity_and_all_that_fp32_holds_are_numbers(value: Any) -> None:
    assert build(Example, {"scale": value}).scale == (
        math.inf if value == 10**400 else float(value)
    )


def test_the_constructor_checks_like_build() -> None:
    with pytest.raises(OptionError, match=r"Example\.steps"):
        Example(steps=0)


def test_replace_checks_again() -> None:
    with pytest.raises(OptionError, match=r"Draw.top_p must be > 0 and <= 1, got 0.0"):
        dataclasses.replace(Draw(), top_p=0)


def test_an_unknown_option_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(OptionError) as caught:
        build(Example, {"treshold": 0.5})
    assert str(caught.value) == (
        "unknown option 'treshold' for Example; did you mean 'threshold'?"
        " (options: limit, remask, rule, scale, steps, threshold)"
    )


def test_undeclared_fields_are_no_options() -> None:
    with pytest.raises(OptionError, match="unknown option 'internal'"):
        build(Example, {"internal": 4})


def test_a_configuration_without_options_says_none() -> None:
    @dataclass(frozen=True)
    class Bare(Options):
        """Nothing to choose."""

    with pytest.raises(OptionError, match=r"for Bare \(options: none\)"):
        build(Bare, {"steps": 1})


def test_options_are_described_in_order_with_type_default_and_range() -> None:
    described = [(i.name, i.type, i.default, i.allowed) for i in describe_options(Example)]
    assert described == [
        ("steps", "int", 8, ">= 1 and <= 64"),
        ("threshold", "float", 0.9, "> 0 and <= 1"),
        ("remask", "bool", False, ""),
        ("rule", "str or none", None, "one of None, low, high"),
        ("limit", "int or none", None, ">= 1"),
        ("scale", "float", 1.0, ""),
    ]
    assert all(info.help for info in describe_options(Example))


def test_configurations_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Example().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("draw", "filters", "raw"),
    [
        (Draw(), False, True),
        (Draw(temperature=1), False, True),
        (Draw(temperature=0.5), False, False),
        (Draw(top_k=5), True, False),
        (Draw(top_p=0.9), True, False),
        (Draw(top_p=1), False, True),
    ],
)
def test_draw_knows_whether_it_changes_the_models_law(draw: Draw, filters: bool, raw: bool) -> None:
    assert (draw.filters, draw.is_raw) == (filters, raw)
