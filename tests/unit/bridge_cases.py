"""What the tests of the bridge share: table-valued models for enumeration, and tiny real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dlm_decode.bridge import Context, Draft

END, PAD = 42, 42


def tiny_llama(seed: int = 0, *, vocab: int = 48, attention: str = "sdpa") -> LlamaForCausalLM:
    """A random Llama whose argmax is far from constant."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=END if vocab > END else None,
        pad_token_id=PAD if vocab > PAD else None,
        bos_token_id=None,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(6)
    return model


def generate_alone(model: Any, prompt: Sequence[int], **settings: Any) -> list[int]:
    """New ids of transformers' own `generate` for one prompt."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, **{"do_sample": False, **settings})
    return [int(token) for token in output[0, len(prompt) :]]


@dataclass(frozen=True)
class Scripted:
    """Drafts what `script` says of a context: for oracles and adversaries."""

    script: Callable[[Context], Sequence[int]]
    vocab_size: int | None = None

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        return [Draft(tuple(self.script(c))[: c.room]) for c in contexts]


def oracle(answers: dict[tuple[int, ...], list[int]]) -> Scripted:
    """Drafts the whole rest of the right answer."""

    def script(context: Context) -> Sequence[int]:
        prompt = tuple(context.ids[: context.prompt_length])
        return answers[prompt][len(context.ids) - context.prompt_length :]

    return Scripted(script)


def spoiled(answers: dict[tuple[int, ...], list[int]], vocab: int = 48) -> Scripted:
    """The right answer but for its first token."""
    right = oracle(answers)

    def script(context: Context) -> Sequence[int]:
        rest = list(right.script(context))
        return [(rest[0] + 1) % vocab, *rest[1:]] if rest else []

    return Scripted(script)


Leaf = tuple[float, tuple[int, ...], tuple[int, ...], Tensor]
"""Probability, tokens, steps, the law `(g, V)` each token was drawn from."""


class Table:
    """A random verifier law p(. | prefix) and a random denoiser m(. | canvas), V = 3, g = 3."""

    vocab, length = 3, 3

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.p: dict[tuple[int, ...], Tensor] = {}
        for depth in range(self.length + 1):
            for prefix in product(range(self.vocab), repeat=depth):
                self.p[prefix] = self._law(1)[0]
        cells = (-1, *range(self.vocab))
        self.m = {c: self._law(self.length) for c in product(cells, repeat=self.length)}

    def _law(self, rows: int) -> Tensor:
        logits = 1.5 * torch.randn(rows, self.vocab, generator=self.generator, dtype=torch.float64)
        return logits.softmax(-1)

    def rows(self, tokens: Sequence[int]) -> Tensor:
        """p after each prefix of `tokens`, `(len + 1, V)`."""
        return torch.stack([self.p[tuple(tokens[:i])] for i in range(len(tokens) + 1)])

    def target(self) -> dict[tuple[int, ...], float]:
        """The law of the first g + 1 tokens."""
        return self.continued((), 1.0)

    def continued(self, prefix: tuple[int, ...], mass: float) -> dict[tuple[int, ...], float]:
        """`mass` spread over all whole sequences that begin with `prefix`, by p."""
        if len(prefix) == self.length + 1:
            return {prefix: mass}
        found: dict[tuple[int, ...], float] = {}
        for token in range(self.vocab):
            share = mass * float(self.p[prefix][token])
            found |= self.continued((*prefix, token), share)
        return found


Order = Callable[[Tensor, Sequence[int], int], Sequence[int]]
"""`(marginals (g, V), canvas, step) -> positions to commit`, from distributions alone."""


def drafts(table: Table, order: Order, temperature: float = 1.0) -> Iterator[Leaf]:
    """All drafts of a multi-step procedure that commits the positions `order` says."""

    def grow(
        mass: float, canvas: tuple[int, ...], steps: tuple[int, ...], laws: Tensor, step: int
    ) -> Iterator[Leaf]:
        if -1 not in canvas:
            yield mass, canvas, steps, laws
            return
        marginals = table.m[canvas]
        drawn_from = (marginals.log() / temperature).softmax(-1)
        places = list(order(marginals, canvas, step))
        for tokens in product(range(table.vocab), repeat=len(places)):
            filled, when, stated, share = list(canvas), list(steps), laws.clone(), mass
            for place, token in zip(places, tokens, strict=True):
                filled[place], when[place] = token, step
                stated[place] = marginals[place]
                share *= float(drawn_from[place, token])
            yield from grow(share, tuple(filled), tuple(when), stated, step + 1)

    blank = (-1,) * table.length
    zeros = torch.zeros(table.length, table.vocab, dtype=torch.float64)
    yield from grow(1.0, blank, (0,) * table.length, zeros, 0)


def sampled_order(table: Table) -> Iterator[Leaf]:
    """Each step draws every open position and commits the one whose DRAWN token is likeliest."""

    def grow(
        mass: float, canvas: tuple[int, ...], steps: tuple[int, ...], laws: Tensor, step: int
    ) -> Iterator[Leaf]:
        open_ = [i for i, token in enumerate(canvas) if token < 0]
        if not open_:
            yield mass, canvas, steps, laws
            return
        m = table.m[canvas]
        for tokens in product(range(table.vocab), repeat=len(open_)):
            chances = [float(m[i, t]) for i, t in zip(open_, tokens, strict=True)]
            best = max(range(len(open_)), key=lambda j: chances[j])
            filled, when, stated, share = list(canvas), list(steps), laws.clone(), mass
            filled[open_[best]], when[open_[best]] = tokens[best], step
            stated[open_[best]] = m[open_[best]]
            for chance in chances:
                share *= chance
            yield from grow(share, tuple(filled), tuple(when), stated, step + 1)

    zeros = torch.zeros(table.length, table.vocab, dtype=torch.float64)
    yield from grow(1.0, (-1,) * table.length, (0,) * table.length, zeros, 0)


def distance(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    """Total variation."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b}) / 2
