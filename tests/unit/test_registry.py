"""Registries: files announce themselves, names are suggested, and no broken file is hidden."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from dlm_decode import registry as registry_module
from dlm_decode.caches import CACHES
from dlm_decode.errors import DlmDecodeError, OptionError, UnknownNameError
from dlm_decode.models import FAMILIES
from dlm_decode.options import Options, option
from dlm_decode.registry import Registry
from dlm_decode.samplers import SAMPLERS
from dlm_decode.schedules import SCHEDULES

ALL: list[Registry[Any]] = [SAMPLERS, CACHES, SCHEDULES, FAMILIES]


@dataclass(frozen=True)
class Base(Options):
    """Base of the test's things."""


@dataclass(frozen=True)
class Steady(Base):
    """Always the same.

    More about it.
    """

    paper = "Steadiness, arXiv:0000.00000"
    rate: float = option(0.5, "how fast", above=0)


MakePackage = Callable[[dict[str, str]], Registry[Base]]


@pytest.fixture
def make_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePackage:
    """A registry over a package of the given files, which is gone after the test."""
    name = "registry_test_package"

    def make(files: dict[str, str]) -> Registry[Base]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        for file, text in files.items():
            (folder / file).write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return Registry("thing", name, "dlm_decode.no_such_group")

    yield make  # type: ignore[misc]
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]


def test_a_file_in_the_package_is_found_without_an_edit_elsewhere(
    make_package: MakePackage,
) -> None:
    things = make_package({"one.py": ""})
    things.register("steady")(Steady)
    assert things.names() == ["steady"]
    assert "registry_test_package.one" in sys.modules


def test_a_broken_file_is_an_error_each_time_not_a_missing_name(
    make_package: MakePackage,
) -> None:
    things = make_package({"broken.py": "import no_such_module_at_all\n"})
    things.register("steady")(Steady)
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
            things.get("steady")


def test_a_mended_file_is_found_after_an_error(make_package: MakePackage) -> None:
    things = make_package({"broken.py": "raise RuntimeError('half-written')\n"})
    with pytest.raises(RuntimeError, match="half-written"):
        things.names()
    make_package({"broken.py": ""})
    assert things.names() == []


def test_plug_ins_are_loaded_from_entry_points(
    make_package: MakePackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    things = make_package({})

    class Point:
        def load(self) -> None:
            things.register("outside")(Steady)

    monkeypatch.setattr(registry_module, "entry_points", lambda group: [Point()])
    assert things.names() == ["outside"]


def test_a_broken_plug_in_is_not_hidden(
    make_package: MakePackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = EntryPoint("gone", "no_such_plug_in:Thing", "dlm_decode.things")
    monkeypatch.setattr(registry_module, "entry_points", lambda group: [point])
    with pytest.raises(ModuleNotFoundError, match="no_such_plug_in"):
        make_package({}).names()


@pytest.fixture
def things(make_package: MakePackage) -> Registry[Base]:
    made = make_package({})
    made.register("steady")(Steady)
    made.register("plain")(Base)
    return made


def test_an_unknown_name_suggests_the_nearest_and_lists_all(things: Registry[Base]) -> None:
    with pytest.raises(UnknownNameError) as caught:
        things.get("stedy")
    assert str(caught.value) == (
        "unknown thing 'stedy'; did you mean 'steady'? (known: plain, steady)"
    )
    assert isinstance(caught.value, DlmDecodeError)
    with pytest.raises(UnknownNameError, match=r"unknown thing 'x' \(known: plain, steady\)"):
        things.get("x")


def test_two_classes_of_one_name_are_refused(things: Registry[Base]) -> None:
    with pytest.raises(ValueError, match="two things are called 'steady'"):
        things.register("steady")(Base)
    assert things.get("steady") is Steady


def test_announcing_a_class_again_is_no_error(things: Registry[Base]) -> None:
    """A reloaded module announces its classes a second time."""
    assert things.register("steady")(Steady) is Steady


def test_create_builds_from_options_and_passes_instances_through(things: Registry[Base]) -> None:
    made = things.create("steady", {"rate": "0.25"})
    assert made == Steady(rate=0.25)
    assert things.create(made) is made
    with pytest.raises(OptionError, match="options rate given beside a ready thing object"):
        things.create(made, {"rate": 1})


def test_create_refuses_classes_that_have_no_options(things: Registry[Any]) -> None:
    things.register("raw")(int)
    with pytest.raises(TypeError, match="thing 'raw' is not built from options"):
        things.create("raw")


def test_name_of_an_instance(things: Registry[Base]) -> None:
    assert things.name_of(Steady()) == "steady"
    assert things.name_of(3) == "int"


def test_entries_describe_what_is_registered(things: Registry[Base]) -> None:
    plain, steady = things.entries()
    assert (plain.name, plain.paper, plain.options) == ("plain", "", ())
    assert (steady.summary, steady.paper) == ("Always the same.", "Steadiness, arXiv:0000.00000")
    assert [info.name for info in steady.options] == ["rate"]


@pytest.mark.parametrize("registry", ALL, ids=lambda r: r.kind)
def test_every_entry_has_a_summary_and_documented_options(registry: Registry[Any]) -> None:
    assert registry.entries()
    for entry in registry.entries():
        assert entry.summary.endswith("."), f"{entry.name}: first docstring line is no sentence"
        assert all(info.help for info in entry.options), entry.name


@pytest.mark.parametrize("registry", [SAMPLERS, CACHES, SCHEDULES], ids=lambda r: r.kind)
def test_every_entry_can_be_built_from_its_printed_defaults(registry: Registry[Any]) -> None:
    """What `dlm-decode list` prints as KEY=VALUE can be given back to it."""
    for entry in registry.entries():
        given = {info.name: str(info.default) for info in entry.options}
        assert registry.create(entry.name, given) == registry.create(entry.name), entry.name


@pytest.mark.parametrize("registry", [SAMPLERS, CACHES, SCHEDULES], ids=lambda r: r.kind)
def test_a_file_is_named_after_what_it_registers(registry: Registry[Any]) -> None:
    for entry in registry.entries():
        assert entry.cls.__module__.rsplit(".", 1)[1] == entry.name
