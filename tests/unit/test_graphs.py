"""Replayed forwards give the tokens of eager ones, with a replay on the CPU in a graph's place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.attention import PackedAttention
from dlm_decode.errors import CapabilityError
from dlm_decode.graphs import Graphed
from dlm_decode.models import DiffusionLM, toy
from dlm_decode.storage import Storage
from dlm_decode.types import Generation, Request
from tests.contract.cases import model_of, tabular

REQUESTS = [
    Request([3, 5, 7, 2], 16, block_length=4, stop_at_eos=False),
    Request([4, 5, 7, 2], 16, block_length=4, stop_at_eos=False),
    Request([9, 1], 9, block_length=4, stop_at_eos=False),
    Request([3, 5, 7, 2, 8, 8], 8, block_length=8, suffix_ids=[6, 11]),
]


def on_cpu(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """Like a graph: the forward as it was built, over its buffers, into one result."""
    hidden = run().clone()
    return lambda: hidden.copy_(run()), hidden


def graphed(model: DiffusionLM, most: int = 16) -> Graphed:
    return Graphed(model, capture=on_cpu, most=most)


def decoded(model: DiffusionLM, sampler: str, cache: str, batch: int) -> list[Generation]:
    return Decoder(model, sampler, cache, max_batch_size=batch, options={}).generate(REQUESTS)


def assert_same(found: list[Generation], expected: list[Generation]) -> None:
    assert [r.ids for r in found] == [r.ids for r in expected]
    assert [r.trace.steps for r in found] == [r.trace.steps for r in expected]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("family", "cache"),
    [("llada", name) for name in ("none", "prefix", "dual", "delayed", "interval", "d2")]
    + [("dream", "dual")],
)
def test_graphs_change_no_token(family: str, cache: str, batch: int) -> None:
    """Whatever is replayed and whatever cannot be, rows entering and leaving."""
    model = graphed(model_of(family))
    for _ in range(2):
        found = decoded(model, "llada", cache, batch)
        assert_same(found, decoded(model_of(family), "llada", cache, batch))
    assert model.replayed > 0 or cache not in ("prefix", "dual")


@pytest.mark.parametrize("sampler", ["self_speculative+llada", "lopa", "wino", "dos"])
def test_forwards_of_another_kind_run_eagerly(sampler: str) -> None:
    model = graphed(model_of("llada"))
    found = decoded(model, sampler, "dual", 2)
    assert_same(found, decoded(model_of("llada"), sampler, "dual", 2))


def test_a_window_forward_is_captured_once_for_a_row() -> None:
    """One key for all blocks of a row: 12 window turns are one eager, one captured, 11 replayed."""
    model = graphed(model_of("llada"))
    result = Decoder(model, "llada", "dual").generate(REQUESTS[:1])[0]
    windows = result.trace.forwards_by_kind["window"]
    assert (model.captured, model.replayed) == (1, windows - 1)


def test_int8_pools_are_told_from_others() -> None:
    model, storage = graphed(model_of("llada")), Storage(dtype="int8")
    decoders = [Decoder(m, "llada", "dual", storage=storage) for m in (model, model_of("llada"))]
    found, expected = (decoder.generate(REQUESTS) for decoder in decoders)
    assert_same(found, expected)
    assert model.replayed > 0


def test_only_the_latest_graphs_are_kept() -> None:
    model = graphed(model_of("llada"), most=1)
    found = decoded(model, "llada", "dual", 1)
    assert_same(found, decoded(model_of("llada"), "llada", "dual", 1))
    assert len(model._known) == 1
    assert model.captured > 1


def test_a_key_that_forgets_the_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: forwards of as many tokens in another store take each other's graph."""
    structure = PackedAttention.structure
    monkeypatch.setattr(PackedAttention, "structure", lambda a: structure(a) and ())
    found = decoded(graphed(model_of("llada")), "llada", "dual", 1)
    expected = decoded(model_of("llada"), "llada", "dual", 1)
    assert [r.ids for r in found] != [r.ids for r in expected]


def test_where_graphs_cannot_work_they_are_refused() -> None:
    with pytest.raises(CapabilityError, match="graphs need a GPU"):
        Decoder(model_of("llada"), graphs=True)
    for other in (tabular(), toy.random_model("llada_moe")):
        with pytest.raises(CapabilityError, match="dense model"):
            graphed(other)
