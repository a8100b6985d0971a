"""Draft graphs, how many drafts are worth their cost, and what graphs are learnt from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dlm_decode.api import Decoder
from dlm_decode.drafts import (
    BUNDLED_GRAPH,
    DraftGraph,
    instantiate,
    odds,
    read_graph,
    worthwhile,
    write_graph,
)
from dlm_decode.errors import OptionError
from dlm_decode.head import HeadPlan, Scored, statistics
from dlm_decode.samplers.llada import Llada
from dlm_decode.samplers.self_speculative import SelfSpeculative
from dlm_decode.speculation import audit_lossless, best_graph, calibrate, trajectories, watch
from dlm_decode.types import Draw, Output, Request
from tests.unit.sampler_cases import make_canvas
from tests.unit.speculation_cases import model_of

P = torch.tensor([[0.5, 0.9, 0.7, 0.2]], dtype=torch.float64)
BEST, SECOND = torch.tensor([[2, 3, 4, 5]]), torch.tensor([[6, 7, 6, 7]])


def chain_graph(count: int) -> DraftGraph:
    """{(1,1)}, {(1,1),(2,1)}, ...: the most confident positions, one more in each node."""
    ranked = [(i, 1) for i in range(1, count + 1)]
    return DraftGraph(tuple(tuple(ranked[:size]) for size in range(1, count + 1)))


def output_of(p: torch.Tensor = P) -> Output:
    stats = {"top1": BEST, "top2": SECOND, "p1": p, "valid": torch.ones_like(p, dtype=torch.bool)}
    return Output(stats)


def test_a_node_fills_positions_by_rank_and_tokens_by_theirs() -> None:
    graph = DraftGraph((((1, 1),), ((1, 2), (3, 1)), ((4, 1), (1, 1), (2, 1), (3, 1))))
    drafts, useful = instantiate(graph, make_canvas(width=4), output_of())
    assert drafts[0, :2].tolist() == [[0, 3, 0, 0], [2, 7, 0, 0]]
    assert useful.tolist() == [[True, True, False]], "the last one would leave nothing to decide"
    likely = odds(make_canvas(width=4), output_of(), drafts)[0, :2]
    torch.testing.assert_close(likely, torch.tensor([0.9, 0.1 * 0.5], dtype=torch.float64))


def test_a_node_beyond_the_masks_is_no_draft() -> None:
    masked = torch.tensor([[True, False, True, False]])
    drafts, useful = instantiate(chain_graph(3), make_canvas(masked=masked), output_of())
    assert useful.tolist() == [[True, False, False]]
    assert drafts[0, 0].tolist() == [0, 1, 4, 1]


@pytest.mark.parametrize(
    ("likely", "options", "count"),
    [
        ([0.9, 0.5, 0.1], {}, 3),
        ([0.9, 0.0, -1.0], {}, 2),
        ([0.9, 0.5, 0.1], {"least": 0.5}, 2),
        ([-1.0, -1.0, -1.0], {}, 0),
        # 0.9 >= c; 0.5 (1 + c) >= 1.9 c iff c <= 0.357; 0.1 (1 + 2 c) >= 2.4 c iff c <= 0.045
        ([0.9, 0.5, 0.1], {"row_cost": 0.95}, 0),
        ([0.9, 0.5, 0.1], {"row_cost": 0.36}, 1),
        ([0.9, 0.5, 0.1], {"row_cost": 0.35}, 2),
        ([0.9, 0.5, 0.1], {"row_cost": 0.04}, 3),
    ],
)
def test_drafts_are_added_while_they_raise_steps_per_cost(
    likely: Sequence[float], options: dict[str, float], count: int
) -> None:
    settings = {"least": 0.0, "row_cost": 0.0} | options
    found = worthwhile(torch.tensor([likely], dtype=torch.float64), **settings)
    assert found.tolist() == [count]


def test_a_graph_is_read_as_it_was_written(tmp_path: Path) -> None:
    graph = DraftGraph((((1, 1),), ((2, 1), (1, 2))))
    path = tmp_path / "graph.json"
    write_graph(path, graph, {"prompts": 3})
    assert read_graph(str(path)) == graph and graph.nodes[1] == ((1, 2), (2, 1))
    assert json.loads(path.read_text())["about"] == {"prompts": 3}
    assert graph.second and not chain_graph(2).second and graph.reach == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", 'must be JSON with "nodes"'),
        ('{"nodes": []}', "at least one node"),
        ('{"nodes": [[[0, 1]]]}', r"i >= 1 and j 1 or 2, got \(\(0, 1\),\)"),
        ('{"nodes": [[[1, 3]]]}', "j 1 or 2"),
        ('{"nodes": [[[1, 1], [1, 2]]]}', "name a position once"),
        ('{"nodes": [[[1, 1]], [[1, 1]]]}', "must differ"),
    ],
)
def test_a_bad_graph_is_refused_with_its_reason(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(OptionError, match=message):
        read_graph(str(path))


def test_the_graph_that_most_paths_walk_is_chosen() -> None:
    a, b = ((1, 1),), ((2, 1),)
    ab: Any = ((1, 1), (2, 1))
    paths = [(a, ab)] * 3 + [(b, ab)] * 2 + [(((3, 1),),)]
    assert best_graph(paths, 3).nodes == (a, ab, b)
    assert best_graph(paths, 9).nodes == (a, ab, b, ((3, 1),)), "no more than were seen"


@pytest.mark.parametrize("columns", [256, 1 << 20])
def test_the_second_best_id_is_the_same_in_any_tiling(columns: int) -> None:
    """Rounded logits tie within and across tiles; the smallest id comes first."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 40, (64, 900), generator=generator).double()
    order = torch.sort(logits[:, 1:], dim=-1, descending=True, stable=True).indices + 1
    zeros = torch.zeros(64, dtype=torch.long)
    plan = HeadPlan(900, frozenset({"top2"}), Draw(), 0, tile_bytes=columns * 64 * 4)
    found = statistics(lambda a, b: logits[:, a:b].clone(), Scored(zeros, zeros, zeros), plan)
    assert torch.equal(found["top1"], order[:, 0]) and torch.equal(found["top2"], order[:, 1])


