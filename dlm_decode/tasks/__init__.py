"""Small task families with exact verifiers: what the bundled tiny models are trained and judged on.

`FAMILIES` maps a name to its `Family`. `held_out` gives items no training stream ever yields.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from dlm_decode.tasks import grids, lists, mini_gsm8k, mini_mbpp
from dlm_decode.tasks.items import Family, Item, Split, draw, draw_distinct, split_of

__all__ = [
    "FAMILIES",
    "Family",
    "Item",
    "Split",
    "get_family",
    "held_out",
    "split_of",
    "train_stream",
    "verify",
]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (mini_gsm8k.FAMILY, mini_mbpp.FAMILY, lists.FAMILY, grids.FAMILY)
}


def get_family(name: str) -> Family:
    """The family registered as `name`."""
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {sorted(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def held_out(family: str, n: int, seed: int = 0, *, split: Split = "test") -> list[Item]:
    """`n` items with distinct prompts that are in no training stream, the same for the same
    `(family, n, seed)`.

    `split="validation"` gives the items used to watch training; keep `"test"` for figures that are
    reported.
    """
    if split == "train":
        raise ValueError("split must be 'validation' or 'test' for held-out items, got 'train'")
    return draw_distinct(get_family(family), n, seed=seed, split=split)


def train_stream(weights: Mapping[str, float], *, seed: int | str = 0) -> Iterator[Item]:
    """Training items without end, each from a family drawn with probability proportional to its
    weight.
    """
    if not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise ValueError(f"weights must be non-negative with a positive sum, got {dict(weights)}")
    rng = random.Random(f"train/{seed}")
    names = list(weights)
    streams = {name: draw(get_family(name), rng, "train") for name in names}
    while True:
        yield next(streams[rng.choices(names, [weights[name] for name in names])[0]])


def verify(item: Item, text: str) -> bool:
    """Whether `text` answers `item` correctly, by the verifier of the item's family."""
    return get_family(item.family).verify(item, text)
