"""Keyed noise: the generator's published vectors, its independence of tiling, its laws."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlm_decode.noise import (
    ORDER,
    TOKENS,
    _gumbel,
    _unit,
    gumbel,
    philox,
    request_key,
    token_gumbel,
    uniform,
)
from tests.unit.sampler_cases import make_canvas

VECTORS = [
    # Key and four counters, then the four words: Random123's known answers for Philox 4x32-10.
    ("0000000000000000", "00000000" * 4, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffffffffffff", "ffffffff" * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("299f31d0a4093822", "243f6a8885a308d313198a2e03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("key", "counters", "words"), VECTORS)
def test_philox_gives_the_published_words(key: str, counters: str, words: str) -> None:
    number = int(key, 16)
    signed = number - 2**64 if number >= 2**63 else number  # the tensor holds 64 bits, signed
    parts = [torch.tensor([int(counters[i : i + 8], 16)]) for i in range(0, 32, 8)]
    found = philox(torch.tensor([signed]), *parts)
    assert [f"{int(word):08x}" for word in found] == words.split()


def test_one_bit_of_any_input_changes_every_word() -> None:
    inputs = [torch.tensor([n]) for n in (0x1234567890ABCDEF, 1, 2, 3, 4)]
    plain = philox(*inputs)
    for i in range(5):
        flipped = [x ^ (1 << 7) if i == j else x for j, x in enumerate(inputs)]
        assert all((a != b).all() for a, b in zip(plain, philox(*flipped), strict=True))


def noise(start: int, stop: int, *, key: int = 5, position: int = 3, commits: int = 2) -> Tensor:
    keys, positions, turns = (torch.tensor([n]) for n in (key, position, commits))
    return token_gumbel(keys, positions, turns, start, stop)[0]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 59), max_size=6, unique=True))
def test_any_tiling_of_the_vocabulary_gives_the_same_noise(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 60]
    tiles = [noise(a, b) for a, b in pairwise(edges)]
    assert torch.equal(torch.cat(tiles), noise(0, 60))


@pytest.mark.parametrize("change", [{"key": 6}, {"position": 4}, {"commits": 3}])
def test_noise_differs_by_key_position_and_commits(change: dict[str, int]) -> None:
    assert not (noise(0, 64) == noise(0, 64, **change)).any()


def test_rows_of_a_batch_have_the_noise_they_have_alone() -> None:
    keys, positions, commits = (torch.tensor(x) for x in ([5, 9], [3, 8], [2, 0]))
    both = token_gumbel(keys, positions, commits, 4, 23)
    assert torch.equal(both[0], noise(4, 23))
    assert torch.equal(both[1], noise(4, 23, key=9, position=8, commits=0))


def test_streams_are_unlike_one_another() -> None:
    """The order of positions does not repeat the numbers that tokens are drawn with."""
    canvas = make_canvas(rows=2, width=50)
    assert not (gumbel(canvas, ORDER) == gumbel(canvas, TOKENS)).any()
    assert not (uniform(canvas, ORDER) == uniform(canvas, 7)).any()


def test_position_noise_is_keyed_by_the_row_and_by_its_commits() -> None:
    canvas = make_canvas(rows=2, width=50)
    first = uniform(canvas, ORDER)
    assert torch.equal(first, uniform(canvas, ORDER))
    assert not (first[0] == first[1]).any()
    later = replace(canvas, commits=canvas.commits + 1)
    assert not (first == uniform(later, ORDER)).any()
    shorter = replace(canvas, positions=canvas.positions[:, 7:])
    assert torch.equal(uniform(shorter, ORDER), first[:, 7:])


def test_request_keys_tell_apart_seed_ids_and_sample() -> None:
    keys = [
        request_key(0, [1, 2]),
        request_key(1, [1, 2]),
        request_key(-1, [1, 2]),
        request_key(0, [2, 1]),
        request_key(0, [1, 2, 0]),
        request_key(0, [1, 2], sample=1),
        request_key(2**63 - 1, [1, 2]),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    assert request_key(0, [1, 2]) == keys[0]


# --------------------------------------------------------------------------------------- the laws

COUNT = 1 << 20


def many() -> Tensor:
    keys = torch.arange(64) * 7919 + 1
    return token_gumbel(keys, keys % 13, keys % 5, 0, COUNT // 64).flatten().double()


def kolmogorov_smirnov(sample: Tensor, cdf: Tensor) -> float:
    """Greatest distance of the sample's distribution from the one whose `cdf` it is sorted by."""
    n = len(sample)
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    return float(torch.maximum((steps - cdf).abs(), (cdf - steps + 1 / n).abs()).max())


def test_gumbel_noise_has_the_moments_and_the_shape_of_its_law() -> None:
    """Mean Euler's constant, variance pi^2 / 6, distances below the 0.1% point of the KS law."""
    x = many().sort().values
    deviation = math.pi / math.sqrt(6)
    assert abs(x.mean() - 0.5772156649) < 4 * deviation / math.sqrt(COUNT)
    assert abs(x.var() / deviation**2 - 1) < 4 * math.sqrt(4.4 / COUNT)  # excess kurtosis 2.4
    limit = 1.95 / math.sqrt(COUNT)
    assert kolmogorov_smirnov(x, (-(-x).exp()).exp()) < limit
    assert kolmogorov_smirnov(x, (-(-(x * 1.01)).exp()).exp()) > limit, "the test sees 1%"


def test_uniform_noise_is_uniform_and_open() -> None:
    u = uniform(make_canvas(rows=64, width=1 << 12), ORDER).flatten().double()
    assert u.min() > 0 and u.max() < 1
    assert kolmogorov_smirnov(u.sort().values, u.sort().values) < 1.95 / math.sqrt(len(u))


def test_neighbouring_positions_ids_and_turns_are_uncorrelated() -> None:
    n = 1 << 16
    ids = torch.arange(n)
    one = torch.ones_like(ids)
    columns = [
        token_gumbel(one[:1], one[:1], one[:1], 0, n)[0],
        token_gumbel(one, ids, one, 3, 4)[:, 0],
        token_gumbel(one, one, ids, 3, 4)[:, 0],
        token_gumbel(ids, one, one, 3, 4)[:, 0],
    ]
    for x in columns:
        pairs = torch.stack((x[:-1], x[1:]))
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 4.5 / math.sqrt(n)


def test_no_noise_is_infinite() -> None:
    """The words nearest to 0 and to 1: +inf would make a forbidden id win, or 0 * inf a NaN."""
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    assert torch.isfinite(_gumbel(words)).all()
    assert (_gumbel(words).diff() < 0).logical_or(_gumbel(words).diff() == 0).all()
    assert _gumbel(words)[0] > 22 and _gumbel(words)[-1] < -2.8
    assert ((_unit(words) > 0) & (_unit(words) < 1)).all()


def test_drawing_by_noise_follows_the_softmax() -> None:
    """argmax(logit + noise) takes id v with probability softmax(logit)_v."""
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf])
    n = 200_000
    ids = torch.arange(n)
    draws = (logits + token_gumbel(ids * 31 + 7, ids, ids % 3, 0, 5)).argmax(-1)
    shares = torch.bincount(draws, minlength=5) / n
    p = logits.softmax(-1)
    assert ((shares - p).abs() <= 4 * (p * (1 - p) / n).sqrt()).all()
    assert shares[4] == 0
    assert not ((shares - p.roll(1)).abs() <= 4 * (p * (1 - p) / n).sqrt()).all()
