"""One small transformer for both models, and its export to the published layouts.

The maths is Llama's and LLaDA's: pre-norm, RMSNorm, rotary halves, SwiGLU, no bias, untied head.
Only the attention mask differs between the autoregressive and the diffusion model. Shapes: B rows,
L positions, D width, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

LLAMA_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "ff_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "qkv": tuple(f"model.layers.{{i}}.self_attn.{p}_proj.weight" for p in "qkv"),
    "attn_out": "model.layers.{i}.self_attn.o_proj.weight",
    "gate_up": tuple(f"model.layers.{{i}}.mlp.{p}_proj.weight" for p in ("gate", "up")),
    "down": "model.layers.{i}.mlp.down_proj.weight",
}
LLADA_NAMES = {
    "embed": "model.transformer.wte.weight",
    "norm": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
    "attn_norm": "model.transformer.blocks.{i}.attn_norm.weight",
    "ff_norm": "model.transformer.blocks.{i}.ff_norm.weight",
    "qkv": tuple(f"model.transformer.blocks.{{i}}.{p}_proj.weight" for p in "qkv"),
    "attn_out": "model.transformer.blocks.{i}.attn_out.weight",
    "gate_up": tuple(f"model.transformer.blocks.{{i}}.{p}_proj.weight" for p in ("ff", "up")),
    "down": "model.transformer.blocks.{i}.ff_out.weight",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a tiny transformer. `width` must be a multiple of `2 * heads`."""

    vocab_size: int
    width: int = 128
    layers: int = 5
    heads: int = 4
    hidden: int = 384
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width}"
            )


class Block(nn.Module):
    """Attention and SwiGLU, each behind its own norm; fused input projections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attn_norm = nn.Parameter(torch.ones(config.width))
        self.ff_norm = nn.Parameter(torch.ones(config.width))
        self.qkv = nn.Parameter(torch.empty(3 * config.width, config.width))
        self.attn_out = nn.Parameter(torch.empty(config.width, config.width))
        self.gate_up = nn.Parameter(torch.empty(2 * config.hidden, config.width))
        self.down = nn.Parameter(torch.empty(config.width, config.hidden))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """`x` `[B, L, D]`, `cos` and `sin` `[B or 1, 1, L, D/H]`, `mask` `[B, 1, 1 or L, L]` or
        None.
        """
        q, k, v = rearrange(
            F.linear(_norm(x, self.attn_norm, self.config.norm_eps), self.qkv),
            "b l (three h d) -> three b h l d", three=3, h=self.config.heads,
        )  # fmt: skip
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + F.linear(rearrange(mixed, "b h l d -> b l (h d)"), self.attn_out)
        gate, up = F.linear(_norm(x, self.ff_norm, self.config.norm_eps), self.gate_up).chunk(
            2, dim=-1
        )
        return x + F.linear(F.silu(gate) * up, self.down)


class TinyTransformer(nn.Module):
    """Token ids to logits; causal or bidirectional by argument."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.width))
        self.head = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attn_out", "down"))
                parameter.normal_(0.0, 0.02 / (2 * self.config.layers) ** 0.5 if residual else 0.02)

    def forward(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Logits `[B, L, V]` of `ids` `[B, L]`.

        `positions` `[B, L]` defaults to 0..L-1. `mask` is boolean, True where a query may look; it
        may not be combined with `causal`.
        """
        return F.linear(
            self.hidden_states(ids, positions=positions, mask=mask, causal=causal), self.head
        )

    def hidden_states(
        self,
        ids: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Final normed states `[B, L, D]`, for a head over chosen positions only."""
        x = F.embedding(ids, self.embed)
        if positions is None:
            positions = torch.arange(ids.shape[1])[None]
        cos, sin = _rotary(
            positions, self.config.width // self.config.heads, self.config.rope_theta, x.dtype
        )
        for block in self.blocks:
            x = block(x, cos, sin, mask, causal)
        return _norm(x, self.norm, self.config.norm_eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _rotary(
    positions: Tensor, size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` `[B, 1, L, size]` of the angles `position * theta ** (-2 i / size)`, both
    halves alike.
    """
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-b, a], dim=-1) * sin.to(x.dtype)


@torch.no_grad()
def to_diffusion(model: TinyTransformer, *, mask_id: int, n_tokens: int) -> TinyTransformer:
    """A copy to train as a diffusion model: the mask's embedding is the mean over the `n_tokens`
    real tokens.
    """
    copy = TinyTransformer(model.config)
    copy.load_state_dict(model.state_dict())
    copy.embed[mask_id] = model.embed[:n_tokens].mean(0)
    return copy


def export_tensors(
    model: TinyTransformer, names: Mapping[str, str | tuple[str, ...]]
) -> dict[str, Tensor]:
    """The weights under a published layout's names (`LLAMA_NAMES` or `LLADA_NAMES`), fused
    projections split.
    """
    tensors: dict[str, Tensor] = {}
    for key, weight in model.state_dict().items():
        _, index, part = key.split(".") if key.startswith("blocks.") else ("", "", key)
        target = names[part]
        targets = (target,) if isinstance(target, str) else target
        for name, piece in zip(targets, weight.chunk(len(targets)), strict=True):
            tensors[name.format(i=index)] = piece.clone().contiguous()
    return tensors


def llama_config(config: ModelConfig, *, eos_id: int, max_length: int) -> dict[str, Any]:
    """`config.json` of the autoregressive twin."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "head_dim": config.width // config.heads,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "initializer_range": 0.02,
        "intermediate_size": config.hidden,
        "max_position_embeddings": max_length,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.heads,
        "pad_token_id": eos_id,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def llada_config(
    config: ModelConfig, *, eos_id: int, mask_id: int, max_length: int
) -> dict[str, Any]:
    """`config.json` of the diffusion model, with the keys of the published LLaDA checkpoints."""
    return {
        "activation_type": "silu",
        "alibi": False,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "auto_map": {
            "AutoConfig": "configuration_llada.LLaDAConfig",
            "AutoModel": "modeling_llada.LLaDAModelLM",
            "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
        },
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": config.width,
        "embedding_dropout": 0.0,
        "embedding_size": config.vocab_size,
        "eos_token_id": eos_id,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": mask_id,
        "max_sequence_length": max_length,
        "mlp_hidden_size": config.hidden,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": config.heads,
        "n_kv_heads": config.heads,
        "n_layers": config.layers,
        "pad_token_id": eos_id,
        "residual_dropout": 0.0,
        "rms_norm_eps": config.norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": config.rope_theta,
        "scale_logits": False,
        "torch_dtype": "float16",
        "use_cache": False,
        "vocab_size": config.vocab_size,
        "weight_tying": False,
    }
