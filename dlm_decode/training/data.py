"""Batches as pure functions of `(configuration, step)`, so that a resumed run sees the same data.

Shapes: B rows, L positions. A document is `<|user|> prompt <|assistant|> answer <|eos|>`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dlm_decode.tasks import Item, train_stream
from dlm_decode.training.tokenizer import ASSISTANT, EOS, MASK, USER


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids of one item; `prompt` includes both turn markers, `answer` the final eos."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class CausalBatch:
    """Packed documents. All `[B, L]` but `mask` `[B, 1, L, L]`; `weights` belong to the token at
    their position.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class DiffusionBatch:
    """`ids` are the clean tokens, `noised` the input, `weights` the loss weight of each masked
    token; all `[B, L]`.
    """

    ids: Tensor
    noised: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class NoiseConfig:
    """How diffusion rows are noised.

    `blockwise`: share of rows with the decoding pattern (clean prefix, one noised block of one of
    `block_lengths`, masked suffix). `suffix_weight`: loss weight of that suffix. `padding_weight`:
    loss weight of every eos after the first. `prompt_share`: share of fully random rows whose
    prompt is noised too, with loss weight `prompt_weight`.
    """

    block_lengths: tuple[int, ...] = (16,)
    blockwise: float = 0.5
    suffix_weight: float = 0.02
    padding_weight: float = 0.05
    prompt_share: float = 0.1
    prompt_weight: float = 0.2


@dataclass(frozen=True, slots=True)
class Phase:
    """Mixture and noise of the diffusion stage from step `start` on."""

    start: int
    weights: Mapping[str, float]
    noise: NoiseConfig


class Corpus:
    """Tokenised training documents of a weighted mixture of families."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        weights: Mapping[str, float],
        *,
        seed: int,
    ) -> None:
        self.tokenizer, self.weights, self.seed = tokenizer, dict(weights), seed
        self.eos_id = _id_of(tokenizer, EOS)
        self.mask_id, self._user, self._assistant = (
            _id_of(tokenizer, special) for special in (MASK, USER, ASSISTANT)
        )

    def documents(self, step: int) -> Iterator[Document]:
        """The documents of one training step, without end."""
        return map(self.encode, train_stream(self.weights, seed=f"{self.seed}/{step}"))

    def encode(self, item: Item) -> Document:
        """Token ids of an item, with markers and eos."""
        backend = self.tokenizer.backend_tokenizer
        prompt, answer = (
            backend.encode(t, add_special_tokens=False).ids for t in (item.prompt, item.answer)
        )
        return Document([self._user, *prompt, self._assistant], [*answer, self.eos_id])


def _id_of(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(found, int):
        raise ValueError(f"tokenizer must know {token!r}, got {found!r}")
    return found


def causal_batch(
    corpus: Corpus, step: int, *, rows: int, length: int, prompt_weight: float
) -> CausalBatch:
    """`rows` rows of whole documents packed to `length`, each document its own attention island and
    positions.
    """
    documents = corpus.documents(step)
    ids = torch.full((rows, length), corpus.eos_id)
    positions, weights = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length)
    island = torch.arange(length).repeat(rows, 1) + length
    pending = next(documents)
    for row in range(rows):
        start = number = 0
        while start + (n := len(pending.prompt) + len(pending.answer)) <= length:
            span = slice(start, start + n)
            ids[row, span] = torch.tensor(pending.prompt + pending.answer)
            positions[row, span] = torch.arange(n)
            weights[row, span] = torch.tensor(
                [prompt_weight] * len(pending.prompt) + [1.0] * len(pending.answer)
            )
            weights[row, start] = 0.0
            island[row, span] = number
            start, number, pending = start + n, number + 1, next(documents)
        if start == 0:
            raise ValueError(f"length must hold the longest document, {n} tokens, got {length}")
    same = island[:, None, :, None] == island[:, None, None, :]
    return CausalBatch(
        ids, positions, same & torch.ones(length, length, dtype=torch.bool).tril(), weights
    )


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The last of `phases` (in order of `start`, the first at 0) that has started by `step`."""
    return [phase for phase in phases if phase.start <= step][-1]


