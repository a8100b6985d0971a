"""SEDD's network over unpacked rows, from its published description: log-scores at a given noise.

Plain and slow: one function, its tensors by their published names, attention written out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def log_scores(
    w: Mapping[str, Tensor], ids: Tensor, sigma: Tensor, *, heads: int, scaled: bool
) -> Tensor:
    """Log concrete scores `(B, N, V)` of `ids (B, N)` at the total noise `sigma (B,)`.

    `scaled` subtracts log(exp(sigma) - 1) + log(V - 1). Where a token already stands its own score
    is 1.
    """
    x = w["vocab_embed.embedding"][ids]
    c = silu(linear(w, "sigma_map.mlp.2", silu(linear(w, "sigma_map.mlp.0", waves(sigma)))))
    turns = torch.arange(ids.shape[1], dtype=x.dtype)[:, None] * w["rotary_emb.inv_freq"]
    for layer in range(sum(name.endswith("attn_qkv.weight") for name in w)):
        at = f"blocks.{layer}."
        shift, scale, gate, shift2, scale2, gate2 = adaptive(w, at, c, 6)
        h = norm(x, w[at + "norm1.weight"]) * (1 + scale) + shift
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in (h @ w[at + "attn_qkv.weight"].T).chunk(3, -1)
        )
        q, k = turned(q, turns), turned(k, turns)
        mixed = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        x = x + gate * (mixed.transpose(1, 2).flatten(2) @ w[at + "attn_out.weight"].T)
        h = norm(x, w[at + "norm2.weight"]) * (1 + scale2) + shift2
        x = x + gate2 * linear(w, at + "mlp.2", gelu(linear(w, at + "mlp.0", h)))
    shift, scale = adaptive(w, "output_layer.", c, 2)
    h = norm(x, w["output_layer.norm_final.weight"]) * (1 + scale) + shift
    scores = linear(w, "output_layer.linear", h)
    if scaled:
        scores = scores - sigma.expm1().log()[:, None, None] - math.log(scores.shape[-1] - 1)
    return scores.scatter(-1, ids[..., None], 0.0)


def waves(sigma: Tensor) -> Tensor:
    frequencies = torch.tensor([10000.0 ** (-i / 128) for i in range(128)], dtype=sigma.dtype)
    angles = sigma[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


def linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def adaptive(w: Mapping[str, Tensor], at: str, c: Tensor, parts: int) -> list[Tensor]:
    return list(linear(w, f"{at}adaLN_modulation", c)[:, None].chunk(parts, -1))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], -1)


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())
