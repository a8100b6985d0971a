"""Decode a few prompts, one of each kind of task, with the bundled model; called by `run.sh`."""

from __future__ import annotations

import textwrap

from dlm_decode import api
from dlm_decode.tasks import FAMILIES, Item, held_out
from dlm_decode.types import Generation

GEN_LENGTH = 64
BLOCK_LENGTH = 16


def main() -> None:
    items = {item.id: item for name in FAMILIES for item in held_out(name, 1)}
    decoder = api.Decoder(api.load(), sampler="threshold", cache="dual")
    requests = [
        decoder.request(item.prompt, id=item.id, gen_length=GEN_LENGTH, block_length=BLOCK_LENGTH)
        for item in items.values()
    ]
    for generation in decoder.generate(requests):
        show(items[generation.id], generation)


def show(item: Item, generation: Generation) -> None:
    per_forward = generation.tokens / max(generation.forwards, 1)
    print(f"[{item.family}] {item.prompt}\n")
    print(textwrap.indent(generation.text or "", "    "))
    print(
        f"\n  {generation.tokens} tokens, {generation.forwards} forwards,"
        f" {per_forward:.2f} tokens per forward\n"
    )


if __name__ == "__main__":
    main()
