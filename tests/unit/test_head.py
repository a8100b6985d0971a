"""Head statistics against a plain computation in double precision, whatever the tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_decode.head import HeadPlan, Scored, Tile, statistics, tile_width
from dlm_decode.noise import token_gumbel
from dlm_decode.types import Draw

VOCAB, MASK, ENDS = 1100, 700, (3, 901)
ALL = frozenset({"p2", "entropy", "filtered"})
TILES = [1, 4 * 7 * 512, 1 << 30]
"""Budgets for 7 positions that give tiles of 256 and 512 columns, and all 1100 in one."""


def plan_of(needs: frozenset[str] = ALL, draw: Draw | None = None, **changes: Any) -> HeadPlan:
    return replace(HeadPlan(VOCAB, needs, draw or Draw(), MASK, ENDS), **changes)


def scored_of(count: int = 7, **changes: Any) -> Scored:
    n = torch.arange(count)
    return replace(Scored(n * 31 + 5, n + 40, n % 3), **changes)


def logits_of(kind: str = "smooth", count: int = 7, seed: int = 0) -> Tensor:
    """fp64 logits: smooth; in steps of a quarter, so that best and second tie; or one-hot."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(count, VOCAB, generator=generator, dtype=torch.float64)
    if kind == "ties":
        return (logits.clamp(max=8) * 4).round() / 4
    if kind == "flat":
        return torch.zeros_like(logits)
    if kind == "sharp":
        return logits * 300
    return logits


KINDS = ["smooth", "ties", "flat", "sharp"]


def tile_of(logits: Tensor) -> Tile:
    return lambda start, stop: logits[:, start:stop].clone()


def permitted(logits: Tensor, ban: Tensor | None = None) -> Tensor:
    """The logits with what cannot be chosen at -inf."""
    allowed = logits.clone()
    allowed[:, MASK] = -torch.inf
    if ban is not None:
        for end in ENDS:
            allowed[:, end] = allowed[:, end].masked_fill(ban, -torch.inf)
    return allowed


def reference(logits: Tensor) -> dict[str, Tensor]:
    """Plain statistics of permitted logits; of equal ids the smallest is the best."""
    p = logits.softmax(-1)
    ordered = p.sort(dim=-1, descending=True, stable=True)
    return {
        "top1": ordered.indices[:, 0],
        "p1": ordered.values[:, 0],
        "p2": ordered.values[:, 1],
        "entropy": torch.special.entr(p).sum(-1),
        "lse": logits.logsumexp(-1),
    }


def assert_stats(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    for name, value in expected.items():
        if value.dtype.is_floating_point:
            torch.testing.assert_close(
                found[name].double(), value.double(), rtol=atol, atol=atol, msg=name
            )
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_are_those_of_a_plain_softmax(kind: str, tile_bytes: int) -> None:
    """In fp64 to 1e-12, ids exactly, ties to the smallest id also across tiles."""
    logits = logits_of(kind)
    found = statistics(tile_of(logits), scored_of(), plan_of(tile_bytes=tile_bytes))
    assert_stats(found, reference(permitted(logits)), 1e-11)
    for name in ("q1", "q2", "q_entropy"):
        raw = {"q1": "p1", "q2": "p2", "q_entropy": "entropy"}[name]
        assert torch.equal(found[name], found[raw]), "at temperature 0 q is p"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["smooth", "ties"])
def test_half_precision_logits_are_summed_in_fp32(kind: str, dtype: torch.dtype) -> None:
    logits = logits_of(kind).to(dtype)
    found = statistics(tile_of(logits), scored_of(), plan_of(tile_bytes=1))
    assert all(v.dtype in (torch.float32, torch.int64) for v in found.values())
    assert_stats(found, reference(permitted(logits.double())), 3e-5)


