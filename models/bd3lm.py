"""BD3-LM and MDLM: diffusion transformers over GPT-2's vocabulary, trained on OpenWebText.

Letters as in `dlm_decode.models`, and C for the size of the condition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_decode.models import FAMILIES, Attend, ModelInfo
from dlm_decode.models.backbone import rotate
from dlm_decode.models.feed_forward import parameter
from dlm_decode.models.published import MOST_PARTS, Published, SpecialTokens, head_size

SUPPORTED = {"causal": False, "time_conditioning": False, "quantization_config": None}

TOKENS = SpecialTokens(
    mask="[MASK]",
    end="<|endoftext|>",
    turn="<|endoftext|>",
    vocab_size=50258,
    mask_id=50257,
    end_id=50256,
    turn_id=None,
)

FREQUENCIES = 256
"""Width of the embedding of a time: cosines, then sines."""

SLOWEST = 1e-4
"""The frequencies of that embedding fall from 1 towards this."""

LAYER_EPS = 1e-5

KEPT_WIDE = ("rotary_emb.inv_freq", "sampling_eps_min", "sampling_eps_max")
"""How the tensors end that are in fp32 or wider in any model."""


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of a diffusion transformer; `condition_size` None: without adaptive norms (adaLN).

    `noise_bounds`: checkpoints store the bounds of the noise they were trained with, which decoding
    does not use. The published names of all other tensors begin with `prefix`.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    max_positions: int
    condition_size: int | None
    noise_bounds: bool = False
    prefix: str = "backbone."

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads


class Tensors(nn.Module):
    """Named parameters of given shapes, allocated but not filled; `owner[name]` reads one."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.held = nn.ParameterDict()
        for name, shape in shapes.items():
            wide = torch.promote_types(dtype, torch.float32)
            kind = wide if name.endswith(KEPT_WIDE) else dtype
            self.held[name.replace(".", "/")] = parameter(*shape, device=device, dtype=kind)

    def __getitem__(self, name: str) -> Tensor:
        return self.held[name.replace(".", "/")]

    def named(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): p.detach() for name, p in self.held.items()}


