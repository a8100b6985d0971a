"""Operations on a list of three to six words, after ParallelBench (arXiv 2510.04767).

Copy, reverse, sort and replace have one answer, each word known from the prompt alone. Shuffle and
replace-random have many: the words of one answer depend on each other, so drawing several in one
step fails by construction (closed forms: an ideal model that draws all n words of a shuffle at once
is right with probability n!/n^n).
"""

from __future__ import annotations

import random

from dlm_decode.tasks.items import Family, Item, new_item

NAME = "lists"
WORDS = (
    "ant", "bee", "cat", "dog", "elk", "fox", "goat", "hen", "ibis", "jay", "kiwi", "lion",
    "mole", "newt", "owl", "pig", "quail", "rat", "seal", "toad", "urial", "vole", "wolf", "yak",
)  # fmt: skip
MIN_WORDS, MAX_WORDS = 3, 6
OPERATIONS = {"copy": 2, "reverse": 2, "sort": 2, "replace": 2, "shuffle": 4, "replace-random": 2}
"""Operation to weight; shuffle and replace-random together are a bit under half of the family."""


def render(words: list[str]) -> str:
    """`[ ant bee cat ]`: a space before every word, so that it is one token wherever it stands."""
    return " ".join(["[", *words, "]"])


def parse(text: str) -> list[str] | None:
    """The words of a rendered list, or None when `text` is anything else."""
    parts = text.strip().split(" ")
    if len(parts) < 2 or parts[0] != "[" or parts[-1] != "]":
        return None
    return parts[1:-1]


def make(rng: random.Random) -> Item:
    """An operation and a list of distinct words; an ambiguous answer is drawn uniformly from the
    valid ones.
    """
    operation = rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
    *words, new = rng.sample(WORDS, rng.randint(MIN_WORDS, MAX_WORDS) + 1)
    place = rng.randrange(len(words))
    replaced = [*words[:place], new, *words[place + 1 :]]
    shown = render(words)
    if operation == "copy":
        prompt, answer = f"Copy the list {shown}", words
    elif operation == "reverse":
        prompt, answer = f"Reverse the list {shown}", words[::-1]
    elif operation == "sort":
        prompt, answer = f"Sort the list {shown}", sorted(words)
    elif operation == "replace":
        prompt, answer = f"Replace {words[place]} with {new} in the list {shown}", replaced
    elif operation == "replace-random":
        prompt, answer = f"Replace one random word with {new} in the list {shown}", replaced
    else:
        prompt, answer = f"Shuffle the list {shown}", _shuffled(rng, words)
    meta = {"operation": operation, "words": tuple(words), "new": new, "answer": tuple(answer)}
    return new_item(NAME, prompt, render(answer), meta)


def _shuffled(rng: random.Random, words: list[str]) -> list[str]:
    while True:
        order = rng.sample(words, len(words))
        if order != words:
            return order


def verify(item: Item, text: str) -> bool:
    """Whether `text` is a valid answer: any other order for shuffle, any one place for replace-
    random.
    """
    got, words = parse(text), list(item.meta["words"])
    if got is None:
        return False
    if item.meta["operation"] == "shuffle":
        return sorted(got) == sorted(words) and got != words
    if item.meta["operation"] == "replace-random":
        changed = [new for new, old in zip(got, words, strict=False) if new != old]
        return len(got) == len(words) and changed == [item.meta["new"]]
    return got == list(item.meta["answer"])


FAMILY = Family(NAME, make, verify)