def diffusion_batch(
    corpus: Corpus, step: int, *, tokens: int, lengths: Mapping[int, float], noise: NoiseConfig
) -> DiffusionBatch:
    """About `tokens` tokens: rows of one length drawn from `lengths`, each twice with complementary
    masks.

    Answers are filled up with eos to the row's end, so that generation lengths vary with the prompt
    and no padding mask is needed. The number of masked tokens is exact and stratified over the
    batch.
    """
    rng = random.Random(f"noise/{corpus.seed}/{step}")
    length = rng.choices(list(lengths), list(lengths.values()))[0]
    rows = max(1, tokens // (2 * length))
    fitting = (d for d in corpus.documents(step) if len(d.prompt) + len(d.answer) <= length)
    documents = [next(fitting) for _ in range(rows)]
    levels = [(i + rng.random()) / rows for i in range(rows)]
    rng.shuffle(levels)
    ids = torch.full((2 * rows, length), corpus.eos_id)
    noised, weights = ids.clone(), torch.zeros(2 * rows, length)
    for row, (document, level) in enumerate(zip(documents, levels, strict=True)):
        clean = document.prompt + document.answer
        clean += [corpus.eos_id] * (length - len(clean))
        target = _token_weights(document, length, noise)
        for copy, (masked, scored) in enumerate(
            _complementary_masks(document, length, level, noise, rng)
        ):
            at = row + copy * rows
            ids[at] = torch.tensor(clean)
            noised[at] = torch.tensor(
                [corpus.mask_id if m else t for m, t in zip(masked, clean, strict=True)]
            )
            weights[at] = _row_weights(masked, scored, target)
    return DiffusionBatch(ids, noised, weights)


def _token_weights(document: Document, length: int, noise: NoiseConfig) -> list[float]:
    """Per position: prompt weight, 1 for the answer and its eos, padding weight after it."""
    prompt, answer = len(document.prompt), len(document.answer)
    rest = length - prompt - answer
    return [noise.prompt_weight] * prompt + [1.0] * answer + [noise.padding_weight] * rest


def _complementary_masks(
    document: Document, length: int, level: float, noise: NoiseConfig, rng: random.Random
) -> list[tuple[list[bool], list[float]]]:
    """Two `(masked, score multiplier)` pairs over a row; each maskable position is masked in one of
    the two.
    """
    prompt = len(document.prompt)
    if rng.random() < noise.blockwise:
        several = len(noise.block_lengths) > 1
        block_length = rng.choice(noise.block_lengths) if several else noise.block_lengths[0]
        blocks = -(-len(document.answer) // block_length)
        # Mostly blocks that hold answer tokens; now and then the all-eos block after them.
        start = prompt + block_length * rng.randrange(blocks + (rng.random() < 0.15))
        start = min(start, length - 1)
        maskable = list(range(start, min(start + block_length, length)))
        suffix = range(maskable[-1] + 1, length)
    else:
        maskable = list(range(1 if rng.random() < noise.prompt_share else prompt, length))
        suffix = range(0)
    rng.shuffle(maskable)
    count = min(len(maskable), 1 + int(level * len(maskable)))
    masks = []
    for chosen in (maskable[:count], maskable[count:]):
        masked, scored = [False] * length, [1.0] * length
        for position in chosen:
            masked[position] = True
        for position in suffix:
            masked[position], scored[position] = True, noise.suffix_weight
        masks.append((masked, scored))
    return masks


def _row_weights(masked: list[bool], scored: list[float], target: list[float]) -> Tensor:
    """Loss weights `[L]` of one row: a weighted mean over its masked tokens, which is the 1/t
    weight of the ELBO.
    """
    weights = torch.tensor([m * s * t for m, s, t in zip(masked, scored, target, strict=True)])
    return weights / weights.sum().clamp_min(1e-6)
