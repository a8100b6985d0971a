"""Muon for the matrices inside the blocks, AdamW for embeddings, head and norms; one schedule for
both.

Muon orthogonalises each matrix's momentum by a Newton-Schulz iteration (Jordan et al., 2024); the
update is scaled by `0.2 * sqrt(max(rows, columns))` so that its root mean square matches AdamW's
(Liu et al., arXiv 2502.16982).
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from dlm_decode.training.models import TinyTransformer

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_FUSED = {"qkv": 3, "gate_up": 2}


def orthogonalise(
    matrices: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Roughly the nearest orthogonal matrix to each of `matrices` `[n, rows, columns]`, rows <=
    columns.
    """
    a, b, c = _NEWTON_SCHULZ
    x = (matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(matrices.dtype)


class Optimizer:
    """Muon and AdamW over one model; `step(scale)` applies the learning rate times `scale`."""

    def __init__(
        self,
        model: TinyTransformer,
        *,
        learning_rate: float,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
    ) -> None:
        self.learning_rate, self.weight_decay, self.momentum = learning_rate, weight_decay, momentum
        named = dict(model.named_parameters())
        self.matrices = {k: p for k, p in named.items() if k.startswith("blocks.") and p.ndim == 2}
        self.buffers = {k: torch.zeros_like(p) for k, p in self.matrices.items()}
        rest: list[nn.Parameter] = [p for k, p in named.items() if k not in self.matrices]
        self.adamw = torch.optim.AdamW(
            rest, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update from the parameters' gradients, which are then cleared."""
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate * scale
        self.adamw.step()
        self._muon_step(self.learning_rate * scale)
        self.adamw.zero_grad(set_to_none=True)
        for p in self.matrices.values():
            p.grad = None

    def _muon_step(self, learning_rate: float) -> None:
        """All matrices of one shape are orthogonalised together; fused projections count as
        separate matrices.
        """
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, p in self.matrices.items():
            assert p.grad is not None
            buffer = self.buffers[name]
            buffer.lerp_(p.grad, 1 - self.momentum)
            update = p.grad.lerp(buffer, self.momentum)
            parts = _FUSED.get(name.rsplit(".", 1)[-1], 1)
            for piece, change in zip(p.data.chunk(parts), update.chunk(parts), strict=True):
                rows, columns = piece.shape
                wide = (change, piece) if rows <= columns else (change.mT, piece.mT)
                by_shape[tuple(sorted((rows, columns)))].append(wide)  # type: ignore[index]
        for (_, longest), pairs in by_shape.items():
            updates = orthogonalise(torch.stack([change for change, _ in pairs]))
            for update, (_, piece) in zip(updates, pairs, strict=True):
                piece.mul_(1 - learning_rate * self.weight_decay)
                piece.sub_(update, alpha=learning_rate * 0.2 * math.sqrt(longest))

    def state_dict(self) -> dict[str, Any]:
        """Everything `load_state_dict` needs to go on exactly."""
        return {"adamw": self.adamw.state_dict(), "buffers": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.adamw.load_state_dict(state["adamw"])
        for name, buffer in state["buffers"].items():
            self.buffers[name].copy_(buffer)


def schedule(
    step: int, steps: int, *, warmup: int = 100, decay: float = 0.4, floor: float = 0.02
) -> float:
    """Learning rate multiplier: linear warm-up, constant, linear decay to `floor` over the last
    `decay` of `steps`.
    """
    warm = min(1.0, (step + 1) / max(1, min(warmup, steps // 4)))
    return warm * max(floor, min(1.0, (steps - step) / max(1.0, decay * steps)))
