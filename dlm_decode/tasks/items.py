"""What a task is: one `Item`, and a `Family` that makes items and verifies answers.

Training and held-out items are separated by the hash of the prompt, so the same prompt can never be
in two splits, whatever the seeds. A family is a pair of pure functions of `(rng)` and `(item,
text)`; nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "validation", "test"]

N_BUCKETS = 16
"""Prompts are hashed into this many buckets: 0 is validation, 1 is test, the rest is training."""


@dataclass(frozen=True, slots=True)
class Item:
    """One problem with one correct answer.

    `id` is derived from family and prompt. `answer` is a correct answer, not always the only one
    (see `verify`). `meta` holds what the verifier needs, as plain data.
    """

    id: str
    family: str
    prompt: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """A task family: `make(rng)` draws an item of any split, `verify(item, text)` judges an answer
    exactly.
    """

    name: str
    make: Callable[[random.Random], Item]
    verify: Callable[[Item, str], bool]


def new_item(family: str, prompt: str, answer: str, meta: Mapping[str, Any]) -> Item:
    """An `Item` whose id is the family and the first 12 hex digits of the prompt's hash."""
    return Item(f"{family}-{_digest(prompt)[:12]}", family, prompt, answer, meta)


def split_of(prompt: str) -> Split:
    """The split a prompt belongs to: a function of its text alone."""
    bucket = int(_digest(prompt)[-8:], 16) % N_BUCKETS
    return "validation" if bucket == 0 else "test" if bucket == 1 else "train"


def draw(family: Family, rng: random.Random, split: Split) -> Iterator[Item]:
    """Items of one split, without end; prompts may repeat."""
    while True:
        item = family.make(rng)
        if split_of(item.prompt) == split:
            yield item


def draw_distinct(
    family: Family, n: int, *, seed: int, split: Split, max_tries: int = 2000
) -> list[Item]:
    """`n` items of `split` with distinct prompts, a function of `(family, n, seed, split)`.

    Raises `ValueError` when `max_tries` items in a row bring no new prompt: the family has too few
    prompts.
    """
    found: dict[str, Item] = {}
    stale = 0
    for item in draw(family, random.Random(f"{family.name}/{split}/{seed}"), split):
        if len(found) >= n:
            break
        stale = stale + 1 if item.prompt in found else 0
        found.setdefault(item.prompt, item)
        if stale >= max_tries:
            raise ValueError(
                f"n must be at most the number of distinct {split} prompts of {family.name!r} "
                f"(about {len(found)}), got {n}"
            )
    return list(found.values())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
