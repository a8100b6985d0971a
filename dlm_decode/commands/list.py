"""List samplers, caches, schedules or model families, with their options and papers."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm_decode.options import OptionInfo
    from dlm_decode.registry import Entry, Registry

KINDS = ("samplers", "caches", "schedules", "models")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="what to list")
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> int:
    entries = registry(args.kind).entries()
    if args.json:
        print(json.dumps([_as_dict(entry) for entry in entries], indent=2, default=str))
        return 0
    print("\n\n".join(_as_text(entry) for entry in entries))
    if args.kind == "samplers":
        print(f"\nEvery sampler takes these too:\n{_draw_text()}")
    return 0


def registry(kind: str) -> Registry[Any]:
    """The registry of one of `KINDS`."""
    if kind == "samplers":
        from dlm_decode.samplers import SAMPLERS

        return SAMPLERS
    if kind == "caches":
        from dlm_decode.caches import CACHES

        return CACHES
    if kind == "schedules":
        from dlm_decode.schedules import SCHEDULES

        return SCHEDULES
    from dlm_decode.models import FAMILIES

    return FAMILIES


def _as_dict(entry: Entry) -> dict[str, Any]:
    options = [vars(info) for info in entry.options]
    described = {"name": entry.name, "summary": entry.summary, "paper": entry.paper}
    return described | {"wrapper": entry.is_wrapper, "options": options}


def _as_text(entry: Entry) -> str:
    lines = [f"{entry.name}: {entry.summary}"]
    lines += [f"  wraps another sampler: {entry.name}+NAME"] if entry.is_wrapper else []
    lines += [f"  paper: {entry.paper}"] if entry.paper else []
    return "\n".join(lines + _option_lines(entry.options))


def _draw_text() -> str:
    from dlm_decode.options import describe_options
    from dlm_decode.types import Draw

    return "\n".join(_option_lines(describe_options(Draw)))


def _option_lines(options: Iterable[OptionInfo]) -> list[str]:
    return [line for info in options for line in _option_text(info)]


def _option_text(info: OptionInfo) -> list[str]:
    default = "none" if info.default is None else info.default
    allowed = f", {info.allowed}" if info.allowed else ""
    head = f"  --set {info.name}={default}  ({info.type}{allowed})"
    return [
        head,
        *textwrap.wrap(info.help, 92, initial_indent="      ", subsequent_indent="      "),
    ]
