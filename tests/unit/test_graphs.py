"""Replayed turns give the tokens of eager ones, with tapes on the CPU in the place of graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from dlm_decode import engine
from dlm_decode import graphs as graphs_module
from dlm_decode.api import Decoder
from dlm_decode.attention import Group
from dlm_decode.errors import CapabilityError
from dlm_decode.graphs import WARM_UPS, Graphs, OnGPU
from dlm_decode.models import toy
from dlm_decode.samplers import SAMPLERS
from dlm_decode.samplers.threshold import Threshold
from dlm_decode.storage import Storage
from dlm_decode.tree import flattened, refilled
from dlm_decode.types import Canvas, Decision, Generation, Output, Request
from tests.contract.cases import model_of, tabular
from tests.tape import graphed, tape

REQUESTS = [
    Request([3, 5, 7, 2], 8, block_length=4, stop_at_eos=False),
    Request([4, 5, 7, 2], 8, block_length=4, stop_at_eos=False),
    Request([9, 1], 5, block_length=4, stop_at_eos=False, eos="ban_start"),
    Request([3, 5, 7, 2, 8, 8], 8, block_length=8, suffix_ids=[6, 11], eos="no_confidence"),
]


def assert_same(found: list[Generation], expected: list[Generation]) -> None:
    """Tokens, and in what order they came; confidence as far as padding lets it round alike."""
    for a, b in zip(found, expected, strict=True):
        assert (a.ids, a.finish_reason) == (b.ids, b.finish_reason)
        assert a.trace.forwards_by_kind == b.trace.forwards_by_kind
        assert a.trace.computed_positions == b.trace.computed_positions
        assert len(a.trace.steps) == len(b.trace.steps)
        for x, y in zip(a.trace.steps, b.trace.steps, strict=True):
            assert (x.positions, x.tokens, x.remasked) == (y.positions, y.tokens, y.remasked)
            assert x.confidence == pytest.approx(y.confidence, rel=1e-5, abs=1e-6)


def check(
    sampler: str,
    cache: str,
    model: str = "llada",
    *,
    batch: int = 2,
    few: bool = False,
    **more: Any,
) -> Graphs:
    """Rows of several lengths, entering as others leave, decoded twice over with graphs."""
    settings = {"max_batch_size": batch, **more}
    requests = REQUESTS[1 : 3 if few else 4]
    expected = Decoder(model_of(model), sampler, cache, **settings).generate(requests)
    decoder, graphs = graphed(model_of(model), sampler, cache, **settings)
    for _ in range(2):
        assert_same(decoder.generate(requests), expected)
    return graphs


CACHES = ("none", "prefix", "dual", "delayed", "interval", "d2")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cache", CACHES)
def test_graphs_change_no_token_with_any_cache(cache: str, batch: int) -> None:
    graphs = check("threshold", cache, batch=batch)
    assert graphs.replayed > 0 or cache in ("interval", "d2")


@pytest.mark.parametrize("sampler", SAMPLERS.names())
def test_graphs_change_no_token_with_any_sampler(sampler: str) -> None:
    graphs = check(sampler, "dual", few=True)
    assert graphs.replayed > 0 or "shadow" in SAMPLERS.create(sampler).needs


@pytest.mark.parametrize(
    ("sampler", "cache", "model", "more"),
    [
        ("threshold", "block_causal", "sdar", {}),
        ("self_speculative+llada", "block_causal", "sdar", {"temperature": 1.0}),
        ("dream", "dual", "dream", {"temperature": 1.0, "options": {"top_p": 0.8}}),
        ("llada", "delayed", "llada", {"temperature": 0.7, "batch": 1}),
        ("credit+threshold", "prefix", "dream", {}),
        ("klass", "none", "llada", {"schedule": "sliding"}),
        ("threshold", "dual", "llada", {"schedule": "adablock"}),
        ("llada", "dual", "llada", {"cfg_scale": 1.0}),
        ("threshold", "dual", "llada", {"storage": Storage(dtype="int8")}),
        ("self_speculative+threshold", "dual", "llada", {"options": {"drafter": "graph"}}),
        ("lopa", "in_flight", "dream", {"schedule": "pipeline", "options": {"lead": "kept"}}),
    ],
)
def test_graphs_change_no_token_of(
    sampler: str, cache: str, model: str, more: dict[str, Any]
) -> None:
    """Shifted and block-causal models, drawing, guidance, schedules, integers in the store."""
    assert check(sampler, cache, model, **more).replayed > 0


def turns(results: list[Generation]) -> int:
    """Of rows that were decoded one after another."""
    return sum(result.forwards for result in results)


def test_blocks_of_a_row_take_the_same_graphs() -> None:
    """A refresh and windows with many or few masks: three structures, each seen once eagerly."""
    decoder, graphs = graphed(model_of("llada"), "llada", "dual")
    results = decoder.generate(REQUESTS[:1])
    assert (graphs.captured, graphs.replayed) == (3, turns(results) - 3)


def test_rows_of_the_same_lengths_take_the_same_graphs() -> None:
    """Whatever their ids are, and in a later run too: the store stays where it is."""
    decoder, graphs = graphed(model_of("llada"), "llada", "dual", max_batch_size=1)
    first = decoder.generate(REQUESTS[:1])
    before = graphs.replayed
    again = decoder.generate([REQUESTS[1], replace(REQUESTS[0], prompt_ids=[8, 8, 8, 1])])
    assert graphs.captured == 3
    assert graphs.replayed - before == turns(again) == 2 * turns(first)


def served(count: int) -> Graphs:
    """A long row beside short ones that come and go at the same place, and at last alone."""
    long = Request([3, 5, 7, 2], 48, block_length=4, stop_at_eos=False)
    short = [Request([i, i + 1], 8, block_length=4, stop_at_eos=False) for i in range(count)]
    decoder, graphs = graphed(model_of("llada"), "llada", "dual", max_batch_size=2, most=99)
    decoder.generate([short[0], long, *short[1:]])
    return graphs


def test_a_row_that_takes_anothers_place_takes_its_graphs() -> None:
    """However many come and go while the long row takes its 48 turns, graphs are the same six:
    of two rows and of one, a refresh, a window with many masks, one with few."""
    few, many = served(3), served(5)
    for graphs in (few, many):
        assert (graphs.captured, graphs.replayed) == (6, 48 - 6)


RAGGED = [Request([3] * n, 8, block_length=4, stop_at_eos=False) for n in (4, 5, 6, 7, 8, 6, 5, 7)]


def test_ragged_rows_that_come_and_go_take_the_same_graphs() -> None:
    """Windows of rows of nearly one length differ in a mask; only refreshes have the row's own."""
    decoder, graphs = graphed(model_of("llada"), "llada", "dual", max_batch_size=2, most=99)
    windows = decoder.generate(RAGGED)[0].trace.forwards_by_kind["window"]
    captured, replayed = graphs.captured, graphs.replayed
    decoder.generate([replace(r, prompt_ids=[5] * (21 - len(r.prompt_ids))) for r in RAGGED])
    pairs = len(RAGGED) // 2
    assert graphs.captured - captured == pairs  # each one's second refresh
    assert graphs.replayed - replayed == pairs + pairs * windows


