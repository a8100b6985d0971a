"""Model families, one file each, and the interface the engine asks of them.

Imported as `dlm_decode.models` only, so that no package called `models` lands among a user's
packages. Letters in shapes: T packed tokens of all rows of one forward, H query heads, G key/value
heads, K head size, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor, device, dtype

from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.ranks import Share
from dlm_decode.registry import Registry

Regime = Literal["full", "block_causal"]
"""Who sees whom: everyone in the row, or position i sees j iff block(j) <= block(i)."""

if not __name__.startswith("dlm_decode."):
    raise ImportError("import dlm_decode.models, not models")


class Attend(Protocol):
    """Attention over whatever the engine lets each packed token see; called once a layer, in order.

    The engine owns rows, positions, masks and stored K/V, so a model never sees a batch dimension:
    it hands over its projections and gets the attention output of the same tokens.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q (T, H, K)` and `k (T, G, K)` after RoPE, `v (T, G, K)`; returns `(T, H, K)`."""
        ...


def row_runs(attend: Attend) -> Sequence[tuple[int, int]]:
    """The rows of a forward, for a model that needs them whole: runs of `(rows, length)`.

    They lie one behind the other in the packed tokens, each with all of its positions from 0 on.
    """
    runs: Sequence[tuple[int, int]] | None = getattr(attend, "row_runs", None)
    if runs is None:
        raise CapabilityError("this model computes whole rows, and this forward has only parts")
    return runs


def layer_devices(model: DiffusionLM) -> tuple[device, ...]:
    """Where each layer lies, and so its K/V: where the model is, unless it says otherwise."""
    own: tuple[device, ...] | None = getattr(model, "layer_devices", None)
    return (model.device,) * model.info.layers if own is None else own


def share_of(model: DiffusionLM) -> Share | None:
    """This process's share of a model that several hold together; None if it has all of it."""
    share: Share | None = getattr(model, "share", None)
    return share


def attend_on(attend: Attend, home: device) -> Attend:
    """The attention of a forward for layers on another device than its tokens are."""
    moved: Callable[[device], Attend] | None = getattr(attend, "on", None)
    return attend if moved is None else moved(home)


def row_windows(attend: Attend) -> Sequence[tuple[int, int]]:
    """Where the window of each row of a forward begins and ends, in the order of packed rows."""
    windows: Sequence[tuple[int, int]] | None = getattr(attend, "windows", None)
    if windows is None:
        raise CapabilityError("this model has to know the rows' windows, and this forward has none")
    return windows


@dataclass(frozen=True)
class ModelInfo:
    """What the engine has to know of a checkpoint; every id comes from the checkpoint's own files.

    `shift` is 1 when the output at position i predicts token i + 1 (Dream), else 0. `end_ids` are
    the ids that end a text (EOS first, then end-of-turn). `regime` says what a position attends to;
    a block-causal model's blocks are those of the request's block length (this one's by default).
    `block_length` and `block_origin` are the family's trained block size (None: any) and where
    blocks are counted from: from the prompt's end both ways, from position 0, or from the prompt's
    end with the whole prompt as one block (D2F). `vocab_size` counts the rows of the LM head.
    `runs_layers`: where its `Attend` has a `run_layer(layer, parts, x)`, the model leaves each
    layer to that. `whole_rows` says why its forwards have to compute rows whole, see `row_runs`;
    empty: they need not.

    A `mask_id` behind the vocabulary says that the model has no mask: it denoises random tokens,
    and the id only marks positions for the engine. `self_conditioned`: see `SelfConditioned`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    max_positions: int
    mask_id: int
    end_ids: tuple[int, ...]
    pad_id: int | None = None
    shift: int = 0
    regime: Regime = "full"
    block_length: int | None = None
    block_origin: Literal["prompt", "absolute", "whole_prompt"] = "prompt"
    runs_layers: bool = True
    whole_rows: str = ""
    self_conditioned: bool = False

    @property
    def has_mask(self) -> bool:
        """Whether an undecided position has a token of its own."""
        return self.mask_id < self.vocab_size


def forced(info: ModelInfo, block_length: int) -> ModelInfo:
    """A full-attention checkpoint as the block-causal model that diffusion forcing made of it.

    D2F (arXiv:2508.09192) trains LLaDA and Dream on with the prompt as one block and blocks of
    `block_length` behind it; the files don't say so. Raises `CapabilityError` for other models.
    """
    if info.regime != "full" or info.whole_rows:
        raise CapabilityError(
            "diffusion forcing makes a block-causal model of one with full attention, which "
            f"{info.family} does not have: leave out forcing"
        )
    if block_length < 1:
        raise OptionError(f"forcing must be a block length of at least 1, got {block_length}")
    return replace(
        info, regime="block_causal", block_length=block_length, block_origin="whole_prompt"
    )


class LayerParts(Protocol):
    """The pieces of one layer, for an `Attend` that runs it itself to leave some tokens out."""

    def values(self, x: Tensor) -> Tensor:
        """Values `(T, G, K)` of hidden states `x (T, D)`."""
        ...

    def mix(self, x: Tensor, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Attention's addition `(m, D)` to the `tokens (m,)` of `x`; `attend(q, k, v)` is of those
        tokens only."""
        ...

    def feed(self, x: Tensor) -> Tensor:
        """The feed-forward network's addition `(m, D)` to `x (m, D)`."""
        ...


class DiffusionLM(Protocol):
    """A masked diffusion language model as the engine uses it."""

    info: ModelInfo

    @property
    def device(self) -> device: ...

    @property
    def dtype(self) -> dtype: ...

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        """Final hidden states `(T, D)`, ready for `logits`, of packed tokens.

        `ids` and `positions` are `(T,)`; `embeds (T, D)`, where given, replaces the embeddings.
        """
        ...

    def embedding(self, ids: Tensor) -> Tensor:
        """Input embeddings `(..., D)` of `ids (...)`."""
        ...

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """The LM head: `hidden (n, D)` to the vocabulary's columns `[start, stop)`, `(n, S)`."""
        ...


class SelfConditioned(DiffusionLM, Protocol):
    """A model that is also told what it predicted before."""

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        embeds: Tensor | None = None,
        beliefs: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """As in `DiffusionLM`. `beliefs` are packed places `(m,)` and the logits `(m, V)` that the
        model gave there a turn ago; -inf all through where it gave none."""
        ...


FAMILIES: Registry[DiffusionLM] = Registry("model family", "dlm_decode.models", "dlm_decode.models")
