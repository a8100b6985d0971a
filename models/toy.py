"""Models for tests and demonstrations: random transformers, and exact denoisers of known laws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations, product
from math import prod
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dlm_decode.errors import CapabilityError
from dlm_decode.models import FAMILIES, Attend, ModelInfo
from dlm_decode.models.backbone import Backbone, Block
from dlm_decode.models.dream import Dream
from dlm_decode.models.llada import LLaDA
from dlm_decode.models.published import Family, Published
from dlm_decode.models.sdar import SDAR

M = TypeVar("M", bound=Family)

LOG_ZERO = -1e4
"""Logit of the impossible: its probability is exactly 0 in every dtype, and 0 * logit is no NaN."""

# Mean and standard deviation (times sqrt(fan-in) for matrices) that give logits a deviation of
# about 5 and mask positions top probabilities from 0.15 to 1.
SPREAD = {
    "attn_norm": (1.0, 0.2),
    "ff_norm": (1.0, 0.2),
    "q_norm": (1.5, 0.3),
    "k_norm": (1.5, 0.3),
    "q": (0.0, 3.2),
    "k": (0.0, 3.2),
    "v": (0.0, 1.0),
    "q_bias": (0.0, 0.45),
    "k_bias": (0.0, 0.45),
    "v_bias": (0.0, 0.25),
    "out": (0.0, 2.0),
    "gate": (0.0, 1.4),
    "up": (0.0, 1.0),
    "down": (0.0, 1.0),
    "qkv": (0.0, 2.0),
    "router": (0.0, 1.5),
    "router_bias": (0.0, 0.2),
    "expert_gate": (0.0, 1.4),
    "expert_up": (0.0, 1.0),
    "expert_down": (0.0, 1.0),
}


def random_model(
    family: str,
    seed: int = 0,
    *,
    changes: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Family:
    """A tiny model of any registered family with random weights, small enough to test with.

    `changes` are fields of its config.json other than those of the family's `tiny`.
    """
    return _random(cast("type[Family]", FAMILIES.get(family)), seed, changes or {}, dtype)


def random_llada(
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int | None = None,
    vocab: int = 48,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
) -> LLaDA:
    """A LLaDA with random weights; mask id `vocab - 4`, end id `vocab - 6`."""
    sizes = {
        "d_model": hidden,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": kv_heads or heads,
        "mlp_hidden_size": 2 * hidden,
        "max_sequence_length": max_positions,
        "embedding_size": vocab,
    }
    return _random(LLaDA, seed, sizes | _vocabulary(vocab), dtype)


def random_dream(
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 48,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
) -> Dream:
    """A Dream (shift 1, grouped queries) with random weights; mask `vocab - 4`, end `vocab - 6`."""
    sizes = _sizes(layers, hidden, heads, kv_heads, max_positions)
    return _random(Dream, seed, sizes | _vocabulary(vocab), dtype)


def random_sdar(
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 48,
    block: int = 4,
    max_positions: int = 512,
    dtype: torch.dtype = torch.float32,
) -> SDAR:
    """A block-causal SDAR (blocks of `block`) with random weights; ids as in `random_dream`."""
    sizes = _sizes(layers, hidden, heads, kv_heads, max_positions)
    blocks = {"head_dim": hidden // heads, "block_size": block}
    return _random(SDAR, seed, sizes | blocks | _vocabulary(vocab), dtype)


def _random(family: type[M], seed: int, changes: Mapping[str, Any], dtype: torch.dtype) -> M:
    files = Published({**family.tiny, **changes})
    return randomise(cast("M", family.from_published(files, device="cpu", dtype=dtype)), seed)


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, positions: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": positions,
    }


def _vocabulary(size: int) -> dict[str, int]:
    ids = {"mask_token_id": size - 4, "eos_token_id": size - 6, "pad_token_id": size - 6}
    return {"vocab_size": size, **ids}


@torch.no_grad()
def randomise(model: M, seed: int) -> M:
    """Fill a model with random weights; those of a seed are the same up to rounding in any dtype.

    In a `Backbone` the mask's row of the head is zero, so that the mask is never the argmax.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(view: Tensor, mean: float, deviation: float) -> None:
        scale = deviation / view.shape[-1] ** 0.5 if view.ndim > 1 else deviation
        noise = torch.randn(view.shape, generator=generator, dtype=torch.float64)
        view.copy_(mean + scale * noise)

    if not isinstance(model, Backbone):
        for view in model.weights().values():
            draw(view, *((0.0, 1.5) if view.ndim > 1 else (1.0, 0.2)))
        return model
    for block in model.blocks:
        assert isinstance(block, Block)
        for part, view in block.parts().items():
            draw(view, *SPREAD[part.removeprefix("shared_").partition("/")[0]])
    draw(model.embed, 0.0, model.config.hidden_size**0.5)
    draw(model.norm, 1.0, 0.2)
    if not model.config.tied:
        draw(model.head, 0.0, 5.0)
        model.head[model.info.mask_id] = 0.0
    return model


