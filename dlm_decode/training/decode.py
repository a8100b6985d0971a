"""Plain greedy decoding of held-out items, to watch training and to report accuracy.

A reference small enough to read at a glance; the toolkit's engine is for everything else. Shapes: B
rows, L positions, G generation length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlm_decode.tasks import Item, held_out, verify
from dlm_decode.training.data import Corpus
from dlm_decode.training.models import TinyTransformer


@dataclass(frozen=True, slots=True)
class Canvas:
    """Prompts on the left, right-padded rows. `ids` `[B, L]`, `starts` `[B]`: where each row's
    generation begins.
    """

    ids: Tensor
    starts: Tensor

    def window(self, first: int, count: int) -> Tensor:
        """Positions `[B, count]` of the `first`-th and following generated tokens."""
        return self.starts[:, None] + torch.arange(first, first + count)


def make_canvas(prompts: Sequence[list[int]], *, length: int, fill: int) -> Canvas:
    """A canvas with `length` tokens `fill` after every prompt, then `fill` to the widest row."""
    width = max(map(len, prompts)) + length
    ids = torch.full((len(prompts), width), fill)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    return Canvas(ids, torch.tensor([len(prompt) for prompt in prompts]))


@torch.no_grad()
def decode_diffusion(
    model: TinyTransformer,
    prompts: Sequence[list[int]],
    *,
    mask_id: int,
    eos_id: int,
    per_step: int,
    length: int = 64,
    block_length: int = 16,
) -> Tensor:
    """Generated ids `[B, G]`: block by block, each forward commits the `per_step` most confident
    masked tokens.

    Blocks after one in which every row has an eos are left to eos.
    """
    canvas = make_canvas(prompts, length=length, fill=mask_id)
    ids = canvas.ids.clone()
    keys = torch.arange(ids.shape[1])[None] < canvas.starts[:, None] + length
    mask = None if keys.all() else keys[:, None, None, :]
    for first in range(0, length, block_length):
        window = canvas.window(first, block_length)
        for _ in range(-(-block_length // per_step)):
            states = model.hidden_states(ids, mask=mask)
            states = states.gather(1, window[..., None].expand(-1, -1, states.shape[-1]))
            confidence, tokens = (states @ model.head.T).float().softmax(-1).max(-1)
            current = ids.gather(1, window)
            confidence = confidence.masked_fill(current != mask_id, -1.0)
            chosen = confidence.topk(min(per_step, block_length), dim=-1)
            commit = torch.zeros_like(current, dtype=torch.bool).scatter(
                1, chosen.indices, chosen.values >= 0
            )
            ids.scatter_(1, window, torch.where(commit, tokens, current))
        if bool((ids.gather(1, window) == eos_id).any(-1).all()):
            break
    out = ids.gather(1, canvas.window(0, length))
    return torch.where(out == mask_id, eos_id, out)


@torch.no_grad()
def decode_causal(
    model: TinyTransformer, prompts: Sequence[list[int]], *, eos_id: int, length: int = 64
) -> Tensor:
    """Generated ids `[B, G]` of greedy left-to-right decoding; eos after the first eos."""
    canvas = make_canvas(prompts, length=length, fill=eos_id)
    ids = canvas.ids.clone()
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for step in range(length):
        last = canvas.window(step, 1) - 1
        states = model.hidden_states(ids[:, : int(last.max()) + 1], causal=True)
        states = states.gather(1, last[..., None].expand(-1, -1, states.shape[-1]))
        tokens = (states @ model.head.T).argmax(-1)[:, 0].masked_fill(done, eos_id)
        ids.scatter_(1, last + 1, tokens[:, None])
        done |= tokens == eos_id
        if bool(done.all()):
            break
    return ids.gather(1, canvas.window(0, length))


def accuracy(
    model: TinyTransformer,
    corpus: Corpus,
    items: Sequence[Item],
    *,
    per_step: int | None,
    rows: int = 64,
) -> list[bool]:
    """Whether each item is answered correctly; `per_step` None decodes left to right."""
    correct: list[bool] = []
    for start in range(0, len(items), rows):
        batch = items[start : start + rows]
        prompts = [corpus.encode(item).prompt for item in batch]
        if per_step is None:
            out = decode_causal(model, prompts, eos_id=corpus.eos_id)
        else:
            out = decode_diffusion(
                model, prompts, mask_id=corpus.mask_id, eos_id=corpus.eos_id, per_step=per_step
            )
        correct += [
            verify(i, text_of(corpus, row)) for i, row in zip(batch, out.tolist(), strict=True)
        ]
    return correct


def text_of(corpus: Corpus, ids: Sequence[int]) -> str:
    """The text before the first eos."""
    ids = list(ids)
    end = ids.index(corpus.eos_id) if corpus.eos_id in ids else len(ids)
    return corpus.tokenizer.backend_tokenizer.decode(ids[:end], skip_special_tokens=False)


def evaluate(
    model: TinyTransformer,
    corpus: Corpus,
    *,
    per_steps: Sequence[int | None],
    n: int,
    seed: int,
    split: str = "validation",
) -> dict[str, dict[str, float]]:
    """Accuracy by family and decoding: `"ar"` for left to right, else `"k=..."`; lists and grids
    also by kind.
    """
    results: dict[str, dict[str, float]] = {}
    for family in corpus.weights:
        items = held_out(family, n, seed, split=split)  # type: ignore[arg-type]
        for per_step in per_steps:
            correct = accuracy(model, corpus, items, per_step=per_step)
            column = "ar" if per_step is None else f"k={per_step}"
            for name in (
                family,
                *sorted({f"{family}/{kind}" for kind in map(_kind, items) if kind}),
            ):
                kept = [
                    ok
                    for ok, i in zip(correct, items, strict=True)
                    if name in (family, f"{family}/{_kind(i)}")
                ]
                results.setdefault(name, {})[column] = sum(kept) / len(kept)
    return results


def _kind(item: Item) -> str:
    return str(item.meta.get("operation") or item.meta.get("kind") or "")