@pytest.mark.parametrize("sampler", ["llada", "dos"])
def test_ragged_rows_are_the_same_with_graphs(sampler: str) -> None:
    """Attended together, keys filled up to whole pages, their attention watched or not."""
    settings = {"max_batch_size": 2}
    expected = Decoder(model_of("llada"), sampler, "dual", **settings).generate(RAGGED[:4])
    decoder, _ = graphed(model_of("llada"), sampler, "dual", **settings)
    for _ in range(2):
        assert_same(decoder.generate(RAGGED[:4]), expected)


def test_only_the_latest_graphs_are_kept() -> None:
    decoder, graphs = graphed(model_of("llada"), "llada", "dual", max_batch_size=1, most=1)
    expected = Decoder(model_of("llada"), "llada", "dual", max_batch_size=1).generate(REQUESTS)
    assert_same(decoder.generate(REQUESTS), expected)
    assert len(graphs._graphs) == 1 < graphs.captured


def test_runs_side_by_side_do_not_share_results() -> None:
    """What one run remembers is not what a graph's buffers hold after the other's turn."""
    expected = Decoder(model_of("llada"), "klass", "none").generate(REQUESTS[:2])
    decoder, graphs = graphed(model_of("llada"), "klass", "none")
    streams: list[Iterator[Any]] = [decoder.stream(request) for request in REQUESTS[:2]]
    frames = list(zip(*streams, strict=False))
    found = [[f for f in stream if f.result] for stream in zip(*frames, strict=True)]
    rest = [[f for f in stream if f.result] for stream in streams]
    results = [(a + b)[0].result for a, b in zip(found, rest, strict=True)]
    assert [r.ids for r in results] == [r.ids for r in expected]
    assert graphs.replayed > 0


