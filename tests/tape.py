"""A CUDA graph's likeness on the CPU: the operators of one call, run again on the same tensors.

Like a graph, a tape knows nothing of the Python code that it was made from: whatever that code took
from elsewhere than the buffers is as it was when the tape was made. Reading values on the host, and
sending values from there, are refused, as they are while a graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlm_decode.api import Decoder
from dlm_decode.graphs import Graphs

READS = {
    *("item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"),
    *("nonzero", "argwhere", "masked_select", "_unique2", "unique_dim", "bincount"),
}
"""Operators that hand values, or sizes that follow from values, to the host."""
SENDS = {"lift_fresh"}
"""What a tensor made of numbers of the host goes through, be it from a list or an array."""


class Refusing(TorchDispatchMode):
    """Raises where a captured function may not go, and notes every operator with its results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            raise RuntimeError(f"{name} reads a value on the host")
        if name in SENDS:
            raise RuntimeError("numbers of the host are sent to the device")
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if any(i is not None and i.dtype == torch.bool for i in indices):
            raise RuntimeError("an index by a mask has a size that follows from values")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def tape(run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """A `Capture`: replays put every operator's results where they were the first time."""
    with Refusing() as seen:
        results = run()
    calls = [call for call in seen.calls if not is_view(*call)]

    def replay() -> None:
        for func, args, kwargs, kept in calls:
            for old, new in zip(tensors(kept), tensors(func(*args, **kwargs)), strict=True):
                if storage(old) != storage(new):
                    old.copy_(new)

    return replay, results


def is_view(func: Any, args: Any, kwargs: Any, made: Any) -> bool:
    """Whether a call computes nothing: what it gave is, and stays, part of what it was given."""
    given = {storage(t) for t in tensors((args, kwargs))}
    return not func._schema.is_mutable and all(storage(t) in given for t in tensors(made))


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def graphed(*args: Any, most: int = 16, **kwargs: Any) -> tuple[Decoder, Graphs]:
    """A decoder that replays tapes, and its graphs."""
    decoder, graphs = Decoder(*args, **kwargs), Graphs(tape, most=most)
    decoder.engine = replace(decoder.engine, graphs=graphs)
    return decoder, graphs
