"""What a window turn computes with: nothing but attention reads a tensor as long as the row."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlm_decode.api import Decoder
from dlm_decode.models import toy
from dlm_decode.types import Request

LENGTH = 107
"""Tokens of a row: a prime, so that no other size is it by chance."""


class Touching(TorchDispatchMode):
    """Counts the operators that compute with a tensor that has an axis of `length`."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, Tensor)]
        if not func.is_view and any(self.length in t.shape for t in tensors):
            self.found[func.overloadpacket.__name__] += 1
        return made


def touching_in_second_turn(cache: str, rows: int, options: dict[str, Any]) -> Counter[str]:
    model = toy.random_llada(0, layers=2, hidden=16, heads=2, vocab=40, max_positions=128)
    decoder = Decoder(model, "threshold", cache, max_batch_size=rows, options=options)
    requests = [Request([1 + i] * (LENGTH - 24), 24, block_length=8) for i in range(rows)]
    frames = decoder.stream(requests)
    assert [next(frames).turn for _ in range(rows)] == [1] * rows
    with Touching(LENGTH) as touching:
        assert [next(frames).turn for _ in range(rows)] == [2] * rows
    return touching.found


@pytest.mark.parametrize("rows", [1, 3])
def test_a_window_turn_reads_the_row_in_attention_alone(rows: int) -> None:
    """One call a layer for rows of one shape; projections, norms and writes see the window only."""
    found = touching_in_second_turn("dual", rows, {})
    assert len(found) == 1 and sum(found.values()) == 2, found
    assert "attention" in next(iter(found))


def attention_calls(lengths: list[int], **more: Any) -> int:
    """Calls of attention in the second turn of rows of these prompts under `dual`, two layers."""
    model = toy.random_llada(0, layers=2, hidden=16, heads=2, vocab=40, max_positions=128)
    decoder = Decoder(
        model,
        "threshold",
        "dual",
        max_batch_size=len(lengths),
        options={"threshold": 1.0},
        **more,
    )
    frames = decoder.stream([Request([1] * n, 16, block_length=8) for n in lengths])
    assert [next(frames).turn for _ in lengths] == [1] * len(lengths)
    with Calls() as calls:
        assert [next(frames).turn for _ in lengths] == [2] * len(lengths)
    return calls.attention


class Calls(TorchDispatchMode):
    """Counts calls of attention."""

    attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attention += "attention" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def test_ragged_rows_are_attended_in_one_call() -> None:
    """Rows of nearly one length get room of one size, so that one view holds all their keys."""
    assert attention_calls([80, 71, 90, 84]) == 2
    assert attention_calls([80, 71, 90, 84], cfg_scale=1.0) == 2
    assert attention_calls([80, 9, 80, 9]) == 4, "nine tokens beside eighty would be padding"
    assert attention_calls([80, 9, 70, 90]) == 6, "slots are as long as their rows"


def test_a_full_forward_does_touch_it_elsewhere() -> None:
    """Negative control: without a cache, and in a refresh, the layers compute every position."""
    assert len(touching_in_second_turn("none", 1, {})) > 5
    assert len(touching_in_second_turn("dual", 1, {"refresh_every": 1})) > 5


def test_logits_of_the_window_alone_are_formed() -> None:
    """Also in a refresh: no tensor holds the vocabulary for every position of the row."""
    vocab = 4099
    model = toy.random_llada(0, layers=1, hidden=16, heads=2, vocab=vocab, max_positions=128)
    decoder = Decoder(model, "threshold", "dual")
    request = Request([1] * (LENGTH - 24), 24, block_length=8)

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor) and not func.is_view:
                    self.elements = max(self.elements, tensor.numel())
            return made

    with Largest() as most:
        next(decoder.stream(request))
    assert most.elements <= 8 * vocab
