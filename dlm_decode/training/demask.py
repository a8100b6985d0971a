"""Training of DEMASK's pairwise predictor for any loaded diffusion model, which stays frozen.

Sequences are noised as block decoding leaves them: decided tokens, one block partly masked, masks
behind it. One forward gives p_j at the block's masks; R of them are revealed one at a time, and
another forward of the R copies gives p_j^(i). The target is D[i, j] = TV(p_j, p_j^(i)). Shapes: B
sequences, W block length, R revealed positions, N sequence length, D hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from dlm_decode.attention import Group, PackedAttention
from dlm_decode.dependency import pairwise, read_predictor
from dlm_decode.errors import OptionError
from dlm_decode.models import DiffusionLM
from dlm_decode.options import Options, option

LEVELS = (0.5, 0.75, 0.9, 0.95, 0.99)
"""Levels at which the quantiles of the error are stored."""
HELD_OUT_BATCHES = 8
_FINGERPRINT_VALUES = 16


@dataclass(frozen=True)
class Text:
    """One text to learn from: `ids` whole, of which the answer begins at `start`."""

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class DemaskConfig(Options):
    """How a predictor is shaped and trained."""

    steps: int = option(300, "updates", low=0)
    rows: int = option(16, "sequences of an update", low=1)
    reveals: int = option(4, "positions of a sequence that are revealed, one a copy", low=1)
    block_length: int = option(16, "window W: the block length of decoding", low=2)
    rank: int = option(32, "inner size r of a head", low=1)
    heads: int = option(2, "heads, averaged", low=1)
    reach: int = option(16, "distances with a bias of their own", low=0)
    greedy: bool = option(False, "reveal the most probable token instead of a drawn one")
    learning_rate: float = option(0.01, "of AdamW, falling to 0 along a cosine", above=0.0)
    floor: float = option(
        1.0,
        "least weight of a pair, which weighs its D: below 1, influences are overstated",
        above=0,
    )
    seed: int = option(0, "of everything drawn")


@dataclass(frozen=True)
class Pairs:
    """Targets of one batch: `hidden (B, W, D)` of the block, `revealed (B, R)` its offsets,
    `target (B, R, W)` and where it counts, `counts (B, R, W)` bool."""

    hidden: Tensor
    revealed: Tensor
    target: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Weights:
    """`query`, `key` `(1, H, r, D)` and `bias (1, H, 2 R + 1)` of a predictor."""

    query: Tensor
    key: Tensor
    bias: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Influences `(B, W, W)` of `hidden (B, W, D)`."""
        return pairwise(hidden, self.query, self.key, self.bias)


@dataclass(frozen=True)
class Calibration:
    """How far predictions are off on held-out pairs: of true minus predicted, the mean and the
    quantiles at `LEVELS`; the mean of the true values; the correlation of both."""

    mean_error: float
    quantiles: tuple[float, ...]
    mean_target: float
    correlation: float


