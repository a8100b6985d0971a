"""Compare samplers on the bundled tasks: accuracy against tokens per forward, in one table.

A method is NAME, NAME:OPTION=V1,V2 or NAME:OPTION=V;OTHER=V1,V2, where NAME may be a chain such as
credit+threshold. Without values the option that trades accuracy for speed takes its usual ones.
AUP is accuracy under parallelism, averaged over the tasks; positions per token counts all that was
computed, whatever a forward holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dlm_decode.arguments import add_machine, load_model, positive_int

DEFAULT_SAMPLERS = ("threshold", "factor", "entropy_bound", "klass", "credit+threshold")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to compare")
    group.add_argument(
        "--samplers", metavar="METHOD", nargs="+", default=list(DEFAULT_SAMPLERS), help="see above"
    )
    group.add_argument(
        "--tasks", metavar="TASK", nargs="+", help="families of bundled tasks; default: all"
    )
    group.add_argument(
        "--items", metavar="N", type=positive_int, default=25, help="of each task; default: 25"
    )
    group.add_argument("--cache", metavar="NAME", default="none", help="default: %(default)s")
    group.add_argument("--schedule", metavar="NAME", help="default: the model's")
    group.add_argument("--gen-length", metavar="N", type=positive_int, default=64)
    group.add_argument("--block-length", metavar="N", type=positive_int)
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of items; default: 0")
    group.add_argument("--json", metavar="FILE", type=Path, help="write every figure here")
    group.add_argument("--plot", metavar="FILE", type=Path, help="draw the curves (matplotlib)")
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from dlm_decode import comparison
    from dlm_decode.tasks import FAMILIES

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    methods = [comparison.parse_method(text) for text in args.samplers]
    found = []
    for point in comparison.run(
        load_model(args),
        methods,
        args.tasks or list(FAMILIES),
        items=args.items,
        gen_length=args.gen_length,
        block_length=args.block_length,
        cache=args.cache,
        schedule=args.schedule,
        batch_size=args.batch_size,
        seed=args.seed,
    ):
        found.append(point)
        line = f"{point.method} {point.setting} {point.task}: {point.correct}/{point.items}"
        print(f"{line}, {point.tokens_per_forward:.2f} tokens/forward", file=sys.stderr)
    print(comparison.table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(comparison.as_json(found), indent=2), encoding="utf-8")
    if args.plot is not None:
        comparison.save_plot(found, args.plot)
    return 0
