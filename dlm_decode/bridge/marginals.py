"""One forward of a diffusion LM over masks after known prefixes, with K/V kept across rounds.

Letters: N row length, W masks read, T packed tokens, V vocabulary, S stored positions. What is
stored may be stale (it was computed beside other tokens): only acceptance can suffer. K/V of tokens
that the verifier has not accepted are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_decode.models import DiffusionLM


@dataclass
class Stored:
    """K and V `(S, G, K)` of a row's verified prefix, a pair a layer, and the ids they belong to.

    `age` counts forwards since they were computed afresh.
    """

    ids: tuple[int, ...] = ()
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    age: int = 0


@dataclass(frozen=True)
class Span:
    """One row of a forward: `ids (N,)`, the first `verified` of which the verifier emitted; logits
    are wanted for the `width` positions from `start`."""

    ids: Sequence[int]
    verified: int
    start: int
    width: int
    stored: Stored


@dataclass(frozen=True)
class Reuse:
    """How much to compute anew: the last `overlap` prefix positions always, everything every
    `refresh_every` forwards (None: never)."""

    overlap: int = 16
    refresh_every: int | None = 8

    def first_computed(self, span: Span, least_start: int) -> int:
        """The first position to compute, everything before it comes from the store."""
        if self.refresh_every is not None and span.stored.age >= self.refresh_every:
            return 0
        common = _common_length(span.stored.ids, span.ids)
        return max(min(common, span.verified - self.overlap, least_start), 0)


@torch.inference_mode()
def marginals(model: DiffusionLM, spans: Sequence[Span], reuse: Reuse) -> list[Tensor]:
    """Logits `(W, V)` fp32 of each span's positions, the mask id at -inf; updates the stores."""
    shift = model.info.shift
    starts = [reuse.first_computed(span, span.start - shift) for span in spans]
    sizes = [len(span.ids) - start for span, start in zip(spans, starts, strict=True)]
    device = model.device
    ids = torch.tensor([t for s, a in zip(spans, starts, strict=True) for t in s.ids[a:]])
    positions = torch.cat([torch.arange(a, len(s.ids)) for s, a in zip(spans, starts, strict=True)])
    attend = _StoredAttention(spans, starts, sizes)
    hidden = model.forward(ids.to(device), positions.to(device), attend)
    for i, span in enumerate(spans):
        _store(span, starts[i], attend.fresh[i])
    rows = hidden.split(sizes)
    places = [s.start - shift - a for s, a in zip(spans, starts, strict=True)]
    read = [row[p : p + s.width] for row, p, s in zip(rows, places, spans, strict=True)]
    logits = model.logits(torch.cat(read)).float()
    logits[:, model.info.mask_id] = -torch.inf
    return list(logits.split([span.width for span in spans]))


class _StoredAttention:
    """Each row attends to its stored prefix and to all its computed positions."""

    def __init__(self, spans: Sequence[Span], starts: Sequence[int], sizes: Sequence[int]) -> None:
        self.spans, self.starts, self.sizes = spans, starts, list(sizes)
        self.fresh: list[list[tuple[Tensor, Tensor]]] = [[] for _ in spans]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = zip(*(x.split(self.sizes) for x in (q, k, v)), strict=True)
        return torch.cat([self._row(i, layer, *row) for i, row in enumerate(rows)])

    def _row(self, i: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        start = self.starts[i]
        if start:
            old_k, old_v = self.spans[i].stored.layers[layer]
            k, v = torch.cat([old_k[:start], k]), torch.cat([old_v[:start], v])
        self.fresh[i].append((k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


def _store(span: Span, start: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    size, stored = span.verified, span.stored
    stored.ids = tuple(span.ids[:size])
    stored.layers = [(k[:size], v[:size]) for k, v in layers]
    stored.age = 0 if start == 0 else stored.age + 1


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
