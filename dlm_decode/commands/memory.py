"""Foretell how much memory a decoding takes: weights, K/V pages, logits tile, peak.

Nothing is allocated and no weights are read: one turn, a refresh of all rows at their full length,
runs on tensors without storage, and their bytes are counted operator by operator.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from dlm_decode.arguments import DTYPES, KV_DTYPES, add_prepack, positive_int

if TYPE_CHECKING:
    from dlm_decode.footprint import Footprint

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME_OR_PATH", help="folder or hub name; default: the bundled one"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: what it is loaded in")
    for name, default, what in (
        ("--batch", 1, "rows at a time"),
        ("--length", 512, "positions of a row, prompt and generation together"),
        ("--window", 32, "positions of a row that are scored in a turn"),
    ):
        parser.add_argument(
            name,
            metavar="N",
            type=positive_int,
            default=default,
            help=f"{what}; default: {default}",
        )
    parser.add_argument(
        "--cache", metavar="NAME", default="dual", help="whether it stores K/V; default: dual"
    )
    add_prepack(parser)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="of the K/V; default: the model's")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes")


def run(args: argparse.Namespace) -> int:
    import torch

    from dlm_decode.caches import CACHES
    from dlm_decode.footprint import forecast
    from dlm_decode.models.loading import bundled_model_path, planned

    own = torch.float32 if args.model is None else None  # as `api.load` takes the bundled model
    dtype = getattr(torch, args.dtype) if args.dtype else own
    build = planned(args.model or bundled_model_path(), dtype)
    found = forecast(
        lambda: build("cpu"),
        batch=args.batch,
        length=args.length,
        window=args.window,
        stores=CACHES.get(args.cache).stores,
        kv_dtype=getattr(torch, args.kv_dtype) if args.kv_dtype else None,
        prepack=args.prepack,
    )
    print(json.dumps(found.as_dict()) if args.json else _text(found, args))
    return 0


def _text(found: Footprint, args: argparse.Namespace) -> str:
    what = f"{args.batch} x {args.length} positions, {args.window} scored, cache {args.cache}"
    lines = [
        ("weights", found.weight_bytes),
        ("K/V pages", found.page_bytes),
        ("logits tile and statistics", found.logits_bytes),
        ("activations of a refresh", found.activation_bytes),
        ("peak", found.peak_bytes),
    ]
    return "\n".join([what, *(f"{name:<28}{size / MIB:>12.2f} MiB" for name, size in lines)])
