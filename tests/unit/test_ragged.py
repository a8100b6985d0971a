"""Rows of several lengths in one call give what a call for each group gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from dlm_decode import attention
from dlm_decode import ragged as ragged_module
from dlm_decode.api import Decoder
from dlm_decode.errors import OptionError
from dlm_decode.ragged import BLOCK, VARIABLE, Ragged, attend, pays, ragged
from dlm_decode.storage import Storage
from dlm_decode.types import Request
from tests.contract.cases import model_of

REQUESTS = [
    Request([3, 5, 7, 2], 8, block_length=4, stop_at_eos=False),
    Request([9, 1], 9, block_length=4, stop_at_eos=False),
    Request([3, 5, 7, 2, 8, 8], 5, block_length=3, suffix_ids=[6, 11]),
]


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention as plain operators: its eager path traces itself otherwise."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    yield
    pays.cache_clear()


def of_rows(rows: list[tuple[int, list[int]]], keys: int) -> Ragged:
    given = [(begin, np.array(ends)) for begin, ends in rows]
    return ragged(given, start=0, stored=True, keys=keys, send=torch.from_numpy)


def seen(part: Ragged) -> Tensor:
    """Which key each token sees, `(T, S)`."""
    at = torch.arange(part.keys)
    return (at >= part.begin[:, None]) & (at < part.end[:, None])


def test_tokens_see_their_runs_of_keys() -> None:
    """Against plain attention with a mask, with shared heads, in fp64."""
    part = of_rows([(0, [9, 9]), (40, [41, 45, 80]), (200, [299] * 3)], keys=300)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, 6, generator=generator, dtype=torch.float64)
        for n, heads in ((8, 4), (300, 2), (300, 2))
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=seen(part), enable_gqa=True
    )
    torch.testing.assert_close(
        attend(part, q, k, v), expected[0].transpose(0, 1), rtol=1e-10, atol=1e-10
    )


def test_no_block_with_a_key_that_is_seen_is_left_out() -> None:
    """The kernel skips blocks that are not named; the eager path does not, so they are compared."""
    rows = [(37 * i, [37 * i + 60 + j % 7 for j in range(50)]) for i in range(9)]
    part = of_rows(rows, keys=1000)
    named = torch.zeros(part.blocks.shape[-2:], dtype=torch.bool)
    for line, (count, blocks) in enumerate(zip(part.counts[0, 0], part.blocks[0, 0], strict=True)):
        named[line, blocks[:count].long()] = True
    tokens, keys = (-(-n // BLOCK) * BLOCK for n in (450, 1000))
    whole = torch.zeros(tokens, keys, dtype=torch.bool)
    whole[:450, :1000] = seen(part)
    touched = whole.view(tokens // BLOCK, BLOCK, -1, BLOCK).any(3).any(1)
    assert not (touched & ~named).any()
    assert not named.all()


def noted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether stored keys were read, for each call."""
    calls: list[bool] = []

    def noting(part: Ragged, *tensors: Tensor) -> Tensor:
        calls.append(part.stored)
        return attend(part, *tensors)

    monkeypatch.setattr(attention, "attend", noting)
    return calls


@pytest.mark.parametrize(
    ("sampler", "cache", "model", "more", "stored"),
    [
        ("threshold", "dual", "llada", {}, {False, True}),
        ("llada", "delayed", "dream", {}, {False, True}),
        ("threshold", "none", "llada", {"cfg_scale": 1.0}, {False}),
        ("llada", "block_causal", "sdar", {}, {True}),
        ("threshold", "dual", "llada", {"storage": Storage(dtype="float32")}, {False}),
        ("self_speculative+llada", "prefix", "llada", {}, {False, True}),
        ("dos", "dual", "llada", {}, {False, True}),
    ],
)
def test_decodings_are_the_same(
    sampler: str,
    cache: str,
    model: str,
    more: dict[str, Any],
    stored: set[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged rows, blocks and shifts; what can't be taken together goes the other way."""
    decoder = Decoder(model_of(model), sampler, cache, max_batch_size=3, **more)
    expected = decoder.generate(REQUESTS)
    calls = noted(monkeypatch)
    monkeypatch.setenv(VARIABLE, "flex")
    found = decoder.generate(REQUESTS)
    assert set(calls) == stored
    for a, b in zip(found, expected, strict=True):
        assert a.ids == b.ids
        for x, y in zip(a.trace.steps, b.trace.steps, strict=True):
            assert (x.positions, x.tokens) == (y.positions, y.tokens)
            assert x.confidence == pytest.approx(y.confidence, rel=1e-6)


def test_by_default_and_automatically_on_a_cpu_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = noted(monkeypatch)
    for name in (None, "sdpa", "auto"):
        monkeypatch.delenv(VARIABLE, raising=False)
        if name is not None:
            monkeypatch.setenv(VARIABLE, name)
        Decoder(model_of("llada"), "threshold", "dual").generate(REQUESTS)
    assert calls == []
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(OptionError, match="DLM_ATTENTION must be one of sdpa, flex, auto"):
        Decoder(model_of("llada"), "threshold", "dual").generate(REQUESTS)


def test_it_is_chosen_where_it_agrees_and_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    given = model_of("llada").info, torch.device("cpu"), torch.float32
    times = iter([1.0, 2.0, 2.0, 1.0])
    monkeypatch.setattr(ragged_module, "_seconds", lambda run: next(times))
    assert pays(*given)
    pays.cache_clear()
    assert not pays(*given)


def test_a_kernel_that_differs_or_fails_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = model_of("llada").info, torch.device("cpu"), torch.float32
    monkeypatch.setattr(ragged_module, "attend", lambda part, q, k, v: 0 * q)
    with pytest.warns(UserWarning, match="not used on cpu: its results differ"):
        assert not pays(*given)
    pays.cache_clear()
    monkeypatch.setattr(ragged_module, "attend", lambda part, q, k, v: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError"):
        assert not pays(*given)
