"""Decode with an autoregressive model, drafted for by a diffusion model; the output is its own.

--target is any causal LM that transformers can load, --drafter a masked diffusion LM, or one of
null, random and prompt_lookup. At temperature 0 the text is the target's greedy one; else it is a
function of seed and prompt alone (rule match). --table measures controllers, rules and temperatures
on held-out prompts of the bundled tasks and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from dlm_decode.arguments import DTYPES, not_negative, positive_int
from dlm_decode.errors import OptionError
from dlm_decode.jsonl import check_text

if TYPE_CHECKING:
    from dlm_decode.bridge import Drafter, Verifier
    from dlm_decode.bridge.controllers import Controller

CONTROLLERS = ("fixed", "failfast", "adl", "heuristic", "cost")
RULES = ("match", "rejection", "block")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_work(parser)
    _add_models(parser)
    _add_method(parser)


def _add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to decode")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", nargs="+", help="decode these prompts")
    source.add_argument(
        "--table",
        metavar="N",
        type=positive_int,
        help="measure on N held-out prompts of each bundled task",
    )
    group.add_argument(
        "--max-new-tokens", metavar="N", type=positive_int, default=72, help="default: 72"
    )
    group.add_argument("--json", action="store_true", help="print JSON rows with all figures")
    group.add_argument("--stream", action="store_true", help="print tokens as they are emitted")


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models and machine")
    group.add_argument("--target", metavar="NAME_OR_PATH", help="default: the bundled AR model")
    group.add_argument("--gguf-file", metavar="FILE", help="a GGUF file in the target's folder")
    group.add_argument(
        "--drafter", metavar="NAME_OR_PATH", help="default: the bundled diffusion model"
    )
    group.add_argument("--batch-size", metavar="B", type=positive_int, default=8, help="default: 8")
    group.add_argument("--dtype", choices=DTYPES, help="the target's; default: its checkpoint's")
    group.add_argument("--device", metavar="D", default="cpu", help="default: cpu")
    group.add_argument("--threads", metavar="N", type=positive_int, help="CPU threads")


def _add_method(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("method")
    group.add_argument("--rule", choices=RULES, default="match", help="default: %(default)s")
    group.add_argument(
        "--controller", choices=CONTROLLERS, default="failfast", help="default: %(default)s"
    )
    group.add_argument(
        "--set", metavar="KEY=VALUE", nargs="+", default=[], help="options of the controller"
    )
    group.add_argument(
        "--sampler", metavar="NAME", help="draft with this sampler; default: one pass a chunk"
    )
    group.add_argument("--passes", metavar="N", type=positive_int, default=1, help="default: 1")
    group.add_argument(
        "--tree", metavar="N", type=positive_int, help="draft a tree of N nodes instead of a chain"
    )
    group.add_argument("--temperature", metavar="T", type=not_negative, default=0.0)
    group.add_argument("--top-p", metavar="P", type=not_negative)
    group.add_argument("--top-k", metavar="K", type=positive_int)
    group.add_argument("--repetition-penalty", metavar="R", type=not_negative, default=1.0)
    group.add_argument("--seed", metavar="N", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    import torch

    from dlm_decode.bridge.loading import load_verifier

    controller = _controller(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    verifier, tokenizer = load_verifier(
        args.target, gguf_file=args.gguf_file, dtype=dtype, device=args.device
    )
    drafter = _drafter(args, verifier, tokenizer)
    if args.table is not None:
        _print_table(args, verifier, tokenizer, drafter)
    else:
        _decode(args, verifier, tokenizer, drafter, controller)
    return 0


def _controller(args: argparse.Namespace) -> Controller:
    from dlm_decode.bridge import CONTROLLERS as registry

    options: dict[str, str] = {}
    for pair in args.set:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise OptionError(f"--set takes KEY=VALUE, got {pair!r}")
        options[key] = value
    return registry.create(args.controller, options)


def _drafter(args: argparse.Namespace, verifier: Verifier, tokenizer: Any) -> Drafter:
    from dlm_decode.bridge.loading import load_drafter

    settings = {"sampler": args.sampler, "passes": args.passes, "tree_budget": args.tree}
    return load_drafter(args.drafter, verifier, tokenizer, settings=settings, device=args.device)


def _decode(
    args: argparse.Namespace,
    verifier: Verifier,
    tokenizer: Any,
    drafter: Drafter,
    controller: Controller,
) -> None:
    from dlm_decode.bridge import Sampling, Speculator
    from dlm_decode.bridge.loading import encode_chat

    sampling = Sampling(
        args.temperature, args.top_k, args.top_p, repetition_penalty=args.repetition_penalty
    )
    speculator = Speculator(
        verifier,
        drafter,
        rule=args.rule,
        controller=controller,
        sampling=sampling,
        seed=args.seed,
        max_batch_size=args.batch_size,
    )
    prompts = [encode_chat(tokenizer, check_text(text)) for text in args.prompt]
    results: dict[int, Any] = {}
    for piece in speculator.stream(prompts, max_new_tokens=args.max_new_tokens):
        if args.stream:
            shown = tokenizer.decode(list(piece.tokens))
            print(f"{piece.place + 1}\t{shown!r}", file=sys.stderr, flush=True)
        if piece.result is not None:
            results[piece.place] = piece.result
    for place in range(len(prompts)):
        _print_result(args, place, results[place], tokenizer)


def _print_result(args: argparse.Namespace, place: int, result: Any, tokenizer: Any) -> None:
    text = tokenizer.decode(list(result.ids), skip_special_tokens=True)
    if not args.json:
        print(text)
        return
    row = {"id": str(place + 1), "text": text, "ids": list(result.ids)}
    row |= {"finish_reason": result.finish_reason, "seconds": round(result.elapsed_s, 4)}
    print(json.dumps(row | result.totals.as_dict()))


def _print_table(
    args: argparse.Namespace, verifier: Verifier, tokenizer: Any, drafter: Drafter
) -> None:
    from dlm_decode.bridge.loading import encode_chat
    from dlm_decode.bridge.measure import HEADER, Comparison
    from dlm_decode.tasks import FAMILIES, held_out

    items = [item for family in FAMILIES for item in held_out(family, args.table)]
    prompts = [encode_chat(tokenizer, item.prompt) for item in items]
    compared = Comparison(
        verifier, drafter, prompts, args.max_new_tokens, args.batch_size, args.seed
    )
    print(HEADER)
    for figures in compared.table(CONTROLLERS, RULES, (0.0, 1.0)):
        print(figures.row(), flush=True)
