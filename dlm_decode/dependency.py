"""How much undecided positions depend on one another, and which may be decided together.

Influences are `(B, W, W)`: entry [i, j] says how much deciding position i would change what is
predicted at position j. They are 0 on the diagonal and wherever i or j is not eligible. Letters:
H heads of a predictor, r its rank, R its reach. Nothing here syncs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files as resource_files
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.scores import inverse_permutation
from dlm_decode.types import Canvas, Output

BUNDLED = "bundled"
"""Stands for the predictor that comes with the bundled model."""
PREDICTOR_TENSORS = ("query", "key", "bias", "levels", "errors")


@dataclass(frozen=True)
class DependencySource:
    """Where influences come from. `needs` names the statistics of `Output` that are read.

    `init` gives what `scores` takes as `state`: tensors with leading B, or `()`.
    """

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    def init(self, canvas: Canvas) -> Any:
        return ()

    def scores(self, canvas: Canvas, output: Output, state: Any) -> Tensor:
        """Influences `(B, W, W)`."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionSource(DependencySource):
    """Influence of i on j: the attention that j's prediction pays to position i. Training-free."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"attention"})

    def scores(self, canvas: Canvas, output: Output, state: Any) -> Tensor:
        return among(attention_paid(output.attention, canvas.positions), canvas.eligible)


@dataclass(frozen=True)
class CosineSource(DependencySource):
    """Positive part of the cosine of two positions' final hidden states. Training-free."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hidden"})

    def scores(self, canvas: Canvas, output: Output, state: Any) -> Tensor:
        h = F.normalize(_wide(output.hidden), dim=-1)
        return among((h @ h.transpose(-1, -2)).clamp(min=0), canvas.eligible)


@dataclass(frozen=True)
class PredictorSource(DependencySource):
    """What a trained `pairwise` predictor, read from the file `path`, says of hidden states.

    With `quantile` q the q-quantile of its error on held-out pairs is added, so that about a share
    q of the influences are not underestimated.
    """

    path: str
    quantile: float | None = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"hidden"})

    def init(self, canvas: Canvas) -> Any:
        rows, device = canvas.tokens.shape[0], canvas.tokens.device
        leaves = _predictor_on(device, self.path)
        return {name: leaf.expand(rows, *leaf.shape) for name, leaf in leaves.items()}

    def scores(self, canvas: Canvas, output: Output, state: Any) -> Tensor:
        size, trained = output.hidden.shape[-1], state["query"].shape[-1]
        if size != trained:
            raise CapabilityError(
                f"the predictor {self.path!r} reads hidden states of size {trained}, but this "
                f"model's have {size}: train one for it with scripts/train_demask.py"
            )
        found = pairwise(output.hidden, state["query"], state["key"], state["bias"])
        return among((found + self.margin).clamp(0, 1), canvas.eligible)

    @property
    def margin(self) -> float:
        """What is added to every influence."""
        if self.quantile is None:
            return 0.0
        weights = read_predictor(self.path).weights
        return float(np.interp(self.quantile, weights["levels"], weights["errors"]))


@cache
def _predictor_on(device: torch.device, path: str) -> dict[str, Tensor]:
    """The predictor's tensors, sent to the device once: a turn sends no numbers of its own."""
    weights = read_predictor(path).weights
    return {name: torch.tensor(weights[name], device=device) for name in PREDICTOR_TENSORS[:3]}


@dataclass(frozen=True)
class OracleSource(DependencySource):
    """Given influences, or a function of the canvas and the output that gives them."""

    given: Tensor | Callable[[Canvas, Output], Tensor]

    def scores(self, canvas: Canvas, output: Output, state: Any) -> Tensor:
        found = self.given if isinstance(self.given, Tensor) else self.given(canvas, output)
        return among(found, canvas.eligible)


# ------------------------------------------------------------------------------------ influences


def among(influence: Tensor, members: Tensor) -> Tensor:
    """`influence (B, W, W)` as fp64, 0 on the diagonal and outside `members (B, W)`."""
    both = members[:, :, None] & members[:, None, :]
    both = both & ~torch.eye(members.shape[1], dtype=torch.bool, device=members.device)
    return influence.double().masked_fill(~both, 0.0)


def attention_paid(attention: Tensor, positions: Tensor) -> Tensor:
    """`(B, W, W)`: entry [i, j] is what j's prediction pays to i, of `attention (B, W, N)`.

    `positions (B, W)` are the window's absolute ones; those beyond the row are padding.
    """
    width = positions.shape[1]
    columns = positions.clamp(max=attention.shape[-1] - 1)[:, None].expand(-1, width, -1)
    return attention.gather(-1, columns).transpose(-1, -2)