def test_tiles_of_each_size_are_really_tried() -> None:
    widths = [tile_width(7, plan_of(tile_bytes=b), torch.device("cpu"), 4) for b in TILES]
    assert widths[0] == 256 and widths[1] == 512 and widths[2] >= 1024
    assert VOCAB % 256, "the last tile is a partial one"


def test_the_best_id_survives_ties_between_tiles() -> None:
    """Negative control: in the ties used here the greatest id would be another one."""
    logits = permitted(logits_of("ties"))
    last = VOCAB - 1 - logits.flip(-1).argmax(-1)
    assert (last != reference(logits)["top1"]).any()
    assert (reference(logits)["p1"] == reference(logits)["p2"]).any()


# ----------------------------------------------------------------------------- what is forbidden


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("needs", [ALL, ALL | {"logits"}], ids=["tiled", "whole"])
def test_the_mask_id_has_no_probability(needs: frozenset[str], temperature: float) -> None:
    """Even where the model is sure of it, which would hang a loop or leave masks in the text."""
    logits = logits_of()
    logits[:, MASK] = 60.0
    plan = plan_of(needs, Draw(temperature), tile_bytes=1)
    found = statistics(tile_of(logits), scored_of(), plan)
    assert (found["top1"] != MASK).all()
    assert temperature == 0 or (found["sampled"] != MASK).all()
    assert_stats(found, reference(permitted(logits)), 1e-11)
    if "logits" in needs:
        assert found["logits"][:, MASK].isneginf().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_end_ids_have_no_probability_where_they_are_banned(temperature: float) -> None:
    ban = torch.arange(7) % 2 == 0
    logits = logits_of()
    logits[:, ENDS[0]], logits[:, ENDS[1]] = 30.0, 31.0
    plan = plan_of(draw=Draw(temperature), tile_bytes=1)
    found = statistics(tile_of(logits), scored_of(ban_end=ban), plan)
    chosen = found["sampled"] if temperature else found["top1"]
    assert not torch.isin(chosen[ban], torch.tensor(ENDS)).any()
    assert torch.isin(chosen[~ban], torch.tensor(ENDS)).all()
    assert_stats(found, reference(permitted(logits, ban)), 1e-11)