class DiTBlock(nn.Module):
    """Attention, then a GELU layer; with adaLN both are shifted, scaled and gated."""

    def __init__(
        self, config: DiTConfig, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.tensors = Tensors(block_shapes(config), device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        condition: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """`x (T, D)` to `(T, D)` under `condition (C,)` or `(T, C)`."""
        w = self.tensors
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation(w, condition, 6)
        h = layer_norm(x, w["norm1.weight"]) * (1 + scale) + shift
        x = x + gate * self._mix(h, cos, sin, attend)
        h = layer_norm(x, w["norm2.weight"]) * (1 + ff_scale) + ff_shift
        h = F.gelu(F.linear(h, w["mlp.0.weight"], w["mlp.0.bias"]), approximate="tanh")
        return x + ff_gate * F.linear(h, w["mlp.2.weight"], w["mlp.2.bias"])

    def _mix(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        h = self.config.heads
        heads = F.linear(x, self.tensors["attn_qkv.weight"]).unflatten(-1, (3 * h, -1))
        rotated = rotate(heads[:, : 2 * h], cos, sin)
        mixed = attend(rotated[:, :h], rotated[:, h:], heads[:, 2 * h :])
        return F.linear(mixed.flatten(1), self.tensors["attn_out.weight"])


@FAMILIES.register("bd3lm")
class BD3LM(nn.Module):
    """BD3-LM and, without `cross_attn`, MDLM: small diffusion transformers, blocks from position 0.

    Neither is conditioned on time: the time they are given is always 0. Under the masked
    parameterisation (SUBS) the mask is never predicted, which the engine sees to.
    """

    paper: ClassVar[str] = "BD3-LM, arXiv:2503.09573; MDLM, arXiv:2406.07524"
    tiny: ClassVar[Mapping[str, Any]] = {
        "model_type": "bd3lm",
        "block_size": 4,
        "vocab_size": 48,
        "model_length": 512,
        "hidden_dim": 32,
        "cond_dim": 8,
        "n_blocks": 2,
        "n_heads": 4,
        "time_conditioning": False,
        "causal": False,
        "cross_attn": True,
        "adaln": False,
        "mask_token_id": 44,
        "eos_token_id": 42,
        "pad_token_id": 42,
    }

    def __init__(
        self,
        config: DiTConfig,
        info: ModelInfo,
        *,
        published: Mapping[str, Any],
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.info, self.published = config, info, dict(published)
        self.outer = Tensors(outer_shapes(config), device=device, dtype=dtype)
        blocks = (DiTBlock(config, device=device, dtype=dtype) for _ in range(config.layers))
        self.blocks = nn.ModuleList(blocks)

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in ("bd3lm", "mdlm")

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> BD3LM:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(SUPPORTED)
        config = dit_config(files)
        info = dit_info(files, config)
        return cls(config, info, published=files.config, device=device, dtype=dtype)

    @property
    def device(self) -> torch.device:
        return self.part("vocab_embed.embedding").device

    @property
    def dtype(self) -> torch.dtype:
        return self.part("vocab_embed.embedding").dtype

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm `(T, D)` of `ids (T,)` at `positions (T,)`."""
        x = self.embedding(ids) if embeds is None else embeds
        cos, sin = self.rotation(positions)
        condition = self.condition(ids, attend)
        for layer, block in enumerate(self.blocks):
            x = block(x, condition, cos, sin, lambda q, k, v, i=layer: attend(i, q, k, v))
        last = f"{self.config.prefix}output_layer."
        shift, scale = modulation(self.outer, condition, 2, last)
        normed = layer_norm(x, self.part("output_layer.norm_final.weight"))
        return normed * (1 + scale) + shift

    def embedding(self, ids: Tensor) -> Tensor:
        """Input embeddings `(..., D)` of `ids (...)`."""
        return F.embedding(ids, self.part("vocab_embed.embedding"))

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """`hidden (n, D)` to the columns `[start, stop)` of the vocabulary, `(n, S)`."""
        weight, bias = (self.part(f"output_layer.linear.{name}") for name in ("weight", "bias"))
        return F.linear(hidden, weight[start:stop], bias[start:stop])

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines `(T, 1, K)` for `rotate`, rounded to the model's dtype."""
        wide = torch.promote_types(self.dtype, torch.float32)
        angles = torch.outer(positions.to(wide), self.part("rotary_emb.inv_freq"))
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.to(self.dtype), sin.to(self.dtype)

    def condition(self, ids: Tensor, attend: Attend) -> Tensor | None:
        """The condition `(C,)` of the time 0; None without adaLN."""
        if self.config.condition_size is None:
            return None
        return self.timed(torch.zeros((), device=self.device, dtype=self.dtype))

    def timed(self, times: Tensor) -> Tensor:
        """The condition `(..., C)` of `times (...)`."""
        half = FREQUENCIES // 2
        wide = torch.promote_types(self.dtype, torch.float32)
        falling = torch.arange(half, device=self.device, dtype=wide) / half
        angles = times.to(wide)[..., None] * (math.log(SLOWEST) * falling).exp()
        waves = torch.cat((angles.cos(), angles.sin()), -1).to(self.dtype)
        inner = F.silu(self._timed_layer(0, waves))
        return F.silu(self._timed_layer(2, inner))

    def _timed_layer(self, place: int, x: Tensor) -> Tensor:
        weight, bias = (self.part(f"sigma_map.mlp.{place}.{name}") for name in ("weight", "bias"))
        return F.linear(x, weight, bias)

    def part(self, name: str) -> Tensor:
        """A tensor outside the blocks."""
        return self.outer[self.config.prefix + name]

    def weights(self) -> dict[str, Tensor]:
        """Every stored tensor under its published name: views, to be read or filled in place."""
        named = self.outer.named()
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, DiTBlock)
            inner = block.tensors.named()
            start = f"{self.config.prefix}blocks.{layer}."
            named |= {start + name: view for name, view in inner.items()}
        return named

    def aliases(self) -> dict[str, str]:
        """No tensor is stored twice."""
        return {}


def dit_config(files: Published) -> DiTConfig:
    """BD3-LM's field names to ours."""
    width, heads = files.number("hidden_dim"), files.number("n_heads")
    head_size(width, heads, heads)
    adaptive = files.flag("adaln", True)
    return DiTConfig(
        vocab_size=files.number("vocab_size"),
        hidden_size=width,
        layers=files.number("n_blocks", MOST_PARTS),
        heads=heads,
        max_positions=files.number("model_length"),
        condition_size=files.number("cond_dim") if adaptive else None,
        noise_bounds=files.flag("var_min", in_blocks(files)),
    )


def in_blocks(files: Published) -> bool:
    """Whether the model is a BD3-LM, and so block-causal, rather than an MDLM."""
    return files.flag("cross_attn", files.config.get("model_type") == "bd3lm")


def dit_info(files: Published, config: DiTConfig) -> ModelInfo:
    """Block-causal in blocks of `block_size` with `cross_attn`, else full attention.

    The mask is the last token of the vocabulary where the checkpoint's files do not name it.
    """
    last = {"mask_token_id": config.vocab_size - 1}
    stated = {k: v for k, v in files.config.items() if v is not None}
    ids = replace(files, config=last | stated).special_ids(TOKENS, config.vocab_size)
    info = ModelInfo(
        family="bd3lm",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.heads,
        head_size=config.head_size,
        max_positions=config.max_positions,
        mask_id=ids.mask_id,
        end_ids=ids.end_ids,
        pad_id=ids.pad_id,
        runs_layers=False,
    )
    if not in_blocks(files):
        return info
    block = files.number("block_size")
    return replace(info, regime="block_causal", block_length=block, block_origin="absolute")


def block_shapes(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of one block's tensors."""
    d = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "norm1.weight": (d,),
        "attn_qkv.weight": (3 * d, d),
        "attn_out.weight": (d, d),
        "norm2.weight": (d,),
        "mlp.0.weight": (4 * d, d),
        "mlp.0.bias": (4 * d,),
        "mlp.2.weight": (d, 4 * d),
        "mlp.2.bias": (d,),
    }
    return shapes | _modulation_shapes("", 6 * d, config.condition_size)


def outer_shapes(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of the tensors outside the blocks."""
    d, c = config.hidden_size, config.condition_size
    shapes: dict[str, tuple[int, ...]] = {
        "vocab_embed.embedding": (config.vocab_size, d),
        "rotary_emb.inv_freq": (config.head_size // 2,),
        "output_layer.norm_final.weight": (d,),
        "output_layer.linear.weight": (config.vocab_size, d),
        "output_layer.linear.bias": (config.vocab_size,),
    }
    if c is not None:
        shapes |= {
            "sigma_map.mlp.0.weight": (c, FREQUENCIES),
            "sigma_map.mlp.0.bias": (c,),
            "sigma_map.mlp.2.weight": (c, c),
            "sigma_map.mlp.2.bias": (c,),
        }
    shapes |= _modulation_shapes("output_layer.", 2 * d, c)
    named = {config.prefix + name: shape for name, shape in shapes.items()}
    bounds = ("sampling_eps_min", "sampling_eps_max") if config.noise_bounds else ()
    return named | {name: () for name in bounds}


def _modulation_shapes(prefix: str, size: int, c: int | None) -> dict[str, tuple[int, ...]]:
    if c is None:
        return {}
    name = f"{prefix}adaLN_modulation"
    return {f"{name}.weight": (size, c), f"{name}.bias": (size,)}


def modulation(w: Tensors, condition: Tensor | None, parts: int, prefix: str = "") -> list[Any]:
    """`parts` vectors `(D,)`, or `(T, D)` of conditions `(T, C)`; neutral without adaLN.

    They are shift, scale and, of a block, gate, twice.
    """
    if condition is None:
        return [0.0, 0.0, 1.0] * 2 if parts == 6 else [0.0, 0.0]
    name = f"{prefix}adaLN_modulation"
    return list(F.linear(condition, w[f"{name}.weight"], w[f"{name}.bias"]).chunk(parts, -1))


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Without a bias; statistics in fp32 or wider."""
    return F.layer_norm(x, weight.shape, weight, None, LAYER_EPS)