def test_a_calibrated_graph_describes_the_true_trajectory() -> None:
    """With it every draft that is on the path is found, and nothing else is decided."""
    request = Request([3, 5, 7, 2], gen_length=10, block_length=10, stop_at_eos=False)
    decoder = Decoder(model_of("llada"), Llada())
    _, notes = watch(decoder, Llada(), request)
    paths = list(trajectories(notes, 3))
    assert len(paths) == 8 and all(len(path) <= 3 for path in paths)
    assert all(len(node) == size for path in paths for size, node in enumerate(path, 1))
    graph = calibrate(decoder, [request], size=4, depth=3)
    assert graph.nodes[0] in {path[0] for path in paths if path}


def test_the_audit_counts_and_explains_divergences() -> None:
    """A wrapper that goes astray is reported with the step and how close the choice was."""

    class Astray(SelfSpeculative):
        def decide(self, canvas: Any, output: Any, state: Any) -> Any:
            worst = Output({**output.stats, "p1": -output.p1})
            return super().decide(canvas, worst, state)

    requests = [Request([3, 5, 7, 2], gen_length=6, block_length=6, id="a", stop_at_eos=False)]
    fine = audit_lossless(Decoder(model_of("llada"), SelfSpeculative(Llada())), requests)
    assert (fine.rows, fine.identical, fine.divergences) == (1, 1, ())
    assert fine.forwards[1] == fine.forwards[0] - fine.accepted and fine.drafted >= fine.accepted
    report = audit_lossless(Decoder(model_of("llada"), Astray(Llada())), requests)
    assert report.identical == 0 and report.divergences[0].id == "a"
    gap = report.divergences[0].score_gap
    assert report.divergences[0].step == 0 and gap is not None and 0 < gap < 1


def test_the_bundled_graph_is_read_where_none_is_named() -> None:
    drawn = read_graph(str(BUNDLED_GRAPH))
    assert len(drawn.nodes) == 10
    assert drawn.nodes[0] == ((1, 1),), "the most confident position alone is the likeliest draft"
    wrapper = SelfSpeculative(Llada(), max_states=4, drafter="graph")
    assert wrapper._nodes == drawn.first(3)
