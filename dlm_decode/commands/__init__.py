"""Subcommands of `dlm-decode`, one file each, found by scanning this package.

A command module's first docstring line is its help text; it has `add_arguments(parser)` and
`run(args)`, which returns the exit status. Modules import torch inside `run` only, so that
`--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from typing import Protocol, cast


class Command(Protocol):
    """What a command module offers."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def commands() -> dict[str, Command]:
    """All command modules by name; `_` in a file name is `-` on the command line."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name.replace("_", "-"): _load(name) for name in names}


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"{__name__}.{name}"))
