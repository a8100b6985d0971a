"""Arguments that commands share: the method, the request, the model and the machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dlm_decode.errors import OptionError

if TYPE_CHECKING:
    from dlm_decode.api import Decoder, Parts
    from dlm_decode.models.loading import LoadedModel
    from dlm_decode.storage import Storage

EOS_POLICIES = ("none", "no_confidence", "banned", "ban_start")
DTYPES = ("float64", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8")


def add_method(parser: argparse.ArgumentParser) -> None:
    """Sampler, cache, schedule and their options."""
    group = parser.add_argument_group("method (see `dlm-decode list`)")
    group.add_argument(
        "--sampler", metavar="NAME", default="threshold", help="default: %(default)s"
    )
    group.add_argument("--cache", metavar="NAME", default="none", help="default: %(default)s")
    group.add_argument(
        "--schedule", metavar="NAME", help="default: the model's: absolute_aligned or fixed"
    )
    group.add_argument(
        "--kv-dtype", choices=KV_DTYPES, help="what the cache stores; default: the model's"
    )
    group.add_argument(
        "--kv-mib",
        metavar="N",
        type=positive_int,
        help="most MiB for K/V: rows wait for room; default: what the batch needs",
    )
    group.add_argument(
        "--share-prompts",
        choices=("exact", "frozen"),
        help="rows whose prompts begin alike share those K/V: exact for block-causal models alone; "
        "frozen: an approximation that others allow too",
    )
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="options of sampler, cache, schedule and token drawing",
    )
    group.add_argument(
        "--temperature", metavar="T", help="same as --set temperature=T; 0 is greedy"
    )
    group.add_argument(
        "--verify",
        choices=("lossless",),
        help="draft states of the sampler ahead and accept exact ones (self_speculative): the same "
        "text in fewer forwards",
    )
    group.add_argument(
        "--cfg-scale",
        metavar="S",
        type=not_negative,
        default=0.0,
        help="guidance; default: 0, off",
    )


def add_request(parser: argparse.ArgumentParser) -> None:
    """Lengths, seed and what ends a text."""
    group = parser.add_argument_group("request")
    group.add_argument(
        "--gen-length",
        metavar="N",
        type=positive_int,
        default=128,
        help="tokens to decode; default: 128",
    )
    group.add_argument(
        "--block-length",
        metavar="N",
        type=positive_int,
        help="default: the model's, or 32; the last is shorter",
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="default: 0")
    group.add_argument(
        "--eos-policy", choices=EOS_POLICIES, default="none", help="how end tokens may be chosen"
    )
    group.add_argument(
        "--no-stop-at-eos",
        dest="stop_at_eos",
        action="store_false",
        help="decode the whole length even after an end token",
    )
    group.add_argument(
        "--stop", metavar="TEXT", nargs="+", default=[], help="cut the text at these"
    )
    group.add_argument(
        "--no-chat", dest="chat", action="store_false", help="do not apply the chat template"
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The model, where it runs and how many rows at a time."""
    group = parser.add_argument_group("model and machine")
    group.add_argument(
        "--model", metavar="NAME_OR_PATH", help="folder or hub name; default: the bundled one"
    )
    group.add_argument(
        "--adapter", metavar="FOLDER", help="a LoRA adapter to merge into the model (extra: lora)"
    )
    group.add_argument(
        "--forcing",
        metavar="N",
        type=positive_int,
        help="it was trained on by diffusion forcing (D2F), in blocks of N",
    )
    group.add_argument(
        "--batch-size", metavar="B", type=positive_int, default=8, help="rows at a time; default: 8"
    )
    group.add_argument(
        "--dtype",
        choices=(*DTYPES, "auto"),
        help="default: the checkpoint's; auto: on a CPU bfloat16 if it has that, else float32",
    )
    group.add_argument(
        "--compile", action="store_true", help="fuse parts of the layers, which takes a minute"
    )
    add_prepack(group)
    group.add_argument(
        "--device",
        metavar="D",
        help="cpu, cuda, cuda:1 ...; several (cuda:0,cuda:1) share the layers; default: cpu",
    )
    group.add_argument("--threads", metavar="N", type=positive_int, help="CPU threads")


def add_parallel(parser: argparse.ArgumentParser) -> None:
    """One model shared by several processes."""
    parser.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="share every layer among the processes that torchrun started; the first one writes",
    )


def add_prepack(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--prepack",
        action="store_true",
        help="keep a copy of float32 weights in the order of the CPU's kernels, which are faster",
    )


def positive_int(text: str) -> int:
    """A whole number of at least 1; other text is refused by the parser."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def not_negative(text: str) -> float:
    """A finite number of at least 0; other text is refused by the parser."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def parse_parts(args: argparse.Namespace) -> Parts:
    """Sampler, cache, schedule and drawing, so that mistakes show before a model is loaded."""
    from dlm_decode.api import build_parts
    from dlm_decode.speculation import check_foreseen, verified

    sampler = args.sampler if args.verify is None else verified(args.sampler)
    parts = build_parts(sampler, args.cache, args.schedule or "fixed", _options(args))
    if args.verify is not None:
        check_foreseen(parts)
    return parts


def _options(args: argparse.Namespace) -> dict[str, str]:
    pairs = [*args.set, *([] if args.temperature is None else [f"temperature={args.temperature}"])]
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise OptionError(f"--set takes KEY=VALUE, got {pair!r}")
        if options.setdefault(key, value) != value:
            raise OptionError(f"option {key!r} is given twice: {options[key]!r} and {value!r}")
    return options


def load_model(args: argparse.Namespace) -> LoadedModel:
    """The model that `add_machine`'s arguments describe, and `add_parallel`'s where there are."""
    from dlm_decode.api import load

    return load(
        args.model,
        dtype=args.dtype,
        device=args.device,
        compile=args.compile,
        prepack=args.prepack,
        forcing=args.forcing,
        adapter=args.adapter,
        tensor_parallel=getattr(args, "tensor_parallel", False),
    )


def build_decoder(args: argparse.Namespace, parts: Parts, *, graphs: bool = False) -> Decoder:
    """The decoder that the arguments describe; loads the model."""
    import torch

    from dlm_decode.api import Decoder

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return Decoder(
        load_model(args),
        sampler=parts.sampler,
        cache=parts.cache,
        schedule=parts.schedule if args.schedule else None,
        draw=parts.draw,
        cfg_scale=args.cfg_scale,
        seed=args.seed,
        max_batch_size=args.batch_size,
        storage=_storage(args),
        graphs=graphs,
    )


def _storage(args: argparse.Namespace) -> Storage:
    from dlm_decode.storage import Storage

    return Storage(
        dtype=args.kv_dtype or "model",
        max_bytes=None if args.kv_mib is None else args.kv_mib * 2**20,
        share_prompts=args.share_prompts is not None,
        frozen_prompt=args.share_prompts == "frozen",
    )
