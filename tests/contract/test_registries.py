"""What every registered part says of itself."""

from __future__ import annotations

import re
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlm_decode.caches import CACHES
from dlm_decode.models import FAMILIES
from dlm_decode.options import Options
from dlm_decode.registry import Entry, Registry
from dlm_decode.samplers import SAMPLERS
from dlm_decode.schedules import SCHEDULES, Span

README = Path(__file__).resolve().parents[2] / "README.md"
REGISTRIES: tuple[Registry[Any], ...] = (SAMPLERS, CACHES, SCHEDULES, FAMILIES)
PARTS: tuple[Registry[Any], ...] = (SAMPLERS, CACHES, SCHEDULES)


def entries(registries: tuple[Registry[Any], ...]) -> list[Any]:
    return [
        pytest.param(entry, id=f"{registry.kind}-{entry.name}")
        for registry in registries
        for entry in registry.entries()
    ]


@pytest.mark.parametrize("entry", entries(REGISTRIES))
def test_each_part_says_its_rule_in_one_line(entry: Entry) -> None:
    assert entry.cls.__doc__ and entry.cls.__doc__ is not Options.__doc__
    assert entry.summary.endswith(".") and len(entry.summary) <= 100


@pytest.mark.parametrize("entry", entries((SAMPLERS,)))
def test_each_sampler_names_its_paper(entry: Entry) -> None:
    """In `paper`, and with the same number in the docstring beside the rule."""
    assert re.search(r"arXiv:\d{4}\.\d{4,5}", entry.paper)
    assert re.search(r"arXiv:\d{4}\.\d{4,5}", entry.cls.__doc__ or "")


@pytest.mark.parametrize("entry", entries(PARTS))
def test_every_field_is_a_documented_option(entry: Entry) -> None:
    """Fields without a help text would be missing from the command line and the README.

    Only ready objects, which no text can name, may be fields of another kind.
    """
    for field in fields(entry.cls):
        if not field.metadata.get("help"):
            assert not isinstance(field.default, (bool, int, float, str)), field.name
            assert field.default_factory is not MISSING or field.default is None, field.name


@pytest.mark.parametrize("registry", PARTS, ids=lambda registry: registry.kind)
def test_every_part_is_made_with_defaults_and_frozen(registry: Registry[Any]) -> None:
    for name in registry.names():
        made = registry.create(name)
        assert registry.name_of(made) == name
        assert made == registry.create(name) and hash(made) == hash(registry.create(name))
        for field in fields(made):
            with pytest.raises(FrozenInstanceError):
                setattr(made, field.name, None)


@pytest.mark.parametrize("entry", entries(REGISTRIES))
def test_each_part_is_in_the_readme(entry: Entry) -> None:
    assert f"| `{entry.name}` |" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("length", [1, 3, 8, 40])
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (3, 17), (8, 9), (5, 30)])
@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_schedule_covers_the_span_and_moves_forward(
    name: str, start: int, stop: int, length: int
) -> None:
    """Filling window after window decides every position once, within the widths it promised.

    Windows never go back, never pass the span's end, and never stay once they have no mask.
    """
    schedule, span = SCHEDULES.create(name), Span(start, stop, length)
    masked = np.zeros(stop + 3, dtype=bool)
    masked[start:stop] = True
    window = schedule.first(span)
    for _ in range(stop - start):
        assert window.start < window.stop <= stop
        assert window.stop - window.start <= schedule.widest(span)
        assert masked[window.start : window.stop].any()
        masked[window.start : window.stop] = False
        if not masked.any():
            break
        moved = schedule.advance(span, window, masked)
        assert moved.start >= window.start and moved.index >= window.index
        window = moved
    assert not masked.any()
    assert window.index < schedule.blocks(span)


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_a_window_is_no_wider_than_the_row(name: str) -> None:
    """A huge block length must not become huge canvases."""
    assert SCHEDULES.create(name).widest(Span(4, 20, 10**9)) <= 20
