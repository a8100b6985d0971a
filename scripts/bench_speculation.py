"""What lossless self-speculation saves and costs on the bundled tasks, as a Markdown table.

    python scripts/bench_speculation.py                    # all tasks, K = 2, 4, 8, both drafters
    python scripts/bench_speculation.py --count 2 --states 8  # fewer items, one K

Every row compares the same requests decoded with and without speculation: the share of identical
outputs, and what was spent relative to the plain run, seconds by `clock_of`. `pays below` is the
cost of one more row in a forward, relative to a forward of one, under which fewer forwards are less
time: with f the ratio of forwards and r the rows of a forward, f (1 + c (r - 1)) < 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from dlm_decode.api import Decoder, load
from dlm_decode.samplers import SAMPLERS
from dlm_decode.speculation import LosslessReport, Timed, compared, timed, with_sampler
from dlm_decode.tasks import FAMILIES, held_out
from dlm_decode.types import Request

BASES = {"stepwise": ("llada", {}), "threshold(0.9)": ("threshold", {"threshold": 0.9})}


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    task: str
    base: str
    drafter: str
    K: int
    identical: str
    forwards: float
    positions: float
    seconds: float
    pays_below: float


def line(task: str, base: str, drafter: str, states: int, report: LosslessReport) -> Line:
    content = report.as_dict()
    f, positions = content["forwards_ratio"], content["positions_ratio"]
    rows = positions / f
    pays = (1 / f - 1) / (rows - 1) if rows > 1 else float("inf")
    identical = f"{report.identical}/{report.rows}"
    return Line(
        task, base, drafter, states, identical, f, positions, content["seconds_ratio"], pays
    )


def lines(args: argparse.Namespace) -> Iterator[Line]:
    model = load(args.model)
    for base, (name, options) in BASES.items():
        plain = Decoder(
            model, name, args.cache, options=options, max_batch_size=args.batch_size, seed=0
        )
        asked = {task: requests_of(plain, task, args) for task in args.tasks}
        done = {task: timed(plain, requests) for task, requests in asked.items()}
        for drafter in args.drafters:
            for states in args.states:
                yield from _compared(plain, base, drafter, states, asked, done, args.by_task)


def _compared(
    plain: Decoder,
    base: str,
    drafter: str,
    states: int,
    asked: dict[str, list[Request]],
    done: dict[str, Timed],
    by_task: bool,
) -> Iterator[Line]:
    wrapper = SAMPLERS.get("self_speculative")
    sampler = wrapper(plain.parts.sampler, max_states=states, drafter=drafter)  # type: ignore[call-arg]
    decoder = with_sampler(plain, sampler)
    runs = {task: timed(decoder, requests) for task, requests in asked.items()}
    for task, requests in asked.items() if by_task else ():
        yield line(task, base, drafter, states, compared(plain, requests, done[task], runs[task]))
    everything = [request for requests in asked.values() for request in requests]
    pooled = compared(plain, everything, _pooled(done), _pooled(runs))
    yield line("all", base, drafter, states, pooled)


def _pooled(runs: dict[str, Timed]) -> Timed:
    return [r for results, _ in runs.values() for r in results], sum(s for _, s in runs.values())


def requests_of(decoder: Decoder, task: str, args: argparse.Namespace) -> list[Request]:
    lengths = {"gen_length": args.gen_length, "block_length": args.block_length}
    items = held_out(task, args.count)
    return [decoder.request(item.prompt, id=item.id, **lengths) for item in items]


def cells(values: Iterator[object]) -> str:
    shown = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in values)
    return "| " + " | ".join(shown) + " |"


def parser() -> argparse.ArgumentParser:
    """The options, which `scripts/bench.py speculation` gives too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="default: the bundled one")
    parser.add_argument("--cache", default="dual")
    parser.add_argument("--tasks", nargs="+", choices=sorted(FAMILIES), default=sorted(FAMILIES))
    parser.add_argument("--count", type=int, default=8, help="held-out items of each task")
    parser.add_argument("--states", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--drafters", nargs="+", default=["chain", "graph"])
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--by-task", action="store_true", help="a row for each task too")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    return parser


def main() -> None:
    args = parser().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    names = [name.replace("_", " ") for name in Line.__dataclass_fields__]
    print(cells(iter(names)) + "\n|" + " --- |" * len(names), flush=True)
    for row in lines(args):
        print(cells(iter(asdict(row).values())), flush=True)


if __name__ == "__main__":
    main()