class Tabular:
    """The exact denoiser of a known joint law over a short canvas: a `DiffusionLM`.

    `joint` maps sequences of n tokens to weights. Token i of a sequence stands at position
    `offset + i`; other positions are ignored. A position's logits are the log-probabilities of its
    token given the revealed tokens it can see: what it cannot see counts as masked. Where no
    sequence agrees with the revealed tokens, all tokens are equally likely. The mask id is the
    last of the vocabulary. With `shift` 1 the output at position i predicts token i + 1.

    One layer of uniform attention carries the canvas: each value is a one-hot of (position, token),
    so that the mean over the visible keys tells which tokens those are, whatever rows, stored
    values and branches the engine uses. Letters: n positions, S sequences.
    """

    def __init__(
        self,
        joint: Mapping[tuple[int, ...], float],
        *,
        vocab_size: int | None = None,
        offset: int = 0,
        shift: int = 0,
        end_ids: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        possible = {sequence: weight for sequence, weight in joint.items() if weight > 0}
        self.sequences = torch.tensor(list(possible), device=device)
        self.weights = torch.tensor(list(possible.values()), dtype=torch.float64, device=device)
        self.length, self.offset = self.sequences.shape[1], offset
        self.dtype, self.device = dtype, self.sequences.device
        vocab = vocab_size or int(self.sequences.max()) + 2
        self.info = ModelInfo(
            family="tabular",
            vocab_size=vocab,
            hidden_size=self.length + 1,
            layers=1,
            heads=1,
            kv_heads=1,
            head_size=self.length * vocab,
            max_positions=offset + self.length,
            mask_id=vocab - 1,
            end_ids=end_ids,
            shift=shift,
            runs_layers=False,
        )

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        """The canvas that each token sees, and its own place in it, `(T, n + 1)`."""
        if embeds is not None:
            raise CapabilityError("a tabular model reads token ids, not embeddings")
        cells = positions - self.offset
        inside = (cells >= 0) & (cells < self.length)
        codes = cells.clamp(0, self.length - 1) * self.info.vocab_size + ids
        values = F.one_hot(codes, self.info.head_size) * inside[:, None]
        v = values[:, None].to(self.dtype)
        uniform = torch.zeros_like(v)
        canvas = self._canvas(attend(0, uniform, uniform, v)[:, 0])
        return torch.cat((canvas, cells[:, None]), dim=1).to(self.dtype)

    def embedding(self, ids: Tensor) -> Tensor:
        """Refused: a tabular model has no embeddings."""
        raise CapabilityError("a tabular model reads token ids, not embeddings")

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Log-probabilities `(n, S)` in the columns `[start, stop)` of the vocabulary."""
        codes = hidden.round().long()
        cells = codes[:, -1] + self.info.shift
        inside = (cells >= 0) & (cells < self.length)
        mass = self._agreeing(codes[:, :-1])
        tokens = self.sequences.T[cells.clamp(0, self.length - 1)]
        law = mass.new_zeros(len(codes), self.info.vocab_size).scatter_add(1, tokens, mass)
        total = mass.sum(1, keepdim=True)
        any_token = torch.full_like(law, 1.0 / (self.info.vocab_size - 1))
        any_token[:, self.info.mask_id] = 0.0
        law = torch.where((total > 0) & inside[:, None], law / total, any_token)
        return law.log().clamp(min=LOG_ZERO)[:, start:stop].to(self.dtype)

    def _canvas(self, mean: Tensor) -> Tensor:
        """Tokens `(T, n)` from the mean of the visible one-hots `(T, n * V)`.

        The least of the entries is what one key counts for. A cell that is seen twice gets a code
        beyond the vocabulary: no sequence agrees with it.
        """
        present = mean > mean.amax(-1, keepdim=True) * 1e-3
        once = mean.masked_fill(~present, torch.inf).amin(-1, keepdim=True)
        counts = (mean / once).round().unflatten(-1, (self.length, self.info.vocab_size))
        tokens, times = counts.argmax(-1), counts.sum(-1)
        tokens = tokens.masked_fill(times == 0, self.info.mask_id)
        return tokens.masked_fill(times > 1, self.info.vocab_size)

    def _agreeing(self, canvas: Tensor) -> Tensor:
        """Weights `(T, S)` of the sequences that agree with the revealed tokens of `(T, n)`."""
        masked = canvas[:, None] == self.info.mask_id
        agrees = (masked | (canvas[:, None] == self.sequences)).all(-1)
        return agrees * self.weights


def from_table(joint: Tensor, *, offset: int = 0, shift: int = 0) -> Tabular:
    """The law of a table `(V - 1,) * n` of weights, one axis a position."""
    cells = product(*(range(size) for size in joint.shape))
    law = dict(zip(cells, joint.flatten().tolist(), strict=True))
    return Tabular(law, vocab_size=max(joint.shape) + 1, offset=offset, shift=shift)


def shuffle_task(n: int, *, offset: int = 0) -> Tabular:
    """Any order of n items (ParallelBench Shuffle, arXiv:2510.04767)."""
    return Tabular({order: 1.0 for order in permutations(range(n))}, offset=offset)


def replace_random_task(n: int, *, offset: int = 0) -> Tabular:
    """Items 0 .. n - 1, one of them replaced by item n (ParallelBench Replace Random)."""
    items = tuple(range(n))
    return Tabular({(*items[:i], n, *items[i + 1 :]): 1.0 for i in items}, offset=offset)


def copy_task(items: Sequence[int], *, offset: int = 0) -> Tabular:
    """One sequence only (ParallelBench Copy): positions that depend on nothing."""
    return Tabular({tuple(items): 1.0}, offset=offset)


def xor_task(*, offset: int = 0) -> Tabular:
    """Two fair bits and their exclusive or: independent in pairs, not as three."""
    return Tabular({(a, b, a ^ b): 1.0 for a, b in product((0, 1), repeat=2)}, offset=offset)


def independent_task(ps: Sequence[Sequence[float]], *, offset: int = 0) -> Tabular:
    """Positions drawn apart; `ps[i][v]` is the probability of token v at position i."""
    sequences = product(*(range(len(p)) for p in ps))
    law = {s: prod(p[token] for p, token in zip(ps, s, strict=True)) for s in sequences}
    return Tabular(law, vocab_size=max(map(len, ps)) + 1, offset=offset)
