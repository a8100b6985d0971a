"""Turns as CUDA graphs: a turn's thousand kernels started at once, from fixed buffers.

The device part of a turn (`dlm_decode.turn`) is a function of a tree of tensors. What comes with a
structure that came before is captured, with buffers in place of the tensors, and from then on
replayed: the tensors are copied into the buffers, the graph is started, and copies of its results
are handed back. A structure is all but the numbers in the tensors: shapes and dtypes, how rows are
grouped, where their K/V lie, which statistics are asked for. So a graph lasts while rows of the
same lengths sit at the same places, whatever their ids, masks, windows and memories are.

Capturing is the one part that needs a GPU, and it has not been run on one: it is handed in, so that
tests can put a replay of recorded operators on the CPU in its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlm_decode.errors import CapabilityError
from dlm_decode.kv import KVStore
from dlm_decode.models import DiffusionLM, layer_devices, share_of
from dlm_decode.models.backbone import Backbone
from dlm_decode.tree import flattened, refilled

Capture = Callable[[Callable[[], Any]], tuple[Callable[[], object], Any]]
"""From a function of fixed buffers to its replay and the tree that this leaves its results in."""

WARM_UPS = 1
"""Runs before a capture; a run of the same structure was the first sight of it."""

MOST_TOKENS = 1024
"""Forwards of more packed tokens run eagerly: launching them takes less time than they do."""

_SEEN_PER_GRAPH = 16


@dataclass(frozen=True)
class Graph:
    """A captured function: the buffers of its arguments, its replay, and its results' buffers as
    the tree that it gave and as those of its tensors."""

    buffers: list[Tensor]
    replay: Callable[[], object]
    results: Any
    result_tensors: list[Tensor]


class Graphs:
    """Replays the functions of trees of tensors whose structure it has seen before.

    At most `most` graphs are kept, those last used; `captured` and `replayed` count. Their working
    memory is one pool, which is why results are copied out of it at once.
    """

    store: KVStore | None = None
    """The K/V store of the last run, for the next one: graphs hold where it lies."""

    def __init__(self, capture: Capture, *, most: int = 16) -> None:
        self.captured = self.replayed = 0
        self._capture, self._most = capture, most
        self._graphs: OrderedDict[Hashable, Graph] = OrderedDict()
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def run(self, function: Callable[[Any], Any], tree: Any, *fixed: Hashable) -> Any:
        """`function(tree)`, from a graph if the structure of `tree` came before.

        `fixed` is what the function depends on beside its argument. It must be a function of these
        alone, and do the same when it is called again: capturing does so several times.
        """
        tensors, found = flattened(tree)
        key = found, fixed
        if key not in self._graphs:
            if not self._came_before(key):
                return function(tree)
            self._graphs[key] = self._captured(function, tree, tensors)
        self._graphs.move_to_end(key)
        while len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
        graph = self._graphs[key]
        torch._foreach_copy_(graph.buffers, tensors)
        graph.replay()
        self.replayed += 1
        return refilled(graph.results, (result.clone() for result in graph.result_tensors))

    def _came_before(self, key: Hashable) -> bool:
        if key in self._seen:
            return True
        self._seen[key] = None
        while len(self._seen) > _SEEN_PER_GRAPH * self._most:
            self._seen.popitem(last=False)
        return False

    def _captured(self, function: Callable[[Any], Any], tree: Any, tensors: list[Tensor]) -> Graph:
        buffers = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        held = refilled(tree, iter(buffers))
        replay, results = self._capture(lambda: function(held))
        self.captured += 1
        return Graph(buffers, replay, results, flattened(results)[0])


def graphs_for(model: DiffusionLM) -> Graphs:
    """Graphs for turns of `model`. Raises `CapabilityError` where they can't work."""
    if model.device.type != "cuda":
        raise CapabilityError(
            f"graphs need a GPU, and the model is on {model.device}: leave graphs out"
        )
    return Graphs(OnGPU(model.device))


def check_static(model: DiffusionLM) -> None:
    """Raise `CapabilityError` for a model whose layers depend on values or lie apart."""
    if share_of(model) is not None or len(set(layer_devices(model))) > 1:
        raise CapabilityError("graphs need a whole model on one device: leave graphs out")
    if not isinstance(model, Backbone) or model.config.experts is not None:
        raise CapabilityError(
            f"graphs need a dense model of one shape, which {model.info.family} is not: leave "
            "graphs out"
        )


class OnGPU:
    """Captures CUDA graphs that share one pool, after warm-ups on a side stream as torch asks."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        with torch.cuda.device(self._device):
            return self._captured(run)

    def _captured(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = run()
        return graph.replay, results
