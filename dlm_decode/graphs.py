"""Forwards as CUDA graphs: a turn's thousand kernels started at once, from fixed buffers.

A window forward of a dense model takes the same kernels turn after turn while the same rows are in
flight: what changes are the ids, their positions and the places that K/V are written to. Such a
forward is captured when it comes the second time, and replayed with those three copied into its
buffers. All else it depends on (shapes, groups of rows, addresses of the K/V pools) is its key, so
a forward with another key is another graph, or runs eagerly: those with masks, gathered pages,
hooks, branches, embeddings, watched attention or no stored K/V always do.

Capturing is the one part that needs a GPU, and it has not been run on one: it is handed in, so that
tests can put a replay on the CPU in its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlm_decode.attention import PackedAttention
from dlm_decode.errors import CapabilityError
from dlm_decode.models import Attend, DiffusionLM
from dlm_decode.models.backbone import Backbone

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""From a forward to its replay and the buffer that a replay leaves its result in."""

WARM_UPS = 3


@dataclass(frozen=True)
class Graph:
    """A captured forward: its inputs' buffers, its replay and its result's buffer."""

    ids: Tensor
    positions: Tensor
    places: Tensor
    replay: Callable[[], object]
    hidden: Tensor


class Graphed:
    """A `DiffusionLM` that replays those forwards of `model` that it has seen before.

    At most `most` graphs are kept, those last used. A result is good until the next forward.
    """

    def __init__(
        self, model: DiffusionLM, *, capture: Capture | None = None, most: int = 16
    ) -> None:
        """Raises `CapabilityError` for a model on no GPU, or whose layers depend on values."""
        if capture is None and model.device.type != "cuda":
            raise CapabilityError(
                f"graphs need a GPU, and the model is on {model.device}: leave graphs out"
            )
        if not isinstance(model, Backbone) or model.config.experts is not None:
            raise CapabilityError(
                f"graphs need a dense model of one shape, which {model.info.family} is not: leave "
                "graphs out"
            )
        self.model, self.info = model, model.info
        self.captured = self.replayed = 0
        self._capture, self._most = capture or capture_on_gpu, most
        self._known: OrderedDict[Any, Graph | None] = OrderedDict()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def embedding(self, ids: Tensor) -> Tensor:
        return self.model.embedding(ids)

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        return self.model.logits(hidden, start, stop)

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        structure = attend.structure() if isinstance(attend, PackedAttention) else None
        if embeds is not None or structure is None:
            return self.model.forward(ids, positions, attend, embeds=embeds)
        assert isinstance(attend, PackedAttention)
        key = (len(ids), structure)
        if key not in self._known:
            self._remember(key, None)
            return self.model.forward(ids, positions, attend)
        graph = self._known[key] or self._captured(ids, positions, attend)
        self._remember(key, graph)
        graph.ids.copy_(ids)
        graph.positions.copy_(positions)
        graph.places.copy_(attend.places)
        graph.replay()
        self.replayed += 1
        return graph.hidden

    def _remember(self, key: Any, graph: Graph | None) -> None:
        self._known[key] = graph
        self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def _captured(self, ids: Tensor, positions: Tensor, attend: PackedAttention) -> Graph:
        """Capturing runs the forward several times: it stores the same K/V each time."""
        ids, positions, places = ids.clone(), positions.clone(), attend.places.clone()
        fixed = attend.writing_to(places)
        replay, hidden = self._capture(lambda: self.model.forward(ids, positions, fixed))
        self.captured += 1
        return Graph(ids, positions, places, replay, hidden)


def capture_on_gpu(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """A CUDA graph of `run`, after warm-ups on a side stream, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = run()
    return graph.replay, hidden
