"""Monte-Carlo estimates of a continuation's log-likelihood under a masked diffusion model.

Two published definitions, both lower bounds in expectation: `llada` (arXiv:2502.09992, equation 6)
masks an exact number of target positions, stratified over a batch; `dream` (arXiv:2508.15487, its
evaluation code) masks each with probability p, stratified over a batch, never the closing end id.
Every request has a generator of its own, seeded from its text, so that an estimate does not depend
on batching, order or the number of processes. Shapes: b draws of a batch, N row length, L target.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_decode.attention import Group, PackedAttention
from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.models import DiffusionLM

DREAM_EPS = 1e-3


@dataclass(frozen=True)
class MonteCarlo:
    """How to estimate: `draws` masks in batches of `batch`, which stratify each other."""

    draws: int = 128
    batch: int = 32
    definition: Literal["llada", "dream"] = "llada"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.draws < 1 or self.draws % self.batch:
            raise OptionError(
                f"mc_num must be a positive multiple of mc_batch_size, got {self.draws} and"
                f" {self.batch}"
            )
        if self.definition not in ("llada", "dream"):
            raise OptionError(f"nll must be llada or dream, got {self.definition!r}")


@torch.inference_mode()
def log_likelihood(
    model: DiffusionLM, context: list[int], target: list[int], how: MonteCarlo
) -> float:
    """The estimate, in nats, of log p(target | context); `dream` wants the end id in `target`."""
    _check(model, context, target)
    generator = torch.Generator().manual_seed(request_seed(how.seed, context, target))
    row = torch.tensor(context + target)
    total = 0.0
    for _ in range(how.draws // how.batch):
        masked, weight = _draw(how, len(context), len(target), generator)
        total += float((weight * _loss(model, row, masked)).sum())
    return -total / how.draws


def _check(model: DiffusionLM, context: list[int], target: list[int]) -> None:
    if not model.info.has_mask:
        raise CapabilityError(f"log-likelihoods need masks, and {model.info.family} has none")
    if model.info.regime != "full":
        raise CapabilityError("log-likelihoods are defined for models with full attention only")
    if model.info.shift and not context:
        raise CapabilityError("this model predicts the next position: the context can't be empty")
    if not target:
        raise CapabilityError("the continuation has no tokens")


def request_seed(seed: int, context: list[int], target: list[int]) -> int:
    """A seed that is the request's own."""
    text = repr((seed, context, target)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")


def _draw(
    how: MonteCarlo, before: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Masks `(b, N)` over the whole row and the weights `(b,)` of their losses."""
    draw = _draw_llada if how.definition == "llada" else _draw_dream
    masked, weight = draw(how.batch, length, generator)
    return F.pad(masked, (before, 0)), weight


def _draw_llada(b: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Exactly x of L positions, x spread evenly from a random start; weight L / x."""
    start = torch.randint(1, length + 1, (), generator=generator)
    x = torch.round(torch.linspace(float(start), float(start + (b - 1) * (length / b)), b)).long()
    x = (x - 1) % length + 1
    ranks = torch.rand(b, length, generator=generator).argsort(1).argsort(1)
    return ranks < x[:, None], length / x


def _draw_dream(b: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each position with probability p, spread evenly over the batch; weight 1 / p."""
    t = (torch.rand((), generator=generator) + torch.arange(b) / b) % 1
    p = (1 - DREAM_EPS) * t + DREAM_EPS
    masked = torch.rand(b, length, generator=generator) < p[:, None]
    masked[:, -1] = False  # the closing end id is always seen
    return masked, 1 / p


def _loss(model: DiffusionLM, row: Tensor, masked: Tensor) -> Tensor:
    """Summed cross-entropy `(b,)` of each draw's masked positions, from one forward."""
    b, n = masked.shape
    ids = torch.where(masked, model.info.mask_id, row).flatten().to(model.device)
    positions = torch.arange(n, device=model.device).repeat(b)
    hidden = model.forward(ids, positions, PackedAttention((Group(0, b, n, True),)))
    draws, places = masked.nonzero(as_tuple=True)
    asked = (draws * n + places - model.info.shift).to(model.device)
    logits = model.logits(hidden[asked]).float()
    losses = F.cross_entropy(logits, row[places].to(model.device), reduction="none").cpu()
    return torch.zeros(b).index_add(0, draws, losses)