def train_predictor(
    model: DiffusionLM,
    sequences: Sequence[Text],
    config: DemaskConfig,
    log: Callable[[int, float], None] | None = None,
) -> tuple[Weights, Calibration]:
    """A predictor trained on nine tenths of `sequences` and calibrated on the others.

    `log` gets the step and the loss of each update.
    """
    check_sequences(sequences, config)
    held_out = max(len(sequences) // 10, 1)
    known, unknown = sequences[held_out:] or sequences, sequences[:held_out]
    weights = initial_weights(model, config)
    leaves = [weights.query, weights.key, weights.bias]
    optimizer = torch.optim.AdamW(leaves, lr=config.learning_rate, weight_decay=0.01)
    for step in range(config.steps):
        share = 0.5 * (1 + math.cos(math.pi * step / config.steps))
        optimizer.param_groups[0]["lr"] = config.learning_rate * share
        loss = pair_loss(weights, draw_pairs(model, known, config, step), config.floor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if log is not None:
            log(step, float(loss.detach()))
    return weights, calibrate(model, weights, unknown, config)


def check_sequences(sequences: Sequence[Text], config: DemaskConfig) -> None:
    """Raise `OptionError` unless every answer holds at least one block."""
    if not sequences:
        raise OptionError("sequences must hold at least one text, got none")
    shortest = min(len(s.ids) - s.start for s in sequences)
    if shortest < config.block_length:
        raise OptionError(
            f"block_length must be at most the shortest answer's {shortest} tokens, "
            f"got {config.block_length}"
        )


def initial_weights(model: DiffusionLM, config: DemaskConfig) -> Weights:
    """Small random projections; every influence starts at about 5%."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (1, config.heads, config.rank, model.info.hidden_size)

    def matrix() -> Tensor:
        values = torch.randn(shape, generator=generator) * model.info.hidden_size**-0.5
        return values.to(model.device).requires_grad_()

    bias = torch.full((1, config.heads, 2 * config.reach + 1), -3.0, device=model.device)
    return Weights(matrix(), matrix(), bias.requires_grad_())


def pair_loss(weights: Weights, pairs: Pairs, floor: float) -> Tensor:
    """Cross-entropy with soft targets. Pairs weigh max(D, floor): 1 keeps predictions calibrated,
    less stresses the few strong influences at the price of overstating all."""
    predicted = _of_revealed(weights(pairs.hidden), pairs).float().clamp(1e-6, 1 - 1e-6)
    losses = F.binary_cross_entropy(predicted, pairs.target, reduction="none")
    importance = pairs.target.clamp(min=floor) * pairs.counts
    return (losses * importance).sum() / importance.sum().clamp(min=1e-9)


def _of_revealed(influence: Tensor, pairs: Pairs) -> Tensor:
    """The lines `(B, R, W)` of `influence (B, W, W)` that were measured."""
    lines = pairs.revealed[..., None].expand(-1, -1, influence.shape[-1])
    return influence.gather(1, lines)


@torch.no_grad()
def calibrate(
    model: DiffusionLM, weights: Weights, sequences: Sequence[Text], config: DemaskConfig
) -> Calibration:
    """Errors on `HELD_OUT_BATCHES` batches of `sequences`."""
    truths, guesses = [], []
    for batch in range(HELD_OUT_BATCHES):
        pairs = draw_pairs(model, sequences, config, -1 - batch)
        truths.append(pairs.target[pairs.counts])
        guesses.append(_of_revealed(weights(pairs.hidden), pairs)[pairs.counts])
    truth, guess = torch.cat(truths).double().cpu(), torch.cat(guesses).double().cpu()
    error = truth - guess
    quantiles = torch.quantile(error, torch.tensor(LEVELS, dtype=torch.float64))
    both = torch.stack([truth, guess])
    spread = bool((both.std(-1) > 0).all())
    return Calibration(
        float(error.mean()),
        tuple(quantiles.tolist()),
        float(truth.mean()),
        float(torch.corrcoef(both)[0, 1]) if spread else 0.0,
    )


# ------------------------------------------------------------------------------------ targets


@torch.no_grad()
def draw_pairs(
    model: DiffusionLM, sequences: Sequence[Text], config: DemaskConfig, step: int
) -> Pairs:
    """The batch of a step: a function of the configuration and the step alone."""
    generator = torch.Generator().manual_seed(hash((config.seed, step)) % 2**63)
    chosen = torch.randint(len(sequences), (config.rows,), generator=generator).tolist()
    rows = sorted((sequences[i] for i in chosen), key=lambda s: len(s.ids))
    starts = [_block_start(row, config.block_length, generator) for row in rows]
    masked = _block_masks(config, generator)
    noised = [
        _noised(row, start, mask, model.info.mask_id)
        for row, start, mask in zip(rows, starts, masked, strict=True)
    ]
    return measure(model, noised, starts, masked.to(model.device), config, generator)


def _block_start(row: Text, width: int, generator: torch.Generator) -> int:
    blocks = (len(row.ids) - row.start) // width
    return row.start + width * int(torch.randint(blocks, (1,), generator=generator))


def _block_masks(config: DemaskConfig, generator: torch.Generator) -> Tensor:
    """Masked places `(rows, W)`: between 2 and all of each block."""
    order = (
        torch.rand(config.rows, config.block_length, generator=generator).argsort(-1).argsort(-1)
    )
    count = torch.randint(2, config.block_length + 1, (config.rows, 1), generator=generator)
    return order < count


def _noised(row: Text, start: int, mask: Tensor, mask_id: int) -> Tensor:
    ids = torch.tensor(row.ids)
    ids[start + len(mask) :] = mask_id
    ids[start : start + len(mask)].masked_fill_(mask, mask_id)
    return ids


def measure(
    model: DiffusionLM,
    noised: Sequence[Tensor],
    starts: Sequence[int],
    masked: Tensor,
    config: DemaskConfig,
    generator: torch.Generator,
) -> Pairs:
    """Reveal R masks of each sequence in turn and see how the others' laws change.

    `noised` are B sequences of ids `(N_b,)`, in order of length; their blocks begin at `starts`
    and have the masks `masked (B, W)`.
    """
    rows, width = masked.shape
    copies = config.reveals
    hidden = block_states(model, noised, starts, width)
    p = laws(model, hidden)
    noise = torch.rand(rows, width, generator=generator).to(p.device).masked_fill(~masked, -1)
    revealed = noise.argsort(-1, descending=True)[:, :copies]
    tokens = p.argmax(-1)
    if not config.greedy:
        uniform = torch.rand(p.shape, generator=generator).to(p.device)
        tokens = (p.log() - (-uniform.log()).log()).argmax(-1)
    repeated = [noised[b].clone() for b in range(rows) for _ in range(revealed.shape[1])]
    places = (torch.tensor(starts)[:, None] + revealed.cpu()).flatten().tolist()
    shown = tokens.gather(1, revealed).flatten().tolist()
    for ids, place, token in zip(repeated, places, shown, strict=True):
        ids[place] = token
    again = [start for start in starts for _ in range(revealed.shape[1])]
    after = laws(model, block_states(model, repeated, again, width))
    target = 0.5 * (after.unflatten(0, (rows, -1)) - p[:, None]).abs().sum(-1)
    is_masked = masked.gather(1, revealed)[..., None] & masked[:, None]
    itself = revealed[..., None] == torch.arange(width, device=p.device)
    return Pairs(hidden, revealed, target.float(), is_masked & ~itself)


def block_states(
    model: DiffusionLM, rows: Sequence[Tensor], starts: Sequence[int], width: int
) -> Tensor:
    """Hidden states `(B, W, D)` that predict each row's block, from one packed forward."""
    lengths = [len(row) for row in rows]
    first = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    groups, token = [], 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        groups.append(Group(token, count, length, own=True))
        token += count * length
    device = model.device
    ids = torch.cat(list(rows)).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    hidden = model.forward(ids, positions, PackedAttention(tuple(groups)))
    block = torch.tensor(starts)[:, None] + torch.arange(width) - model.info.shift
    return hidden[(first[:, None] + block.clamp(min=0)).to(device)]


def laws(model: DiffusionLM, hidden: Tensor) -> Tensor:
    """Probabilities `(B, W, V)`, the mask id excluded."""
    logits = model.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
    logits = logits if logits.dtype == torch.float64 else logits.float()
    banned = torch.arange(logits.shape[-1], device=logits.device) == model.info.mask_id
    return logits.masked_fill(banned, -torch.inf).softmax(-1)


# ------------------------------------------------------------------------------------ files


def fingerprint(model: DiffusionLM) -> str:
    """What tells models apart: a hash of the vocabulary, and of names, shapes and first values of
    the weights."""
    info = model.info
    digest = hashlib.blake2b(f"{info.vocab_size} {info.mask_id}".encode(), digest_size=16)
    stored = getattr(model, "weights", None)
    weights: dict[str, Tensor] = stored() if callable(stored) else {}
    for name in sorted(weights):
        values = weights[name].flatten()[:_FINGERPRINT_VALUES].float().cpu()
        digest.update(f"{name} {tuple(weights[name].shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def save_predictor(
    path: str | Path,
    model: DiffusionLM,
    weights: Weights,
    calibration: Calibration,
    config: DemaskConfig,
) -> None:
    """Write a predictor for `read_predictor`; projections in fp16."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        "query": weights.query[0].detach().half(),
        "key": weights.key[0].detach().half(),
        "bias": weights.bias[0].detach().float(),
        "levels": torch.tensor(LEVELS),
        "errors": torch.tensor(calibration.quantiles),
    }
    metadata: dict[str, Any] = {
        "format": "dlm-decode demask 1",
        "model": fingerprint(model),
        "family": model.info.family,
        "layers": model.info.layers,
        "hidden_size": model.info.hidden_size,
        **asdict(config),
        "mean_error": calibration.mean_error,
        "mean_target": calibration.mean_target,
        "correlation": calibration.correlation,
    }
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, file, metadata={name: str(value) for name, value in metadata.items()})
    read_predictor.cache_clear()


def is_for(path: str, model: DiffusionLM) -> bool:
    """Whether the predictor at `path` was trained on exactly this model."""
    return read_predictor(path).metadata.get("model") == fingerprint(model)
