"""Which future states to forward: draft graphs, and how many drafts are worth their cost.

Letters: B rows, K drafted states, W window, D nodes of a graph, I the highest rank in it. A graph
is read on the host once; the rest is tensor code that does not sync.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlm_decode.errors import OptionError
from dlm_decode.scores import confidence, ranks
from dlm_decode.types import Canvas, Output

BUNDLED_GRAPH = Path(__file__).parent / "assets" / "draft_graph.json"
"""A graph learnt from the bundled model, for whoever names none."""

Node = tuple[tuple[int, int], ...]
"""What a draft fills in: pairs (i, j), i the rank of a masked position, j that of its token."""


@dataclass(frozen=True)
class DraftGraph:
    """The states to draft, as sets of (i, j) over what is masked when they are drafted.

    Spiffy, "Multiplying Diffusion LLM Acceleration via Lossless Speculative Decoding",
    arXiv:2509.18085: i ranks masked positions by confidence, j the tokens of a position, from 1.
    An edge leads from a node to every node that contains it, so that a node can have several
    parents; nothing needs to be stored for that. Derived: ranks are counted after the step that
    needs no verification, so Spiffy's {(1,1)} of a one-token-a-step sampler is the empty set here,
    left out; j = 1 is the token that the position would take, drawn or best; j is at most 2.
    """

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise OptionError("a draft graph needs at least one node, got none")
        for node in self.nodes:
            _check_node(node)
        object.__setattr__(self, "nodes", tuple(tuple(sorted(node)) for node in self.nodes))
        if len(set(self.nodes)) < len(self.nodes):
            raise OptionError("the nodes of a draft graph must differ, got one of them twice")

    @property
    def second(self) -> bool:
        """Whether second-best tokens are drafted."""
        return any(j > 1 for node in self.nodes for _, j in node)

    @property
    def reach(self) -> int:
        """I: the highest rank of a position in any node."""
        return max(i for node in self.nodes for i, _ in node)

    def first(self, count: int) -> DraftGraph:
        """The graph of the first `count` nodes, at least one."""
        return DraftGraph(self.nodes[: max(count, 1)])


def _check_node(node: Any) -> None:
    pairs = isinstance(node, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int for n in pair)
        for pair in node
    )
    if not pairs or not node or min(i for i, _ in node) < 1 or {j for _, j in node} - {1, 2}:
        raise OptionError(
            f"a node of a draft graph must be pairs (i, j) with i >= 1 and j 1 or 2, got {node!r}"
        )
    if len({i for i, _ in node}) < len(node):
        raise OptionError(f"a node of a draft graph must name a position once, got {node!r}")


@cache
def read_graph(path: str) -> DraftGraph:
    """The graph in a JSON file `{"nodes": [[[i, j], ...], ...]}`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        nodes = content["nodes"]
        return DraftGraph(tuple(tuple(tuple(pair) for pair in node) for node in nodes))
    except OSError as error:
        raise OptionError(f"graph {path!r} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, OptionError):
            raise OptionError(f"graph {path!r}: {error}") from None
        raise OptionError(f'graph {path!r} must be JSON with "nodes", a list of nodes') from None


def write_graph(path: str | Path, graph: DraftGraph, about: dict[str, Any]) -> None:
    """Save a graph; `about` says what it was learnt from."""
    nodes = ",\n  ".join(json.dumps(node) for node in graph.nodes)
    text = f'{{"about": {json.dumps(about)},\n "nodes": [\n  {nodes}\n ]}}\n'
    Path(path).write_text(text, encoding="utf-8")


def instantiate(graph: DraftGraph, canvas: Canvas, output: Output) -> tuple[Tensor, Tensor]:
    """Drafts `(B, D, W)` of a canvas by what a forward said of it, and which are states, `(B, D)`.

    A node is none where it has more positions than are masked, or would leave nothing to decide.
    """
    device, reach = canvas.tokens.device, graph.reach
    choice = _choices_on(device, graph)
    rank = ranks(confidence(output), canvas.eligible)
    picked = choice[:, rank.clamp(max=reach)].transpose(0, 1)
    picked = torch.where(canvas.eligible[:, None], picked, 0)
    drafts = torch.where(picked == 1, output.candidate[:, None], canvas.tokens[:, None])
    if graph.second:
        drafts = torch.where(picked == 2, output.top2[:, None], drafts)
    size = (choice > 0).sum(-1)
    drawn = (drafts != canvas.tokens[:, None]).sum(-1)
    return drafts, (drawn == size) & (size < canvas.eligible.sum(-1, keepdim=True))


@cache
def _choices_on(device: torch.device, graph: DraftGraph) -> Tensor:
    """The graph's `_choices (D, I + 1)`, sent to the device once: a turn sends none of its own."""
    return torch.tensor(_choices(graph.nodes, graph.reach), device=device)


def _choices(nodes: Iterable[Node], reach: int) -> list[list[int]]:
    """For each node the j of the positions ranked 1 ... I, 0 where there is none, and a 0."""
    return [[dict(node).get(i, 0) for i in range(1, reach + 1)] + [0] for node in nodes]


def odds(canvas: Canvas, output: Output, drafts: Tensor) -> Tensor:
    """How probable each draft `(B, K, W)` is, `(B, K)`: the product of its tokens' probabilities.

    A second-best token has the probability that is left, at most.
    """
    p = confidence(output).double()
    first = (drafts == output.candidate[:, None]).to(p.dtype)
    each = first * p[:, None] + (1 - first) * (1 - p)[:, None]
    filled = (drafts != canvas.tokens[:, None]) & canvas.eligible[:, None]
    return torch.where(filled, each, 1.0).prod(-1)


def worthwhile(odds: Tensor, *, least: float, row_cost: float) -> Tensor:
    """How many of the drafts to forward, `(B,)`, given their `odds (B, K)` in descending order.

    Derived: a forward of n drafts beside the row itself costs 1 + c n with c = `row_cost`, and is
    expected to advance by 1 + a_1 + ... + a_n steps. One more draft raises steps per cost while
    a_{n+1} (1 + c n) >= c (1 + a_1 + ... + a_n); since the odds descend, the first that does not
    ends it. Drafts of odds below `least` are left out whatever they cost. Negative odds: no draft.
    """
    count = torch.arange(odds.shape[-1], device=odds.device)
    gained = 1 + odds.cumsum(-1) - odds
    worth = odds * (1 + row_cost * count) >= row_cost * gained
    kept = worth & (odds >= max(least, 0.0))
    return kept.to(torch.int64).cumprod(-1).sum(-1)
