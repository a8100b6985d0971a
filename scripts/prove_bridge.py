"""Compare greedy decoding with drafts to transformers' own `generate`, token by token.

    python scripts/prove_bridge.py                       # the bundled pair, 200 prompts
    python scripts/prove_bridge.py --target FOLDER --gguf-file FILE --count 5 --max-new-tokens 16

Prints, for batches of 1 and of 8 ragged rows, without and with a repetition penalty, how many
prompts gave the very tokens of the verifier alone. The exit status is 1 unless all did.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from dlm_decode.bridge import Sampling, Speculator
from dlm_decode.bridge.loading import encode_chat, load_drafter, load_verifier
from dlm_decode.tasks import FAMILIES, held_out


def alone(model: Any, prompt: Sequence[int], length: int, penalty: float) -> list[int]:
    """New ids of the model's own greedy decoding."""
    ids = torch.tensor([list(prompt)], device=model.device)
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=length,
        repetition_penalty=penalty,
    )
    return [int(token) for token in found[0, len(prompt) :]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a causal LM's folder (default: the bundled one)")
    parser.add_argument("--gguf-file", help="a GGUF file in that folder")
    parser.add_argument("--drafter", help="a diffusion LM's folder (default: the bundled one)")
    parser.add_argument("--controller", default="failfast")
    parser.add_argument("--count", type=int, default=50, help="prompts of each bundled task")
    parser.add_argument("--max-new-tokens", type=int, default=72)
    parser.add_argument("--penalties", type=float, nargs="+", default=[1.0, 1.2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    verifier, tokenizer = load_verifier(args.target, gguf_file=args.gguf_file)
    drafter = load_drafter(args.drafter, verifier, tokenizer)
    items = [item for family in FAMILIES for item in held_out(family, args.count)]
    prompts = [encode_chat(tokenizer, item.prompt) for item in items]
    print("| repetition penalty | batch | prompts | identical | tokens / verifier forward |")
    print("| --- | --- | --- | --- | --- |")
    same = True
    for penalty in args.penalties:
        expected = [alone(verifier.model, p, args.max_new_tokens, penalty) for p in prompts]
        for batch in args.batches:
            speculator = Speculator(
                verifier,
                drafter,
                controller=args.controller,
                sampling=Sampling(repetition_penalty=penalty),
                max_batch_size=batch,
            )
            found = speculator.generate(prompts, max_new_tokens=args.max_new_tokens)
            equal = sum(list(r.ids) == ids for r, ids in zip(found, expected, strict=True))
            tokens = sum(len(r.ids) for r in found)
            forwards = sum(r.totals.verifier_forwards for r in found)
            print(
                f"| {penalty:g} | {batch} | {len(prompts)} | {equal} | {tokens / forwards:.2f} |",
                flush=True,
            )
            same = same and equal == len(prompts)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
