"""Feed-forward layers of the backbone: one SwiGLU, or many of which each token uses a few.

Letters in shapes: T tokens, D hidden size, F feed-forward size, E experts, A experts a token uses,
N = T * A pairs of a token and an expert, sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_decode.errors import CheckpointError
from dlm_decode.models.prepacked import linear


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes and switches of a mixture of experts.

    `count` experts of feed-forward size `size`, `active` of them a token; `shared_size` is that of
    one more, which every token uses (0: none). Layers in `dense_layers` have one plain SwiGLU.

    `score` turns the router's outputs into weights. With `renormalise` the chosen ones sum to 1;
    `scale` multiplies them. Experts are chosen in the best `active_groups` of `groups` equal
    groups, a group being as good as its two best experts together. `selection_bias` is a stored
    number an expert that counts in the choice but not in the weight. `router_full_precision` has
    the router multiply in fp32 (LLaDA2), else only its scores are. `block_share` below 1 lets the
    tokens of a block use few experts in common, at least `block_least`, see `coreset`.
    """

    count: int
    active: int
    size: int
    shared_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    active_groups: int = 1
    selection_bias: bool = False
    router_full_precision: bool = False
    block_share: float = 1.0
    block_least: int = 16

    def __post_init__(self) -> None:
        """Refuse experts that do not divide into groups, or too few of them to choose from."""
        group = self.count // self.groups
        grouped = self.groups == 1 or (group * self.groups == self.count and group >= 2)
        enough = self.active <= group * self.active_groups
        if not grouped or not enough or self.active_groups > self.groups:
            raise CheckpointError(
                f"config.json: {self.active} experts a token cannot be chosen in "
                f"{self.active_groups} of {self.groups} equal groups of {self.count} experts"
            )


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up in one matrix."""

    def __init__(
        self, width: int, size: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.gate_up = parameter(2 * size, width, device=device, dtype=dtype)
        self.down = parameter(width, size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`x (T, D)` to `(T, D)`."""
        gate, up = linear(x, self.gate_up).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down)

    def parts(self) -> dict[str, Tensor]:
        """The tensors that checkpoints store one by one, as views."""
        gate, up = self.gate_up.detach().chunk(2)
        return {"gate": gate, "up": up, "down": self.down.detach()}


