"""The benchmark's parts on a tiny model: they count what they say, and hang on no engine detail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dlm_decode.models.loading import save_model
from dlm_decode.models.toy import random_llada
from scripts import bench
from tests.reference.network import Network


@pytest.fixture(scope="module")
def setting() -> Iterator[bench.Setting]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = random_llada(0, layers=2, hidden=16, heads=2, vocab=300, max_positions=64)
    yield bench.Setting("tiny", model, 24, 16, 8, 2)
    torch.set_num_threads(threads)


def test_step_times_every_part_of_a_turn(setting: bench.Setting) -> None:
    row = bench.step_row(setting, "dual", 2)
    parts = row.backbone_ms, row.head_ms, row.statistics_ms, row.rest_ms
    assert all(part > 0 for part in parts)
    assert row.turn_ms == pytest.approx(sum(parts), rel=0.5)
    assert row.overhead_share > row.rest_share > 0


def test_caches_count_positions_and_errors(setting: bench.Setting) -> None:
    rows = list(bench.cache_rows(setting, ["none", "dual", "block_causal"], (3,), (40,), 16, 1))
    assert [(r.cache, r.batch) for r in rows] == [
        ("none", 1),
        ("none", 3),
        ("dual", 1),
        ("dual", 3),
    ]
    assert rows[0].positions == 40 * rows[0].forwards and rows[0].logit_error < 1e-3
    assert rows[2].positions < rows[0].positions and rows[2].logit_error > rows[0].logit_error
    assert [r.share for r in rows[::2]] == [1.0, 1.0]
    assert all(r.peak_mib > 0 and r.floor_s > 0 for r in rows)


def test_decode_runs_the_published_loop_beside_ours(setting: bench.Setting, tmp_path: Path) -> None:
    save_model(setting.model, tmp_path)
    plain = bench.decode_row(setting, Network(tmp_path), "dual", "quota", 1)
    assert plain.same_tokens and plain.forwards == plain.plain_forwards == 8
    region = bench.decode_row(setting, Network(tmp_path), "dual generation", "quota", 1)
    assert region.forwards == 8


def test_head_and_branches(setting: bench.Setting) -> None:
    asked = [(row.asked, row.temperature) for row in bench.head_rows(setting, [1], 1)]
    assert asked == [("top1", 0.0), ("p2", 0.0), ("entropy", 0.0), ("top1", 1.0)]
    assert [row.K for row in bench.speculation_rows(setting, [2], 1)] == [1, 2]
    assert bench.table(list(bench.head_rows(setting, [1], 1))).count("\n") == 5
