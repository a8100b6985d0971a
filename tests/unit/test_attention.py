"""What is recorded of the attention: the rows that predict the window, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode import packing
from dlm_decode.api import Decoder
from dlm_decode.attention import PackedAttention
from dlm_decode.errors import CapabilityError
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.toy import random_dream, random_llada
from dlm_decode.samplers import Sampler
from dlm_decode.scores import best, commit_candidates
from dlm_decode.types import Canvas, Decision, Output, Request
from tests.support import attention

REQUESTS = [
    Request([5, 6, 7], gen_length=12, block_length=4, id="a"),
    Request([9, 8, 3, 2, 1], gen_length=7, block_length=4, id="b"),
    Request([4] * 6, gen_length=6, block_length=6, id="c", suffix_ids=(7, 8)),
]
MODELS = {
    "llada": lambda: random_llada(1, dtype=torch.float64, layers=3),
    "grouped": lambda: random_llada(2, dtype=torch.float64, kv_heads=2),
    "dream": lambda: random_dream(3, dtype=torch.float64, layers=4),
}


@dataclass(frozen=True)
class Looking(Sampler):
    """Commits the best two positions and remembers what it saw (tests only)."""

    seen: tuple[list[Any], ...] = ([],)
    layers: tuple[float, float] = (0.0, 1.0)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    @property
    def attention_layers(self) -> tuple[float, float]:
        return self.layers

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        self.seen[0].append((canvas, output))
        return commit_candidates(canvas, output, best(output.p1, canvas.eligible), output.p1), state


def dense(attend: PackedAttention, layer: int, q: Tensor, k: Tensor) -> Tensor:
    """Head-averaged attention `(T, N)` of every packed token, by the textbook formula."""
    lines = []
    for group in attend._groups:
        stored, _ = attend._context(group, layer, None, q.dtype)
        for row in range(group.rows):
            span = slice(group.start + row * group.query, group.start + (row + 1) * group.query)
            keys = k[span].transpose(0, 1) if stored is None else stored[row]
            heads = []
            for head in range(q.shape[1]):
                own = keys[head * keys.shape[0] // q.shape[1]]
                heads.append((q[span, head] @ own.T / q.shape[-1] ** 0.5).softmax(-1))
            lines += list(torch.stack(heads).mean(0))
    width = max(len(line) for line in lines)
    return torch.stack([torch.nn.functional.pad(line, (0, width - len(line))) for line in lines])


def looked(model: Backbone, cache: str, requests: list[Request]) -> list[tuple[Canvas, Output]]:
    sampler = Looking(layers=(0.5, 1.0), seen=([],))
    Decoder(model, sampler, cache, debug=True).generate(requests)
    return sampler.seen[0]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.id)
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_recorded_attention_is_the_dense_one(
    name: str, cache: str, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads, shifted outputs, stored keys and chosen layers, in every turn."""
    model = MODELS[name]()
    dense_lines: list[Tensor] = []
    positions: list[Tensor] = []
    attend, forward = PackedAttention.__call__, Backbone.forward

    def spying(self: PackedAttention, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(self, layer, q, k, v)
        dense_lines.append(dense(self, layer, q, k))
        return out

    def placing(self: Backbone, ids: Tensor, places: Tensor, *rest: Any, **named: Any) -> Tensor:
        positions.append(places)
        return forward(self, ids, places, *rest, **named)

    monkeypatch.setattr(PackedAttention, "__call__", spying)
    monkeypatch.setattr(Backbone, "forward", placing)
    layers = model.info.layers
    for turn, (canvas, output) in enumerate(looked(model, cache, [request_])):
        late = range(turn * layers + int(0.5 * layers), (turn + 1) * layers)
        mean = torch.stack([dense_lines[i] for i in late]).mean(0)
        sources = (canvas.positions[output.valid] - model.info.shift).clamp(min=0)
        lines = torch.searchsorted(positions[turn], sources)
        found = output.attention[output.valid]
        torch.testing.assert_close(found, mean[lines], rtol=1e-10, atol=1e-12)
        assert not output.attention[~output.valid].any()


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_row_of_a_batch_is_recorded_as_if_alone(name: str, cache: str) -> None:
    """Rows of unequal windows and lengths, some in one group, some in groups of their own."""
    model = MODELS[name]()
    together = looked(model, cache, REQUESTS)
    lines: dict[int, list[Tensor]] = {}
    for canvas, output in together:
        for row, key in enumerate(canvas.keys.tolist()):
            lines.setdefault(key, []).append(output.attention[row][output.valid[row]])
    for request in REQUESTS:
        alone = looked(model, cache, [request])
        key = int(alone[0][0].keys)
        assert len(lines[key]) == len(alone)
        for found, (_, output) in zip(lines[key], alone, strict=True):
            expected = output.attention[output.valid]
            torch.testing.assert_close(found[:, : expected.shape[1]], expected)
            assert not found[:, expected.shape[1] :].any()


def test_recording_scores_the_watched_queries_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of all N queries of an uncached row would be N / W times as many."""
    shapes: list[tuple[int, ...]] = []
    plain = Tensor.softmax

    def spying(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append(tuple(x.shape))
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(Tensor, "softmax", spying)
    request = Request([5] * 40, gen_length=40, block_length=8)
    Decoder(random_llada(0), Looking(seen=([],))).generate(request)
    scores = [shape for shape in shapes if len(shape) == 4]
    assert {(*shape[:2], shape[3]) for shape in scores} == {(1, 4, 80)}
    assert {shape[2] for shape in scores} == set(range(1, 9))


def test_attention_with_guidance_is_refused() -> None:
    decoder = Decoder(random_llada(0), Looking(seen=([],)), cfg_scale=1.0)
    with pytest.raises(CapabilityError, match="guidance"):
        decoder.generate(REQUESTS[0])


def test_branches_read_their_context_once_and_see_it_and_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against attention row by row: each branch over a copy of the row's context and its window.

    Rows of different lengths and numbers of branches, grouped heads, in every layer and turn.
    """
    counts: set[int] = set()
    entries = packing._entries
    made: list[list[packing.Entry]] = []

    def noting(*args: Any) -> Any:
        made.append(sorted(entries(*args), key=lambda e: e.shape))
        return made[-1]

    attend = PackedAttention.__call__

    def checking(self: PackedAttention, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, start = attend(self, layer, q, k, v), 0
        for entry in made[-1]:
            span = slice(start, start := start + len(entry.plan.query))
            if entry.branches > 1 and entry.slot is not None and entry.plan.kind == "window":
                places = torch.from_numpy(entry.slot.places[entry.outside()])
                assert self._store is not None
                keys, values = (
                    torch.cat([pool[layer].data[places], x[span]])
                    for pool, x in ((self._store.keys, k), (self._store.values, v))
                )
                expected = attention(q[span], keys, values)
                torch.testing.assert_close(out[span], expected, rtol=0, atol=1e-12)
                counts.add(entry.branches)
        return out

    monkeypatch.setattr(packing, "_entries", noting)
    monkeypatch.setattr(PackedAttention, "__call__", checking)
    for name, cache in (("grouped", "dual"), ("dream", "prefix")):
        options = {"max_states": 4, "min_acceptance": 0.05}
        Decoder(
            MODELS[name](), "self_speculative+llada", cache, options=options, debug=True
        ).generate(REQUESTS)
    assert len(counts) > 1