class Experts(nn.Module):
    """A mixture of SwiGLU experts: only those that some token uses are computed, each once."""

    def __init__(
        self,
        config: ExpertsConfig,
        width: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        e, size = config.count, config.size
        self.router = parameter(e, width, device=device, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        self.bias = parameter(e, device=device, dtype=wide) if config.selection_bias else None
        self.gate_up = parameter(e, 2 * size, width, device=device, dtype=dtype)
        self.down = parameter(e, width, size, device=device, dtype=dtype)
        shared = config.shared_size
        self.shared = SwiGLU(width, shared, device=device, dtype=dtype) if shared else None

    def forward(self, x: Tensor, blocks: Tensor | None = None) -> Tensor:
        """`x (T, D)` to `(T, D)`; tokens of the same number in `blocks (T,)` share a coreset."""
        weights, chosen = route(self.router_logits(x), self.bias, self.config, blocks)
        mixed = self._mix(x, weights, chosen)
        return mixed if self.shared is None else mixed + self.shared(x)

    def router_logits(self, x: Tensor) -> Tensor:
        """The router's outputs `(T, E)` for `x (T, D)`, in fp32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.config.router_full_precision:
            return F.linear(x.to(wide), self.router.to(wide))
        return F.linear(x, self.router).to(wide)

    def _mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum `(T, D)` of the experts `chosen (T, A)` of each token.

        In their order there: nothing is added up in an order that could vary.
        """
        order = chosen.flatten().argsort(stable=True)
        place = order.argsort()
        ends = F.one_hot(chosen.flatten(), self.config.count).sum(0).cumsum(0)
        token = order // self.config.active
        gate, up = grouped_linear(x[token], self.gate_up, ends).chunk(2, dim=-1)
        out = grouped_linear(F.silu(gate) * up, self.down, ends)
        weighted = out[place].view(*chosen.shape, x.shape[-1]) * weights[..., None]
        return weighted.sum(1).to(x.dtype)

    def parts(self) -> dict[str, Tensor]:
        """The tensors that checkpoints store one by one, as views; `name/e` is of expert e."""
        views = {"router": self.router.detach()}
        if self.bias is not None:
            views["router_bias"] = self.bias.detach()
        for e, (gate_up, down) in enumerate(
            zip(self.gate_up.detach(), self.down.detach(), strict=True)
        ):
            views[f"expert_gate/{e}"], views[f"expert_up/{e}"] = gate_up.chunk(2)
            views[f"expert_down/{e}"] = down
        if self.shared is not None:
            views |= {f"shared_{name}": view for name, view in self.shared.parts().items()}
        return views


def route(
    logits: Tensor, bias: Tensor | None, config: ExpertsConfig, blocks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each token's experts, both `(T, A)`, from `logits (T, E)`.

    Softmax over all experts, then the highest (OLMoE, arXiv:2409.02060); or sigmoids, a bias in the
    choice alone and a choice limited to groups (DeepSeek-V3, arXiv:2412.19437, equations 12 to 16).
    With `blocks (T,)`, tokens choose again in the coreset of their block, where groups no longer
    limit them.
    """
    scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
    biased = scores if bias is None else scores + bias
    chosen = _in_best_groups(biased, config).topk(config.active, dim=-1).indices
    if blocks is not None and config.block_share < 1:
        least = max(config.block_least, config.active)
        allowed = coreset(biased, chosen, blocks, share=config.block_share, least=least)
        chosen = biased.masked_fill(~allowed, -torch.inf).topk(config.active, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if config.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.scale, chosen


def coreset(scores: Tensor, chosen: Tensor, blocks: Tensor, *, share: float, least: int) -> Tensor:
    """Which experts `(T, E)` the tokens of a block may use, the same for all of them.

    dMoE (arXiv:2605.30876): each token votes for its `chosen (T, A)` experts with their biased
    `scores (T, E)`; the coreset is the smallest set of a block's most voted ones that holds a
    `share` of its votes, and at least `least` experts. Sums over a block take O(T^2) memory.
    """
    votes = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    together = (blocks[:, None] == blocks).to(scores.dtype)
    total = together @ votes
    total = total / total.sum(-1, keepdim=True)
    order = total.argsort(dim=-1, descending=True, stable=True)
    before = total.gather(-1, order).cumsum(-1) - total.gather(-1, order)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    return torch.zeros_like(order, dtype=torch.bool).scatter(
        -1, order, (before < share) | (rank < least)
    )


def _in_best_groups(scores: Tensor, config: ExpertsConfig) -> Tensor:
    """`scores (T, E)` with -inf outside the best groups."""
    if config.active_groups == config.groups:
        return scores
    grouped = scores.unflatten(-1, (config.groups, -1))
    quality = grouped.topk(2, dim=-1).values.sum(-1)
    best = quality.topk(config.active_groups, dim=-1).indices
    outside = torch.ones_like(quality, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)


def grouped_linear(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`x (N, D)`, sorted by group, times its group's matrix of `weights (E, F, D)`; `(N, F)`.

    Group e holds the rows before `ends[e]` and after those of e - 1. One kernel on accelerators;
    elsewhere, and in fp64, which that kernel does not have, a product for each group with rows.
    """
    if x.is_cuda and x.dtype != torch.float64:
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends.to(torch.int32))
    stops = ends.tolist()
    spans = zip([0, *stops], stops, weights, strict=False)
    products = [F.linear(x[a:b], weight) for a, b, weight in spans if a < b]
    return torch.cat(products) if products else x.new_empty(0, weights.shape[1])


def parameter(*shape: int, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """Allocated, not initialised, and without a gradient until it is asked for."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)