def mean_received(attention: Tensor, valid: Tensor) -> Tensor:
    """Attention `(B, N)` that each position gets from an average one of the `valid (B, W)` rows.

    A position that nearly all rows attend to is a sink: its weight tells nothing of dependence.
    """
    rows = attention.double().masked_fill(~valid[..., None], 0.0)
    return rows.sum(1) / valid.sum(-1, keepdim=True).clamp(min=1)


def pairwise(hidden: Tensor, query: Tensor, key: Tensor, bias: Tensor) -> Tensor:
    """Predicted influences `(B, W, W)` of neighbouring positions' `hidden (B, W, D)`.

    D[i, j] = mean_h sigmoid(q_i . k_j / sqrt(r) + b_{clip(j - i, -R, R)}), where q and k are linear
    in the normalised hidden states: `query` and `key` `(B or 1, H, r, D)`, `bias (B or 1, H,
    2 R + 1)`.
    """
    h = F.layer_norm(_wide(hidden), hidden.shape[-1:])
    q = torch.einsum("bwd,bhrd->bhwr", h, query.to(h.dtype))
    k = torch.einsum("bwd,bhrd->bhwr", h, key.to(h.dtype))
    places = torch.arange(hidden.shape[1], device=hidden.device)
    reach = bias.shape[-1] // 2
    offset = (places[None, :] - places[:, None]).clamp(-reach, reach) + reach
    scores = q @ k.transpose(-1, -2) * query.shape[-2] ** -0.5 + bias[..., offset]
    return scores.sigmoid().mean(1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# ------------------------------------------------------------------------------------ selections


def bounded_greedy(
    influence: Tensor, rank: Tensor, allowed: Tensor, bound: float, *, cumulative: bool
) -> tuple[Tensor, Tensor]:
    """Take positions in rank order while what they depend on stays within `bound`.

    d_j = sum of `influence (B, W, W)` [i, j] over the positions i taken before j. Cumulative: j is
    taken if the d of all taken ones add up to at most `bound`; else if d_j alone is at most
    `bound`. `rank (B, W)` counts from 0, `allowed (B, W)` may be taken. Returns the chosen
    `(B, W)` and the sum of their d, `(B,)`. One short loop over ranks, no sync.
    """
    order = inverse_permutation(rank)
    ordered = influence.gather(1, order[..., None].expand_as(influence))
    ordered = ordered.gather(2, order[:, None].expand_as(influence))
    may = allowed.gather(-1, order)
    load = torch.zeros_like(ordered[:, 0])
    total = torch.zeros_like(load[:, 0])
    taken = []
    for r in range(rank.shape[-1]):
        spent = total + load[:, r] if cumulative else load[:, r]
        take = may[:, r] & (spent <= bound)
        total = total + load[:, r] * take
        load = load + ordered[:, r] * take[:, None]
        taken.append(take)
    return torch.stack(taken, dim=-1).gather(-1, rank), total


def independent_set(conflict: Tensor, rank: Tensor, allowed: Tensor) -> Tensor:
    """The greedy maximal independent set `(B, W)` of the symmetric graph `conflict (B, W, W)`.

    In rank order each `allowed` position is taken unless it conflicts with one taken before.
    """
    return bounded_greedy(conflict.double(), rank, allowed, 0.0, cumulative=False)[0]


# ------------------------------------------------------------------------------------ files


@dataclass(frozen=True)
class PredictorFile:
    """A predictor as stored: arrays `query`, `key` `(H, r, D)`, `bias (H, 2 R + 1)`, and the
    quantiles `errors (q,)` of (true - predicted) at `levels (q,)`; and what it was made from."""

    weights: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]


def predictor_path(path: str) -> Path:
    """The file itself, or the one that comes with the bundled model."""
    if path != BUNDLED:
        return Path(path).expanduser()
    return Path(str(resource_files("dlm_decode") / "assets" / "demask-tiny-llada.safetensors"))


@lru_cache(maxsize=8)
def read_predictor(path: str) -> PredictorFile:
    """Read a predictor; raises `OptionError` for a file that is none."""
    file = predictor_path(path)
    try:
        with safe_open(file, framework="np") as stored:
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            metadata = stored.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise OptionError(
            f"predictor must be a readable safetensors file, {file}: {error}"
        ) from None
    missing = [name for name in PREDICTOR_TENSORS if name not in weights]
    if missing:
        raise OptionError(
            f"predictor must be a file of scripts/train_demask.py, {file} has no {missing[0]!r}"
        )
    return PredictorFile({n: w.astype(np.float32) for n, w in weights.items()}, metadata)
