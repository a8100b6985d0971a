"""Sampler state is a tree: tensors with leading B in nested tuples, lists or dicts."""

from __future__ import annotations

from collections.abc import Callable
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