def test_a_key_that_forgets_the_groups_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows of other lengths take each other's graphs, which tapes show."""

    def forgetful(tree: Any) -> tuple[list[Tensor], Any]:
        tensors, _ = flattened(tree)
        return tensors, tuple((t.shape, t.dtype) for t in tensors)

    monkeypatch.setattr(graphs_module, "flattened", forgetful)
    decoder, _ = graphed(model_of("llada"), "llada", "dual", max_batch_size=1)
    expected = Decoder(model_of("llada"), "llada", "dual", max_batch_size=1).generate(REQUESTS)
    assert [r.ids for r in decoder.generate(REQUESTS)] != [r.ids for r in expected]


class Reading(Threshold):
    """Does on the host what it could do on the device, and says so (tests only)."""

    traits: ClassVar[frozenset[str]] = frozenset({"eager"})

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        assert canvas.eligible.any().item()
        return super().decide(canvas, output, state)


def test_samplers_that_say_so_run_eagerly() -> None:
    decoder, graphs = graphed(model_of("llada"), Reading(), "dual")
    expected = Decoder(model_of("llada"), "threshold", "dual").generate(REQUESTS)
    for _ in range(2):
        assert_same(decoder.generate(REQUESTS), expected)
    assert graphs.captured == 0


def test_hooks_and_large_forwards_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("threshold", "d2").captured == 0
    monkeypatch.setattr(engine, "MOST_TOKENS", 3)
    assert check("threshold", "dual").captured == 0


def test_tapes_refuse_what_a_capture_would() -> None:
    x = torch.ones(3)
    for wrong in (lambda: torch.tensor([1.0]), lambda: x.sum().item(), lambda: x[x > 0]):
        with pytest.raises(RuntimeError, match=r"host|mask"):
            tape(wrong)


def test_a_tree_is_its_structure_and_its_tensors() -> None:
    """Numbers in tensors are no part of the structure; everything else is."""
    group = Group(0, 2, 3, own=True, mask=torch.ones(2))
    tree = {"a": (torch.arange(3), group), "b": None}
    filled = refilled(tree, iter([torch.zeros(3).long(), torch.zeros(2)]))
    tensors, structure = flattened(filled)
    assert structure == flattened(tree)[1]
    assert [t.sum().item() for t in tensors] == [0, 0]
    assert filled["a"][1] == replace(group, mask=filled["a"][1].mask)
    for other in (replace(group, start=1), replace(group, mask=None)):
        assert flattened({"a": (torch.arange(3), other), "b": None})[1] != structure


def test_captures_share_one_pool_and_follow_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would be asked for, in its absence: streams and graphs that only take notes."""
    notes: list[Any] = []

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            notes.append("wait")

    class Noted:
        def replay(self) -> None:
            notes.append("replay")

    @contextmanager
    def noting(what: Any, pool: Any = None) -> Iterator[None]:
        notes.append(pool or "enter")
        yield

    fakes = {"Stream": Stream, "current_stream": Stream, "CUDAGraph": Noted, "stream": noting}
    fakes |= {"device": noting, "graph": noting, "graph_pool_handle": lambda: "pool"}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture = OnGPU(torch.device("cuda"))
    for _ in range(2):
        replay, results = capture(lambda: notes.append("run") or "results")
        assert results == "results"
        replay()
    run = ["enter", "wait", "enter", *["run"] * WARM_UPS, "wait", "pool", "run", "replay"]
    assert notes == run * 2


def test_where_graphs_cannot_work_they_are_refused() -> None:
    with pytest.raises(CapabilityError, match="graphs need a GPU"):
        Decoder(model_of("llada"), graphs=True)
    for other in (tabular(), toy.random_model("llada_moe")):
        with pytest.raises(CapabilityError, match="dense model"):
            graphed(other)
