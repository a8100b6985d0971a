"""A built wheel holds what the tree holds, and works beside a user's own `models` package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
LINKED = ("samplers", "models")
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])('dist'))"
IGNORED = shutil.ignore_patterns(
    ".*_cache",
    ".git",
    ".venv",
    ".hypothesis",
    ".coverage*",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
)


def in_tree(root: Path) -> set[str]:
    """The files a wheel must hold, by their path in it."""
    files = {
        f"dlm_decode/{p.relative_to(root)}" for name in LINKED for p in (root / name).glob("*.py")
    }
    package = root / "dlm_decode"
    data = [*(package / "assets").rglob("*"), *package.glob("eval/protocols/*.json")]
    for path in [*package.rglob("*.py"), *data, package / "py.typed"]:
        if path.is_file() and path.relative_to(package).parts[0] not in LINKED:
            files.add(path.relative_to(root).as_posix())
    return {file for file in files if "__pycache__" not in file}


def in_wheel(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name}


def run(*args: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    result = subprocess.run(
        args, cwd=cwd, capture_output=True, text=True, env={**os.environ, **(env or {})}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(kind: str, tree: Path) -> Path:
    """Build "wheel" or "sdist" in `tree` with the installed setuptools."""
    out = run(sys.executable, "-c", BUILD, f"build_{kind}", cwd=tree)
    return tree / "dist" / out.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree, so that building leaves nothing in it."""
    copy = tmp_path_factory.mktemp("tree") / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=IGNORED)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build("wheel", tree)


def test_the_wheel_holds_exactly_the_tree(tree: Path, wheel: Path) -> None:
    assert in_wheel(wheel) == in_tree(tree)


def test_nothing_called_models_or_samplers_lands_at_the_top(wheel: Path) -> None:
    assert {name.split("/")[0] for name in in_wheel(wheel)} == {"dlm_decode"}


def test_a_wheel_built_from_the_source_archive_is_the_same(tree: Path, tmp_path: Path) -> None:
    """The archive has no symlinks in the package, so the folder mapping alone must do."""
    with tarfile.open(build("sdist", tree)) as archive:
        assert not [member.name for member in archive if member.issym()]
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert in_wheel(build("wheel", unpacked)) == in_tree(tree)
    for name in ("constraints.txt", "scripts/run.sh", "tests/unit/test_packaging.py", "LICENSE"):
        assert (unpacked / name).is_file(), name


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--disable-pip-version-check", "--target", str(target), str(wheel), cwd=target)
    return target


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Somebody's project, with packages of its own called `models` and `samplers`."""
    for name in LINKED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    return tmp_path


def test_an_installed_wheel_works_beside_other_packages_of_these_names(
    installed: Path, project: Path
) -> None:
    code = (
        "import models, samplers, dlm_decode.models, dlm_decode.samplers as s;"
        "assert models.MINE and samplers.MINE and s.SAMPLERS.names();"
        "print(dlm_decode.__file__, s.__file__, dlm_decode.models.__file__, sep='\\n')"
    )
    out = run(sys.executable, "-c", code, cwd=project, env={"PYTHONPATH": str(installed)})
    assert all(Path(line).is_relative_to(installed) for line in out.split())


def test_the_installed_command_works_beside_other_packages_of_these_names(
    installed: Path, project: Path
) -> None:
    command = [sys.executable, "-m", "dlm_decode", "list", "models", "--json"]
    assert '"llada"' in run(*command, cwd=project, env={"PYTHONPATH": str(installed)})


@pytest.mark.parametrize("name", LINKED)
def test_the_root_folders_refuse_to_be_imported_under_their_bare_names(name: str) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert f"ImportError: import dlm_decode.{name}, not {name}" in result.stderr


@pytest.mark.parametrize("name", LINKED)
def test_the_package_reaches_the_root_folders_by_relative_symlinks(name: str) -> None:
    link = ROOT / "dlm_decode" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert not [path for path in (ROOT / name).iterdir() if path.is_dir() and path.name[0] != "_"]


def test_git_holds_the_links_as_symlinks() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    out = run("git", "ls-files", "--stage", *(f"dlm_decode/{name}" for name in LINKED), cwd=ROOT)
    assert [line.split()[0] for line in out.splitlines()] == ["120000", "120000"]


def test_every_dependency_is_pinned_for_the_scripts() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+?);?(?: |$)", CONSTRAINTS, flags=re.MULTILINE))
    assert pinned["torch"] == "2.13.0"
    extras = re.compile(r"extra == [\"'](?!test[\"'])")
    for requirement in requires("dlm-decode") or []:
        if extras.search(requirement):
            continue  # the scripts install no extra but the tests'
        (name,) = re.findall(r"^[\w-]+", requirement)
        assert name in pinned, requirement