@pytest.mark.parametrize("draw", [Draw(), Draw(1.0), Draw(0.6), Draw(0.6, top_p=0.9)], ids=str)
def test_without_confidence_every_end_id_is_last_at_any_temperature(draw: Draw) -> None:
    """The published loop sets -inf through an alias: at T = 0 the noisy logits are the logits.

    There it zeroes both end ids; at T > 0 the first of them goes to the copy that is thrown away
    and keeps its confidence. Here the intent holds always: what would be an end id has none, its
    token stays what it is, and no other position changes.
    """
    where = torch.tensor([1, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
    logits = logits_of()
    logits[0, ENDS[0]] = logits[1, ENDS[1]] = logits[4, ENDS[0]] = 90.0
    plan = plan_of(draw=draw, tile_bytes=1)
    plain = statistics(tile_of(logits), scored_of(), plan)
    found = statistics(tile_of(logits), scored_of(demote_end=where), plan)
    ended = torch.tensor([1, 1, 0, 0, 0, 0, 0], dtype=torch.bool)
    for name in ("p1", "p2", "q1", "p_sampled", "q_sampled"):
        if name in found:
            assert (found[name][ended] == 0).all()
    for name in ("entropy", "q_entropy"):
        assert (found[name][ended] >= math.log(VOCAB) - 1e-6).all()
    for name, value in plain.items():
        assert torch.equal(found[name][~ended], value[~ended])
    tokens = "sampled" if draw.temperature else "top1"
    assert torch.equal(found[tokens], plain[tokens])
    assert found[tokens][:2].tolist() == list(ENDS)


# -------------------------------------------------------------------------------------- drawing


@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_a_draw_is_the_best_of_logits_and_noise(temperature: float, tile_bytes: int) -> None:
    """And its probabilities are those of the raw and of the tempered law."""
    logits, scored = logits_of("ties"), scored_of()
    found = statistics(
        tile_of(logits), scored, plan_of(draw=Draw(temperature), tile_bytes=tile_bytes)
    )
    allowed = permitted(logits)
    noise = token_gumbel(scored.keys, scored.positions, scored.commits, 0, VOCAB)
    drawn = (allowed / temperature + noise).argmax(-1)
    assert torch.equal(found["sampled"], drawn)
    p = allowed.softmax(-1).gather(1, drawn[:, None])[:, 0]
    tempered = (allowed / temperature).softmax(-1)
    q = tempered.gather(1, drawn[:, None])[:, 0]
    torch.testing.assert_close(found["p_sampled"], p, rtol=1e-11, atol=0)
    torch.testing.assert_close(found["q_sampled"], q, rtol=1e-11, atol=0)
    q_stats = reference(allowed / temperature)
    expected = {"q1": q_stats["p1"], "q2": q_stats["p2"], "q_entropy": q_stats["entropy"]}
    assert_stats(found, expected, 1e-10)
    assert_stats(found, reference(allowed), 1e-10)


def plainly_filtered(logits: Tensor, top_p: float | None, top_k: int | None) -> list[set[int]]:
    """Ids that may be drawn, row by row, by the words of the definition."""
    rows = []
    for row in logits.softmax(-1):
        order = sorted(range(len(row)), key=lambda v: (-float(row[v]), v))
        kept, mass = [], 0.0
        for v in order:
            if top_p is not None and mass > top_p:
                break
            kept.append(v)
            mass += float(row[v])
        if top_k is not None:
            kept = [v for v in kept if float(row[v]) >= float(row[kept[min(top_k, len(kept)) - 1]])]
        rows.append({v for v in kept if float(row[v]) > 0})
    return rows


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.9, None), (0.4, None), (None, 5), (None, 1), (0.8, 4), (1.0, None)]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_top_p_and_top_k_are_their_definitions(
    temperature: float, top_p: float | None, top_k: int | None
) -> None:
    """q is the tempered law over the ids kept, and no draw ever leaves them."""
    draw = Draw(temperature, top_p=top_p, top_k=top_k)
    logits = logits_of()
    allowed = permitted(logits) / (temperature or 1.0)
    kept = plainly_filtered(allowed, top_p, top_k)
    inside = torch.zeros(7, VOCAB, dtype=torch.bool)
    for row, ids in enumerate(kept):
        inside[row, list(ids)] = True
    found = statistics(tile_of(logits), scored_of(), plan_of(draw=draw))
    q_stats = reference(allowed.masked_fill(~inside, -torch.inf))
    expected = {"q1": q_stats["p1"], "q2": q_stats["p2"], "q_entropy": q_stats["entropy"]}
    if temperature or draw.filters:
        assert_stats(found, expected, 1e-9)
    assert_stats(found, reference(permitted(logits)), 1e-9)
    if temperature:
        for seed in range(30):
            keys = scored_of().keys + 1000 * seed
            drawn = statistics(tile_of(logits), scored_of(keys=keys), plan_of(draw=draw))["sampled"]
            assert inside.gather(1, drawn[:, None]).all()


def test_shares_of_drawn_tokens_are_those_of_the_filtered_law() -> None:
    count = 20_000
    row = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -8.0], dtype=torch.float64)
    n = torch.arange(count)
    plan = HeadPlan(6, frozenset(), Draw(0.8, top_p=0.9), mask_id=5)
    scored = Scored(n * 7 + 1, n % 100, n % 7)
    drawn = statistics(lambda a, b: row[a:b].repeat(count, 1), scored, plan)["sampled"]
    shares = torch.bincount(drawn, minlength=6) / count
    kept = plainly_filtered((row / 0.8)[None, :5], 0.9, None)[0]
    law = torch.zeros(6, dtype=torch.float64)
    ids = sorted(kept)
    law[ids] = (row / 0.8)[ids].softmax(-1)
    spread = 4 * (law * (1 - law) / count).sqrt()
    assert ((shares - law).abs() <= spread).all()
    untempered = torch.zeros(6, dtype=torch.float64)
    untempered[ids] = row[ids].softmax(-1)
    assert not ((shares - untempered).abs() <= spread).all()


