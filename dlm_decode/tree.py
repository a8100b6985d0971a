"""Trees of tensors: sampler state, and all that a turn's device part takes and gives.

Sampler state is tensors with leading B in nested tuples, lists or dicts. The other trees may hold
frozen dataclasses too, and numbers, names and the like, which are part of their structure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
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


def leaves(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a tree, in a fixed order."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for part in _parts(tree) or ():
            yield from leaves(part)


def structure(tree: Any) -> Hashable:
    """All of a tree but the numbers in its tensors: equal for trees that differ in those alone."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    parts = _parts(tree)
    if parts is None:
        return tree
    names = tuple(tree) if isinstance(tree, Mapping) else ()
    return type(tree), names, tuple(structure(part) for part in parts)


def refilled(tree: Any, tensors: Iterator[Tensor]) -> Any:
    """The tree with the next of `tensors` in place of each of its own; `leaves` has their order."""
    if isinstance(tree, Tensor):
        return next(tensors)
    parts = _parts(tree)
    if parts is None:
        return tree
    filled = [refilled(part, tensors) for part in parts]
    if isinstance(tree, Mapping):
        return dict(zip(tree, filled, strict=True))
    if isinstance(tree, (tuple, list)):
        return type(tree)(*filled) if hasattr(tree, "_fields") else type(tree)(filled)
    names = (field.name for field in fields(tree))
    changed = zip(names, filled, parts, strict=True)
    return replace(tree, **{name: new for name, new, old in changed if new is not old})


def _parts(tree: Any) -> list[Any] | None:
    """What a container holds, in a fixed order; None for what is none."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, (tuple, list)):
        return list(tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in fields(tree)]
    return None
