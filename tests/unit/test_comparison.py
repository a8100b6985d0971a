"""Comparing samplers: methods as text, figures that add up, the command from end to end."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_decode import comparison
from dlm_decode.api import Decoder
from dlm_decode.cli import main
from dlm_decode.comparison import KNOBS, Method, Point, parse_method
from dlm_decode.errors import CapabilityError, OptionError, UnknownNameError
from dlm_decode.eval.statistics import aup
from dlm_decode.models import DiffusionLM
from dlm_decode.models.loading import bundled_model_path
from dlm_decode.models.toy import random_llada
from dlm_decode.samplers import SAMPLERS
from dlm_decode.types import Request


def test_methods_are_written_as_text() -> None:
    plain = parse_method("threshold")
    assert (plain.knob, plain.values) == ("threshold.threshold", KNOBS["threshold"])
    chain = parse_method("credit+entropy_bound")
    assert chain.knob == "entropy_bound.gamma"
    assert parse_method("lopa:lookahead=2;threshold=0.9,0.5") == Method(
        "lopa", "threshold", ("0.9", "0.5"), {"lookahead": "2"}
    )
    assert parse_method("lopa:threshold=0.9").options(None) == {"threshold": "0.9"}
    assert parse_method("left_to_right").options(16) == {"left_to_right.steps": 16}


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS.names() if name != "renoise"])
def test_what_is_varied_has_an_effect(sampler: str) -> None:
    """The ends of a sampler's usual values commit in different turns or to different tokens.

    `renoise` is for models without a mask; `imh` decides one token a turn, whatever it is told.
    """
    method = parse_method(sampler)
    if method.knob is None:
        assert sampler == "imh"
        return
    request = Request([3, 5, 7, 2], gen_length=18, block_length=18, stop_at_eos=False)
    runs = []
    for value in (method.values[0], method.values[-1]):
        decoder = Decoder(random_model(), sampler, options=method.options(value))
        (result,) = decoder.generate(request)
        runs.append([(s.positions, s.tokens) for s in result.trace.steps])
    assert runs[0] != runs[1], method


@cache
def random_model() -> DiffusionLM:
    return random_llada(1, hidden=16, heads=2, vocab=32, dtype=torch.float64)


def test_an_option_that_its_defaults_leave_idle_is_not_varied() -> None:
    assert parse_method("dos").knob == "dos.steps"
    assert parse_method("dos:rule=threshold;threshold=0.9,0.5").knob == "threshold"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("threshold:0.9", "NAME:OPTION="),
        ("lopa:lookahead=1,2;threshold=0.9,0.5", "only one option"),
        ("nothing", "unknown sampler"),
    ],
)
def test_a_method_that_cannot_be_read_is_refused(text: str, words: str) -> None:
    with pytest.raises((OptionError, UnknownNameError), match=words):
        parse_method(text)


def point(method: str, setting: str, task: str, correct: int, tokens: int, forwards: int) -> Point:
    return Point(method, setting, task, 10, correct, tokens, forwards, 20 * forwards, 1.5)


POINTS = [
    point("a", "x=1", "one", 10, 100, 100),
    point("a", "x=1", "two", 5, 60, 30),
    point("a", "x=2", "one", 9, 100, 50),
    point("a", "x=2", "two", 5, 60, 20),
    point("b", "", "one", 8, 100, 40),
    point("b", "", "two", 5, 60, 20),
]


def test_pooled_points_add_up() -> None:
    both = {(p.method, p.setting): p for p in comparison.pooled(POINTS)}
    first = both["a", "x=1"]
    assert (first.items, first.correct, first.tokens, first.forwards) == (20, 15, 160, 130)
    assert first.task == "all" and first.seconds == 3.0
    assert first.tokens_per_forward == pytest.approx(160 / 130)
    assert first.positions_per_token == pytest.approx(20 * 130 / 160)
    assert comparison.pooled(list(both.values())) == list(both.values())


def test_the_area_is_the_mean_over_tasks() -> None:
    found = comparison.scores(POINTS)
    one, two = aup([(1.0, 100.0), (2.0, 90.0)], 100.0), aup([(2.0, 50.0), (3.0, 50.0)], 50.0)
    assert found["a"] == pytest.approx((one + two) / 2)
    assert found["b"] == pytest.approx((2.5 * 80 + 3 * 50) / 2)


def test_the_table_has_a_row_for_each_point_and_intervals() -> None:
    lines = comparison.table(POINTS).splitlines()
    assert len(lines) == 2 + 3
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in rows].count("") == 1
    row = next(row for row in rows if row[1] == "x=1")
    assert row[2] == "75.0 (53.1 to 88.8)", "the Wilson interval of 15 in 20"
    assert row[3] == "1.23" and row[5] == "3.0"
    written: Any = json.loads(json.dumps(comparison.as_json(POINTS)))
    assert len(written["points"]) == 6 and set(written["aup"]) == {"a", "b"}


def test_a_plot_needs_matplotlib(tmp_path: Path) -> None:
    try:
        comparison.save_plot(POINTS, tmp_path / "plot.png")
    except CapabilityError as error:
        assert "dlm-decode[plot]" in str(error)
    else:
        assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.skipif(not bundled_model_path().is_dir(), reason="the bundled model is not there")
def test_the_command_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    words = ["compare", "--samplers", "threshold:threshold=0.9,0.0", "--tasks", "lists"]
    assert main([*words, "--items", "2", "--gen-length", "16", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 4 and err.count("lists") == 2
    points = json.loads(file.read_text())["points"]
    assert [p["setting"] for p in points] == ["threshold=0.9", "threshold=0.0"]
    assert points[1]["forwards"] < points[0]["forwards"]
    assert main([*words[:-1], "chess", "--items", "2"]) == 2
