"""Token trees from the marginals of one forward: the best prefixes, verified together.

Letters: g positions, V vocabulary, n nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dlm_decode.errors import OptionError


@dataclass(frozen=True)
class Tree:
    """Nodes in an order where parents come first: `tokens (n,)` and `parents (n,)`, -1 at the root.

    Siblings hold different tokens.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        edges = set(zip(self.parents, self.tokens, strict=True))
        if len(edges) < len(self.tokens) or any(p >= i for i, p in enumerate(self.parents)):
            raise OptionError("a tree lists parents before children, and no child twice")

    def __len__(self) -> int:
        return len(self.tokens)

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to `node`; empty for the root, -1."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def follow(self, emitted: Sequence[int]) -> list[int]:
        """The nodes that agree with the tokens that the verifier emits at each of them.

        `emitted (n + 1,)`: the token drawn after the root, then after each node. Descending while
        the token is a child is exact, and no coupling accepts more of a fixed set.
        """
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        path: list[int] = []
        at = -1
        while (at, emitted[at + 1]) in children:
            at = children[at, emitted[at + 1]]
            path.append(at)
        return path


def best_prefixes(log_m: Tensor, budget: int) -> Tree:
    """The `budget` prefixes of largest probability under independent marginals `log_m (g, V)`.

    Best-first over ranked tokens, as in DDTree, arXiv:2604.12989: a prefix is followed by its
    best extension and its next best sibling, so that each prefix is reached once.
    """
    if budget < 1:
        raise OptionError(f"the tree's budget must be at least 1, got {budget}")
    depth, width = log_m.shape[0], min(budget, log_m.shape[1])
    scores, ids = log_m.sort(dim=-1, descending=True, stable=True)
    ranked, names = scores[:, :width].tolist(), ids[:, :width].tolist()
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, float]] = []

    def push(parent: int, level: int, rank: int, base: float) -> None:
        if level < depth and rank < width and ranked[level][rank] > -float("inf"):
            heapq.heappush(heap, (-(base + ranked[level][rank]), parent, level, rank, base))

    push(-1, 0, 0, 0.0)
    while heap and len(tokens) < budget:
        cost, parent, level, rank, base = heapq.heappop(heap)
        tokens.append(names[level][rank])
        parents.append(parent)
        push(parent, level, rank + 1, base)
        push(len(tokens) - 1, level + 1, 0, -cost)
    return Tree(tuple(tokens), tuple(parents))
