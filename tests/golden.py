"""Where the golden fixtures are, and how tests read them.

`DLM_GOLDEN` names the folder; without it `shared/golden` beside the repository is tried. Tests that
need the fixtures carry `requires_golden` and are skipped when the folder is absent.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

Case = dict[str, Any]


@cache
def golden_root() -> Path | None:
    """The fixture folder, or None. A `DLM_GOLDEN` that names no folder is an error, not a skip."""
    named = os.environ.get("DLM_GOLDEN")
    if named:
        if not Path(named).is_dir():
            raise FileNotFoundError(f"DLM_GOLDEN must name a folder, got {named!r}")
        return Path(named)
    beside = Path(__file__).resolve().parents[2] / "shared" / "golden"
    return beside if beside.is_dir() else None


def golden_path(*parts: str) -> Path:
    """A file or folder of the fixtures; skips the running test when there are none."""
    root = golden_root()
    if root is None:
        pytest.skip(_REASON)
    return root.joinpath(*parts)


def golden_json(model: str, file: str) -> Any:
    """The whole content of `<model>/<file>.json`; an empty dict without fixtures."""
    root = golden_root()
    if root is None:
        return {}
    return json.loads((root / model / file).with_suffix(".json").read_text())


def golden_cases(model: str, file: str) -> list[Case]:
    """The cases of `<model>/<file>.json`, e.g. `("dream-tiny-a", "decode_klass")`.

    Empty without fixtures, so that it can feed `pytest.mark.parametrize` at collection.
    """
    content = golden_json(model, file)
    return list(content["cases"]) if content else []


_REASON = "no golden fixtures: set DLM_GOLDEN or put them at ../shared/golden"

requires_golden = pytest.mark.skipif(golden_root() is None, reason=_REASON)
