"""Trees of tensors: sampler state, and all that a turn's device part takes and gives.

Sampler state is tensors with leading B in nested tuples, lists or dicts. The other trees may hold
frozen dataclasses too, and numbers, names and the like, which are part of their structure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor


def tree_map(function: Callable[..., Tensor], tree: Any, *others: Any) -> Any:
    """`function` of each tensor of `tree` and those at the same places of `others`."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if isinstance(tree, dict):
        return {k: tree_map(function, v, *(o[k] for o in others)) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [tree_map(function, *leaves) for leaves in zip(tree, *others, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if tree is None:
        return None
    raise TypeError(f"sampler state holds a {type(tree).__name__}; tensors in containers only")


def select_rows(tree: Any, index: Tensor) -> Any:
    """The rows `index (b,)` of a tree."""
    return tree_map(lambda leaf: leaf.index_select(0, index), tree)


def where_rows(condition: Tensor, a: Any, b: Any) -> Any:
    """Rows of `a` where `condition (B,)` holds, of `b` elsewhere."""

    def pick(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition.view(-1, *[1] * (x.dim() - 1)), x, y)

    return tree_map(pick, a, b)


def flattened(tree: Any) -> tuple[list[Tensor], Hashable]:
    """Every tensor of a tree in a fixed order, and its structure.

    The structure is all but the numbers in the tensors: equal for trees that differ in those alone.
    """
    tensors: list[Tensor] = []
    return tensors, _noted(tree, tensors)


def refilled(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """The tree with the next of `tensors` in place of each of its own, in the order of
    `flattened`."""
    if isinstance(tree, Tensor):
        return next(tensors)
    parts = _parts(tree)
    if parts is None:
        return tree
    filled = [refilled(part, tensors) for part in parts]
    if isinstance(tree, dict):
        return dict(zip(tree, filled, strict=True))
    if isinstance(tree, (tuple, list)):
        return type(tree)(*filled) if hasattr(tree, "_fields") else type(tree)(filled)
    names = _field_names(tree.__class__) or ()
    changed = zip(names, filled, parts, strict=True)
    return replace(tree, **{name: new for name, new, old in changed if new is not old})


def _noted(tree: Any, tensors: list[Tensor]) -> Hashable:
    """The structure of a tree, whose tensors are added to `tensors`."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return tree.shape, tree.dtype
    parts = _parts(tree)
    if parts is None:
        return tree
    names = tuple(tree) if isinstance(tree, dict) else ()
    return type(tree), names, tuple([_noted(part, tensors) for part in parts])


def _parts(tree: Any) -> list[Any] | None:
    """What a container holds, in a fixed order; None for what is none."""
    if isinstance(tree, (tuple, list)):
        return list(tree)
    if isinstance(tree, dict):
        return list(tree.values())
    names = _field_names(tree.__class__)
    return None if names is None else [getattr(tree, name) for name in names]


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass, None for another class."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
