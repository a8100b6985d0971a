"""The cache audit: nothing to report where there is nothing stale, and the truth where there is."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_decode.api import Decoder
from dlm_decode.audit import CacheReport, audit_cache, report_text, save_plot
from dlm_decode.cli import main
from dlm_decode.errors import CapabilityError
from dlm_decode.models.toy import random_dream, random_llada, random_sdar
from dlm_decode.types import Request

SIZES: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 1, "vocab": 32}
MODELS = {
    "llada": random_llada(2, dtype=torch.float64, **SIZES),
    "dream": random_dream(2, dtype=torch.float64, **SIZES),
    "sdar": random_sdar(2, dtype=torch.float64, **SIZES),
}
REQUESTS = [
    Request([3, 5, 7, 2], gen_length=9, block_length=4, id="a", stop_at_eos=False),
    Request([4, 8, 1], gen_length=6, block_length=6, id="b", stop_at_eos=False),
]


def audit(model: str, cache: str, sampler: str = "llada", **options: Any) -> CacheReport:
    return audit_cache(Decoder(MODELS[model], sampler, cache, options=options), REQUESTS)


@pytest.mark.parametrize(
    ("model", "cache", "options"),
    [
        ("llada", "none", {}),
        ("dream", "dual", {"refresh_every": 1}),
        ("sdar", "block_causal", {}),
        ("llada", "delayed", {"refresh_every": 1}),
    ],
)
def test_an_exact_run_has_no_error(model: str, cache: str, options: dict[str, Any]) -> None:
    report = audit(model, cache, **options)
    assert report.logit_error < 1e-5
    assert report.commits_differ == 0
    assert sum(t.top1_changed for t in report.turns) == 0
    assert sum(t.commits for t in report.turns) == 15


@pytest.mark.parametrize("model", ["llada", "dream"])
def test_a_stale_cache_shows(model: str) -> None:
    """Its first turns are exact; later ones are off, and what they saw is as old as it is."""
    report = audit(model, "dual")
    first = [turn for turn in report.turns if turn.turn == 0]
    assert all(turn.logit_error < 1e-5 and turn.seen == 0 for turn in first)
    assert report.logit_error > 1e-3
    assert sum(report.staleness.values()) == sum(turn.seen for turn in report.turns) > 0
    assert min(report.staleness) == 1
    assert report.computed < report.uncached and report.forwards_saved > 0


def test_the_audited_run_is_the_run_itself() -> None:
    decoder = Decoder(MODELS["llada"], "llada", "dual")
    plain = decoder.generate(REQUESTS)
    report = audit_cache(decoder, REQUESTS)
    assert report.computed == sum(r.trace.computed_positions for r in plain)
    assert sum(report.forwards_by_kind.values()) == sum(r.forwards for r in plain)


def test_finished_text_before_the_window_is_seen_as_masks_if_nobody_computes_it_again() -> None:
    """`changed` counts K/V of another token: `dual` refreshed by tokens keeps some, `free` none."""
    late = audit("llada", "dual", refresh_tokens=50)
    assert sum(turn.changed for turn in late.turns) > 0
    assert sum(turn.changed for turn in audit("llada", "free").turns) == 0


def test_what_is_no_forward_of_the_canvas_is_refused() -> None:
    with pytest.raises(CapabilityError, match="leave out guidance"):
        audit_cache(Decoder(MODELS["llada"], cfg_scale=1.0), REQUESTS)


def test_a_sampler_that_needs_more_than_logits_is_audited_without_its_decisions() -> None:
    report = audit("llada", "dual", sampler="dos")
    assert report.commits_differ is None and report.logit_error > 0
    assert "unknown" in report_text(report)


def test_the_report_as_text_and_json() -> None:
    report = audit("llada", "dual")
    assert json.loads(json.dumps(report.as_dict()))["cache"] == "dual"
    text = report_text(report)
    assert "commits that would differ" in text and "age of K/V seen" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_plot_is_written(tmp_path: Path) -> None:
    save_plot(audit("llada", "dual"), tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_size > 1000


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["audit", "--prompt", "hello", "--gen-length", "8", "--block-length", "8"]
    assert main([*given, "--cache", "dual"]) == 0
    assert "full forwards saved" in capsys.readouterr().out
