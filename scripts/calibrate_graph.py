"""Learn a draft graph for self_speculative from a few decoded prompts, and save it as JSON.

    python scripts/calibrate_graph.py --out graph.json                  # the bundled model's tasks
    python scripts/calibrate_graph.py --model FOLDER --input prompts.jsonl --out graph.json

Use it with `--sampler self_speculative+NAME --set drafter=graph graph=graph.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from dlm_decode.arguments import add_machine, add_method, build_decoder, parse_parts, positive_int
from dlm_decode.drafts import write_graph
from dlm_decode.jsonl import Source, read_rows
from dlm_decode.speculation import calibrate, name_of
from dlm_decode.tasks import FAMILIES, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", required=True, help="where the graph is written")
    parser.add_argument("--input", help="JSONL of prompts; default: validation items of the tasks")
    parser.add_argument("--count", type=positive_int, default=8, help="items of each task")
    parser.add_argument("--nodes", type=positive_int, default=10, help="nodes D of the graph")
    parser.add_argument("--gen-length", type=positive_int, default=64)
    parser.add_argument("--block-length", type=positive_int, default=32)
    add_method(parser)
    add_machine(parser)
    parser.set_defaults(sampler="llada")
    args = parser.parse_args()
    decoder = build_decoder(argparse.Namespace(seed=0, **vars(args)), parse_parts(args))
    lengths = {"gen_length": args.gen_length, "block_length": args.block_length}
    requests = [decoder.request(source, **lengths) for source in _sources(args)]
    graph = calibrate(decoder, requests, size=args.nodes)
    about = {"sampler": name_of(decoder.parts.sampler), "prompts": len(requests), **lengths}
    write_graph(args.out, graph, about)


def _sources(args: argparse.Namespace) -> Iterator[Source]:
    if args.input:
        with open(args.input, "rb") as lines:
            yield from (row.source for row in read_rows(lines)[0])
        return
    for family in FAMILIES:
        yield from (item.prompt for item in held_out(family, args.count, split="validation"))


if __name__ == "__main__":
    main()
