"""Plain forwards of the two full-attention checkpoint layouts, and the log of a decode loop.

An oracle: nothing here uses the toolkit, so that the two can disagree. One class computes
LLaDA (arXiv 2502.09992) and Dream (arXiv 2508.15487) logits from a folder with `config.json` and
`model.safetensors`. Letters: `B` rows, `N` positions, `Q` fed positions, `V` vocabulary, `D` head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

KVCache = list[tuple[Tensor, Tensor]]
"""Per layer K before rotation and V, each `(B, N, heads, D)`. An empty list asks to be filled."""

Call = tuple[int, int, int]
"""One forward: rows, first position, number of positions."""

_LLADA_NAMES = {
    "norm1": "attn_norm",
    "norm2": "ff_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "attn_out",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}
_DREAM_NAMES = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Network:
    """A LLaDA- or Dream-layout checkpoint as one function from ids to raw logits.

    `calls` counts the forwards. Dream's logits come back raw: row `i` predicts position `i + 1`.
    """

    def __init__(
        self,
        folder: Path | str,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        config = json.loads((Path(folder) / "config.json").read_text())
        weights = load_file(str(Path(folder) / "model.safetensors"), device=str(device))
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.is_dream: bool = config["model_type"] == "Dream"
        if self.is_dream:
            prefix, names, tops = "model.layers.", _DREAM_NAMES, _top_names_dream()
            depth, heads = config["num_hidden_layers"], config["num_attention_heads"]
            self.kv_heads: int = config["num_key_value_heads"]
        else:
            prefix, names, tops = "model.transformer.blocks.", _LLADA_NAMES, _top_names_llada()
            depth, heads = config["n_layers"], config["n_heads"]
            self.kv_heads = config["n_kv_heads"] or heads
        self.heads: int = heads
        self.embedding, self.final_norm, self.head = (weights[name] for name in tops)
        self.layers = [
            {
                short: (weights[f"{stem}.weight"], weights.get(f"{stem}.bias"))
                for short, long in names.items()
                for stem in [f"{prefix}{index}.{long}"]
            }
            for index in range(depth)
        ]
        self.eps: float = config["rms_norm_eps"]
        self.theta: float = config["rope_theta"]
        self.mask_id: int = config["mask_token_id"]
        self.calls: list[Call] = []

    @torch.no_grad()
    def __call__(
        self,
        ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        start: int = 0,
        seen: Tensor | None = None,
        fresh: KVCache | None = None,
    ) -> Tensor:
        """Raw logits `(B, Q, V)` of ids `(B, Q)` at positions `start ..`.

        `attention_mask` `(B, N)`: 1 marks real tokens, full forwards only; `seen (Q, N)` which keys
        each query sees. `fresh`, an empty list, is filled with the fed positions' own K/V. `cache`
        decides by its length: empty, it is filled; `start` long (prefix cache), the new K/V are
        appended for this call only; longer (dual cache), slots `start ..` are overwritten and
        everything attended.
        """
        self.calls.append((ids.shape[0], start, ids.shape[1]))
        fill = cache is not None and not cache
        total = ids.shape[1] + start
        if cache:
            total = max(total, cache[0][0].shape[1])
        cos, sin = self._rotation(total, attention_mask, ids.device)
        bias = None
        if attention_mask is not None:
            bias = attention_mask.bool()[:, None, None, :]  # keys only: pads are never attended
        bias = bias if seen is None else seen
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            h = self._norm(x, layer["norm1"][0])
            q, k, v = (self._project(h, layer[name]) for name in "qkv")
            if fresh is not None:
                fresh.append((k, v))
            if fill:
                assert cache is not None
                cache.append((k, v))
            elif cache:
                k, v = _merge(cache, index, k, v, start)
            x = x + F.linear(self._attend(q, k, v, cos, sin, start, bias), layer["o"][0])
            h = self._norm(x, layer["norm2"][0])
            gated = F.silu(F.linear(h, layer["gate"][0])) * F.linear(h, layer["up"][0])
            x = x + F.linear(gated, layer["down"][0])
        return F.linear(self._norm(x, self.final_norm), self.head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * weight

    def _project(self, h: Tensor, weight: tuple[Tensor, Tensor | None]) -> Tensor:
        out = F.linear(h, *weight)
        head_dim = self.embedding.shape[1] // self.heads
        return out.view(*out.shape[:2], -1, head_dim)

    def _rotation(
        self, total: int, attention_mask: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """cos and sin `(B or 1, N, 1, D)`; Dream numbers the real tokens only, LLaDA all slots."""
        head_dim = self.embedding.shape[1] // self.heads
        positions = torch.arange(total, device=device)[None]
        if attention_mask is not None and self.is_dream:
            positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        steps = torch.arange(0, head_dim, 2, device=device).float() / head_dim
        angle = positions[..., None].float() * (1.0 / self.theta**steps)
        angle = torch.cat([angle, angle], dim=-1)[:, :, None, :]
        return angle.cos(), angle.sin()

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        start: int,
        bias: Tensor | None,
    ) -> Tensor:
        rows = slice(start, start + q.shape[1])
        q = self._rotate(q, cos[:, rows], sin[:, rows])
        k = self._rotate(k, cos, sin)  # all keys, at each call: the published caches do the same
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return out.transpose(1, 2).flatten(2)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # LLaDA rotates in float32 (`rope_full_precision`); Dream casts cos and sin to the dtype.
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat([-high, low], dim=-1)
        if self.is_dream:
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return (x * cos + turned * sin).to(x.dtype)


def _top_names_llada() -> tuple[str, str, str]:
    stem = "model.transformer."
    return stem + "wte.weight", stem + "ln_f.weight", stem + "ff_out.weight"


def _top_names_dream() -> tuple[str, str, str]:
    return "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def _merge(cache: KVCache, index: int, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """K and V a cached call attends to: appended to a cropped cache, or put into a full one."""
    old_k, old_v = cache[index]
    if old_k.shape[1] == start:
        return torch.cat([old_k, k], dim=1), torch.cat([old_v, v], dim=1)
    old_k[:, start : start + k.shape[1]] = k
    old_v[:, start : start + v.shape[1]] = v
    return old_k, old_v


def crop(cache: KVCache, length: int) -> KVCache:
    """The first `length` slots of a cache, as the prefix cache keeps them."""
    return [(k[:, :length], v[:, :length]) for k, v in cache]


@dataclass(frozen=True)
class Trace:
    """What a loop returned and did.

    Attributes:
        tokens: the canvas `(B, N)`, prompt and generation.
        forwards: one entry per forward: rows, first position, number of positions.
        commits: one list per forward: `(row, position, token)` written after it, by position.
    """

    tokens: Tensor
    forwards: list[Call]
    commits: list[list[tuple[int, int, int]]]

    @property
    def nfe(self) -> int:
        return len(self.forwards)


class Recorder:
    """The network as a loop sees it: keeps the canvas that each forward saw.

    The loop writes into `canvas` in place; what changed between two forwards are the commits of
    the first. Costs one copy of the canvas a step and no synchronisation, for the benchmark's sake.
    """

    def __init__(self, network: Network, canvas: Tensor) -> None:
        self.network = network
        self.canvas = canvas
        self._seen: list[Tensor] = []
        self._first = len(network.calls)

    def __call__(
        self,
        ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        start: int = 0,
    ) -> Tensor:
        self._seen.append(self.canvas.clone())
        return self.network(ids, attention_mask=attention_mask, cache=cache, start=start)

    def trace(self) -> Trace:
        commits: list[list[tuple[int, int, int]]] = []
        for before, after in zip(self._seen, [*self._seen[1:], self.canvas], strict=True):
            where = (before != after).nonzero().tolist()
            commits.append([(row, at, int(after[row, at])) for row, at in where])
        return Trace(self.canvas, list(self.network.calls[self._first :]), commits)


def canvas_of(prompt: Tensor, gen_length: int, mask_id: int) -> Tensor:
    """Prompt `(B, P)` followed by `gen_length` masks."""
    tail = torch.full((prompt.shape[0], gen_length), mask_id, dtype=torch.long)
    return torch.cat([prompt, tail.to(prompt.device)], dim=1)