# ------------------------------------------------------------------------ logits, probes, memory


@pytest.mark.parametrize("draw", [Draw(), Draw(0.7)], ids=str)
def test_rows_of_logits_give_the_same_statistics_as_tiles(draw: Draw) -> None:
    tiled = statistics(tile_of(logits_of()), scored_of(), plan_of(draw=draw, tile_bytes=1))
    whole = statistics(tile_of(logits_of()), scored_of(), plan_of(ALL | {"logits"}, draw))
    assert torch.equal(whole.pop("logits"), permitted(logits_of()))
    assert set(whole) == set(tiled)
    assert_stats(whole, tiled, 1e-11)


@pytest.mark.parametrize("needs", [frozenset[str](), frozenset({"logits"})])
@pytest.mark.parametrize("tile_bytes", TILES)
def test_probed_logits_are_those_asked_for(tile_bytes: int, needs: frozenset[str]) -> None:
    """In any tile, twice if asked twice, the mask's as -inf."""
    probe = torch.tensor([[0, 255, 256, 511, 512, 1099, 0, MASK]]).repeat(7, 1)
    logits = logits_of()
    found = statistics(
        tile_of(logits), scored_of(probe=probe), plan_of(needs, tile_bytes=tile_bytes)
    )
    assert torch.equal(found["probed"], permitted(logits).gather(1, probe))


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor made meanwhile has."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.elements = max(self.elements, tensor.numel())
        return result


def tensors_in(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from tensors_in(part)


@pytest.mark.parametrize("draw", [Draw(), Draw(1.0), Draw(0.7)], ids=str)
@pytest.mark.parametrize("tile_bytes", [1, 4 * 50 * 1024])
def test_memory_is_bounded_by_one_tile(tile_bytes: int, draw: Draw) -> None:
    """No tensor is larger than tile x positions; all logits would be 16 times that.

    Negative control: a sampler that asks for logits does make them.
    """
    count, vocab = 50, 16384
    weights = torch.randn(vocab, 4)
    hidden = torch.randn(count, 4)
    plan = HeadPlan(vocab, ALL, draw, MASK, ENDS, tile_bytes=tile_bytes)
    width = tile_width(count, plan, torch.device("cpu"), 4)
    assert vocab // width >= 16

    def tile(start: int, stop: int) -> Tensor:
        return hidden @ weights[start:stop].T

    with Largest() as most:
        statistics(tile, scored_of(count), plan)
    assert most.elements <= count * width
    with Largest() as most:
        statistics(tile, scored_of(count), replace(plan, needs=ALL | {"logits"}))
    assert most.elements == count * vocab


@pytest.mark.parametrize("needs", [ALL, ALL | {"logits"}], ids=["tiled", "whole"])
@pytest.mark.parametrize("draw", [Draw(), Draw(0.7), Draw(1.0, top_p=0.9, top_k=4)], ids=str)
def test_nothing_waits_for_the_device(draw: Draw, needs: frozenset[str]) -> None:
    """Under fake tensors, which have no values to read, statistics can still be traced."""
    flag = torch.ones(7, dtype=torch.bool)
    scored = scored_of(ban_end=flag, demote_end=flag, probe=torch.zeros(7, 2, dtype=torch.long))
    with FakeTensorMode() as mode:
        fake = Scored(**{name: mode.from_tensor(value) for name, value in vars(scored).items()})
        logits = mode.from_tensor(logits_of())
        found = statistics(tile_of(logits), fake, plan_of(needs, draw, tile_bytes=1))
    assert found["p1"].shape == (7,)
