"""Registries: each sampler, cache, schedule and model family is a file that announces itself.

A registry scans its package (and the entry-point group of the same name, for plug-ins) the first
time it is asked. Import errors are never hidden: a broken file is an error that names it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from dlm_decode.errors import OptionError, UnknownNameError
from dlm_decode.options import OptionInfo, Options, build, describe_options

C = TypeVar("C", bound=type)
T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One registered class: its name, first docstring line, paper and options."""

    name: str
    summary: str
    paper: str
    options: tuple[OptionInfo, ...]
    cls: type

    @property
    def is_wrapper(self) -> bool:
        """Whether it works on another one, as `name+inner`."""
        return bool(getattr(self.cls, "is_wrapper", False))


class Registry(Generic[T]):
    """Names to classes of one `kind`, found in `package` and in the entry-point group `group`."""

    def __init__(self, kind: str, package: str, group: str) -> None:
        self.kind = kind
        self._package = package
        self._group = group
        self._classes: dict[str, type[T]] = {}
        self._scanned = False

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator: announce a class under `name`; a second one of that name is an error."""

        def announce(cls: C) -> C:
            known = self._classes.get(name)
            if known is not None and known.__qualname__ != cls.__qualname__:
                raise ValueError(f"two {self.kind}s are called {name!r}: {known} and {cls}")
            self._classes[name] = cls
            return cls

        return announce

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._scan()
        return sorted(self._classes)

    def get(self, name: str) -> type[T]:
        """The class called `name`; raises `UnknownNameError` with the nearest name and the list."""
        self._scan()
        if name in self._classes:
            return self._classes[name]
        near = get_close_matches(name, self._classes, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(self.names())
        raise UnknownNameError(f"unknown {self.kind} {name!r}{hint} (known: {known})")

    def name_of(self, thing: object) -> str:
        """The name an instance's class is registered under (its class name if it is not)."""
        self._scan()
        matches = [name for name, cls in self._classes.items() if type(thing) is cls]
        return matches[0] if matches else type(thing).__name__

    def create(self, name: str | T, options: Mapping[str, Any] | None = None) -> T:
        """An instance from a name and options; a ready instance passes through, without options."""
        if not isinstance(name, str):
            if options:
                given = ", ".join(sorted(options))
                raise OptionError(f"options {given} given beside a ready {self.kind} object")
            return name
        cls = self.get(name)
        if not issubclass(cls, Options):
            raise TypeError(f"{self.kind} {name!r} is not built from options")
        return build(cls, options or {})

    def entries(self) -> list[Entry]:
        """Descriptions of all registered classes, by name."""
        return [self._entry(name) for name in self.names()]

    def _entry(self, name: str) -> Entry:
        cls = self._classes[name]
        summary = (inspect.getdoc(cls) or "").split("\n", 1)[0]
        options = tuple(describe_options(cls)) if issubclass(cls, Options) else ()
        return Entry(name, summary, getattr(cls, "paper", ""), options, cls)

    def _scan(self) -> None:
        if self._scanned:
            return
        self._scanned = True
        try:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            for point in entry_points(group=self._group):
                point.load()
        except BaseException:
            self._scanned = False
            raise
