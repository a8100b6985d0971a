"""One transformer for all families: RMSNorm, RoPE, grouped queries, SwiGLU or a mixture of those.

It knows packed tokens only. Rows, masks, positions and stored K/V are the business of the `attend`
that the engine hands in. Letters as in `dlm_decode.models`, and F for the feed-forward size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.models import Attend, ModelInfo, attend_on
from dlm_decode.models.feed_forward import Experts, ExpertsConfig, SwiGLU, parameter
from dlm_decode.models.prepacked import columns, forget, linear, prepack
from dlm_decode.models.published import SpecialIds
from dlm_decode.ranks import Ranks, Share


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches RoPE: frequencies whose waves are longer than `original / low`
    positions are divided by `factor`, those shorter than `original / high` are kept, and in between
    both are mixed (transformers' rope type llama3)."""

    factor: float
    low: float
    high: float
    original: int

    def __post_init__(self) -> None:
        """Refuse limits in the wrong order."""
        if not self.low < self.high:
            raise CheckpointError(
                f"config.json: rope_scaling's low_freq_factor {self.low} must be below its "
                f"high_freq_factor {self.high}"
            )

    def stretched(self, frequencies: Tensor) -> Tensor:
        """`frequencies (n,)`, radians a position, as they are used."""
        waves = self.original * frequencies / (2 * torch.pi)
        kept = ((waves - self.low) / (self.high - self.low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class BackboneConfig:
    """Sizes and switches of a `Backbone`.

    `embedding_rows` may exceed `vocab_size`: the rows above are padding that is stored but never
    predicted. `rope_full_precision` rotates in the precision of the tables (LLaDA); without it
    cosines and sines are first rounded to the dtype of the activations (Dream). `qk_norm` puts a
    norm over each head of q and k before RoPE (Qwen3). RoPE turns the first `rope_size` entries of
    a head (None: all), by frequencies that `rope_scaling` stretches. `fused_qkv` says that
    checkpoints store q, k and v as one tensor. `experts` replaces the feed-forward layers of size
    `ffn_size`, except in its dense layers.
    """

    vocab_size: int
    embedding_rows: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn_size: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_full_precision: bool = True
    tied: bool = False
    rope_size: int | None = None
    rope_scaling: RopeScaling | None = None
    fused_qkv: bool = False
    experts: ExpertsConfig | None = None

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The mixture of a layer; None for a dense one."""
        dense = self.experts is None or layer in self.experts.dense_layers
        return None if dense else self.experts


def model_info(
    config: BackboneConfig, family: str, ids: SpecialIds, *, shift: int = 0
) -> ModelInfo:
    """What the engine has to know of a full-attention model of these sizes."""
    return ModelInfo(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        max_positions=config.max_positions,
        mask_id=ids.mask_id,
        end_ids=ids.end_ids,
        pad_id=ids.pad_id,
        shift=shift,
    )


class Block(nn.Module):
    """Attention, then feed-forward, each behind its norm; the input projections are fused."""

    def __init__(
        self,
        config: BackboneConfig,
        *,
        layer: int = 0,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        self.ranks: Ranks | None = None
        width, query_size = config.hidden_size, config.heads * config.head_size
        qkv_size = query_size + 2 * config.kv_heads * config.head_size
        self.attn_norm = parameter(width, device=device, dtype=dtype)
        self.qkv = parameter(qkv_size, width, device=device, dtype=dtype)
        self.qkv_bias = parameter(qkv_size, device=device, dtype=dtype) if config.qkv_bias else None
        norms = [parameter(config.head_size, device=device, dtype=dtype) for _ in range(2)]
        self.q_norm = norms[0] if config.qk_norm else None
        self.k_norm = norms[1] if config.qk_norm else None
        self.out = parameter(width, query_size, device=device, dtype=dtype)
        self.ff_norm = parameter(width, device=device, dtype=dtype)
        experts = config.experts_of(layer)
        self.feed_forward: SwiGLU | Experts = (
            SwiGLU(width, config.ffn_size, device=device, dtype=dtype)
            if experts is None
            else Experts(experts, width, device=device, dtype=dtype)
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        blocks: Tensor | None = None,
    ) -> Tensor:
        """`x (T, D)` to `(T, D)`; `cos` and `sin` `(T, 1, K)` as `Backbone.rotation` gives them."""
        x = x + self.mix(x, cos, sin, attend)
        return x + self.feed(x, blocks)

    def mix(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """What attention adds to `x (T, D)`."""
        mixed = attend(*self.project(x, cos, sin))
        return self._total(linear(mixed.flatten(1), self.out))

    def feed(self, x: Tensor, blocks: Tensor | None = None) -> Tensor:
        """What the feed-forward network adds to `x (T, D)`; `blocks` as in `Experts`."""
        x = rms_norm(x, self.ff_norm, self.config.rms_eps)
        if isinstance(self.feed_forward, Experts):
            return self._total(self.feed_forward(x, blocks))
        return self._total(self.feed_forward(x))

    def _total(self, part: Tensor) -> Tensor:
        """The sum of what all processes that share the layer add to the hidden states."""
        return part if self.ranks is None else self.ranks.total(part)

    def values(self, x: Tensor) -> Tensor:
        """Values `(T, G, K)` of `x (T, D)`."""
        g, bias = self.config.kv_heads, self.qkv_bias
        size = g * self.config.head_size
        normed = rms_norm(x, self.attn_norm, self.config.rms_eps)
        heads = F.linear(normed, self.qkv[-size:], None if bias is None else bias[-size:])
        return heads.unflatten(-1, (g, -1))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `(T, H, K)`, keys and values `(T, G, K)` of `x (T, D)`, behind norm and RoPE."""
        h, g = self.config.heads, self.config.kv_heads
        normed = rms_norm(x, self.attn_norm, self.config.rms_eps)
        heads = linear(normed, self.qkv, self.qkv_bias).unflatten(-1, (h + 2 * g, -1))
        rotated = rotate(self._normed(heads[:, : h + g]), cos, sin)
        return rotated[:, :h], rotated[:, h:], heads[:, h + g :]

    def _normed(self, heads: Tensor) -> Tensor:
        """`heads (T, H + G, K)` of q and k, each behind its norm if there is one."""
        if self.q_norm is None or self.k_norm is None:
            return heads
        h, eps = self.config.heads, self.config.rms_eps
        q, k = rms_norm(heads[:, :h], self.q_norm, eps), rms_norm(heads[:, h:], self.k_norm, eps)
        return torch.cat((q, k), dim=1)

    def parts(self) -> dict[str, Tensor]:
        """The tensors that checkpoints store one by one, as views of the fused parameters."""
        views = self._projections()
        if self.q_norm is not None and self.k_norm is not None:
            views |= {"q_norm": self.q_norm.detach(), "k_norm": self.k_norm.detach()}
        inner = self.feed_forward.parts()
        last = {"down": inner.pop("down")} if "down" in inner else {}
        own = {name: getattr(self, name).detach() for name in ("attn_norm", "out", "ff_norm")}
        return views | inner | own | last

    def _projections(self) -> dict[str, Tensor]:
        c = self.config
        if c.fused_qkv:
            return {"qkv": self.qkv.detach()}
        sizes = [n * c.head_size for n in (c.heads, c.kv_heads, c.kv_heads)]
        views = dict(zip("qkv", self.qkv.detach().split(sizes), strict=True))
        if self.qkv_bias is not None:
            biases = self.qkv_bias.detach().split(sizes)
            views |= dict(zip(("q_bias", "k_bias", "v_bias"), biases, strict=True))
        return views


class Backbone(nn.Module):
    """A `DiffusionLM` over `BackboneConfig`; a family derives from it and adds `names`.

    Weights are allocated, not initialised. `published` is the config.json that the model is saved
    with. Parameters do not ask for gradients until `requires_grad_(True)`.
    """

    names: ClassVar[Mapping[str, str]] = {}
    """Part -> published tensor name; `{}` stands for the layer, a second one for the expert."""

    def __init__(
        self,
        config: BackboneConfig,
        info: ModelInfo,
        *,
        published: Mapping[str, Any],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.info, self.published = config, info, dict(published)
        self.share: Share | None = None
        table = (config.embedding_rows, config.hidden_size)
        self.embed = parameter(*table, device=device, dtype=dtype)
        layers = range(config.layers)
        blocks = (Block(config, layer=layer, device=device, dtype=dtype) for layer in layers)
        self.blocks = nn.ModuleList(blocks)
        self.norm = parameter(config.hidden_size, device=device, dtype=dtype)
        self.head = self.embed if config.tied else parameter(*table, device=device, dtype=dtype)
        self.place_angles()

    @property
    def device(self) -> torch.device:
        """Where the LM head lies, and with it all that is decided."""
        return self.head.device

    @property
    def layer_devices(self) -> tuple[torch.device, ...]:
        """Where each layer lies, see `dlm_decode.models.placement`."""
        return tuple(cast("Block", block).attn_norm.device for block in self.blocks)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm `(T, D)` of `ids (T,)` at `positions (T,)`."""
        x, home = self._embedded(ids) if embeds is None else embeds, ids.device
        run, here = getattr(attend, "run_layer", None), None
        for layer, (block, device) in enumerate(zip(self.blocks, self.layer_devices, strict=True)):
            if device != here:
                x, positions, here = x.to(device), positions.to(device), device
                seen = attend if device == home else attend_on(attend, device)
                cos, sin = self.rotation(positions)
                blocks = self._expert_blocks(positions, attend)
            if run is not None:
                x = run(layer, _Parts(block, cos, sin), x)
            else:
                x = block(x, cos, sin, partial(seen, layer), blocks)
        return rms_norm(x.to(self.norm.device), self.norm, self.config.rms_eps)

    def _expert_blocks(self, positions: Tensor, attend: Attend) -> Tensor | None:
        """A number `(T,)` for each row's block, where its tokens choose their experts together."""
        if self.config.experts is None or self.config.experts.block_share >= 1:
            return None
        runs = getattr(attend, "runs", [(1, len(positions))])
        lengths = torch.tensor([length for rows, length in runs for _ in range(rows)])
        row = torch.arange(len(lengths)).repeat_interleave(lengths).to(positions.device)
        return row * self.config.max_positions + positions // (self.info.block_length or 32)

    def embedding(self, ids: Tensor) -> Tensor:
        """Input embeddings `(..., D)` of `ids (...)`, where those are."""
        return self._embedded(ids).to(ids.device)

    def _embedded(self, ids: Tensor) -> Tensor:
        """The embeddings where they lie; of a share, the ids that it lacks come from others."""
        ids = ids.to(self.embed.device)
        if self.share is None:
            return F.embedding(ids, self.embed)
        row = ids - self.share.columns.start
        lacking = (row < 0) | (row >= len(self.embed))
        found = F.embedding(row.masked_fill(lacking, 0), self.embed)
        return self.share.ranks.total(found.masked_fill(lacking[..., None], 0.0))

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """`hidden (n, D)` to the columns `[start, stop)` of the vocabulary, `(n, S)`.

        Raises `CapabilityError` for columns outside this process's share.
        """
        end = self.config.vocab_size if stop is None else min(stop, self.config.vocab_size)
        if self.share is None:
            return columns(hidden, self.head, start, end)
        own = self.share.columns
        if start < own.start or end > own.stop:
            raise CapabilityError(
                "this reads whole rows of logits, which tensor_parallel never brings together: "
                "load the model in one process"
            )
        return columns(hidden, self.head, start - own.start, end - own.start)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines `(T, 1, K)` and signed sines `(T, 1, K)` for `rotate`, of `positions (T,)`."""
        cos, sin = self._table(positions.device)[positions].unsqueeze(1).unbind(-2)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if self.config.rope_full_precision:
            return cos, sin
        return cos.to(self.dtype), sin.to(self.dtype)

    def weights(self) -> dict[str, Tensor]:
        """Every stored tensor under its published name: views, to be read or filled in place."""
        return {name: view for name, _, view in self.stored_parts()}

    def stored_parts(self) -> Iterator[tuple[str, str, Tensor]]:
        """Every stored tensor: its published name, its part's name in `names`, and the view."""
        ends = ("embed", "norm") if self.config.tied else ("embed", "norm", "head")
        for part in ends:
            yield self.names[part], part, getattr(self, part).detach()
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            for name, view in block.parts().items():
                part, _, expert = name.partition("/")
                yield self.names[part].format(layer, expert), part, view

    def aliases(self) -> dict[str, str]:
        """Tensors that a checkpoint may repeat: their name -> the name of the one they equal."""
        return {self.names["head"]: self.names["embed"]} if self.config.tied else {}

    def _table(self, device: torch.device) -> Tensor:
        """The angles on `device`; a copy is made once where a layer lies away from the head."""
        if device not in self._copies:
            self._copies[device] = self._angles.to(device)
        return self._copies[device]

    def place_angles(self) -> None:
        """Compute the angles anew, where the head lies."""
        on = self.device if self.device.type == "meta" else torch.device("cpu")
        self._angles = _angles(self.config, self.dtype, on).to(self.device)
        self._copies = {self.device: self._angles}

    def _apply(self, fn: Any, recurse: bool = True) -> Backbone:
        """Behind `.to()` and its like: angles are computed anew, for a cast keeps their errors;
        prepacked weights are dropped."""
        forget(self)
        super()._apply(fn, recurse)
        self.place_angles()
        return self


@dataclass(frozen=True)
class _Parts:
    """The `LayerParts` of one block."""

    block: Any
    cos: Tensor
    sin: Tensor

    def values(self, x: Tensor) -> Tensor:
        return self.block.values(x)

    def mix(self, x: Tensor, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        return self.block.mix(x[tokens], self.cos[tokens], self.sin[tokens], attend)

    def feed(self, x: Tensor) -> Tensor:
        return self.block.feed(x)


def compile_layers(model: Any) -> None:
    """Compile what the layers do between attentions: once for all of them and for all lengths.

    The mixtures' routing depends on values and stays as it is. Raises `CapabilityError` for a model
    that is no `Backbone`.
    """
    if not isinstance(model, Backbone):
        raise CapabilityError(
            f"{model.info.family} has layers of its own, which can't be compiled: leave compile out"
        )
    for block in model.blocks:
        for name in ("project", "feed") if isinstance(block.feed_forward, SwiGLU) else ("project",):
            setattr(block, name, torch.compile(getattr(block, name), dynamic=True, fullgraph=True))


def prepack_layers(model: Any) -> None:
    """Prepack the weights of the layers and of the LM head; embeddings and experts stay as is.

    Raises `CapabilityError` for a model that is no `Backbone`, or not in fp32 on a CPU.
    """
    for weight in prepackable(model):
        prepack(weight, rows=model.config.vocab_size if weight is model.head else None)


def prepackable(model: Any) -> list[Tensor]:
    """The weights that `prepack_layers` copies; raises as it does for other models."""
    if not isinstance(model, Backbone):
        raise CapabilityError(
            f"{model.info.family} has layers of its own, which can't be prepacked: leave prepack "
            "out"
        )
    found: list[Tensor] = [model.head]
    for block in model.blocks:
        assert isinstance(block, Block)
        feed = block.feed_forward
        inner = feed if isinstance(feed, SwiGLU) else feed.shared
        found += [block.qkv, block.out]
        found += [] if inner is None else [inner.gate_up, inner.down]
    return found


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Statistics in fp32 or wider, rounded to the dtype of `x` and only then scaled."""
    return F.rms_norm(x, weight.shape, None, eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over the two halves of the last axis of `x (T, heads, K)`, in the wider of the dtypes.

    `sin` is negated in its first half, so that swapping the halves of `x` is all that is left. What
    lies beyond the width of `cos` is passed through.
    """
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin), x[..., turned:]), dim=-1)
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def _angles(config: BackboneConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosine and sine of every position and frequency, `(positions, 2, R / 2)`, fp32 or fp64.

    R is the part of a head that RoPE turns. Computed on the CPU, for all devices alike.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    size = config.rope_size or config.head_size
    exponents = torch.arange(0, size, 2, dtype=exact, device=device) / size
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = config.rope_scaling.stretched(frequencies)
    positions = torch.arange(config.max_positions, dtype=exact, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1)
