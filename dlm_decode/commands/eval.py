"""Evaluate a decoder on tasks: accuracy with intervals, tokens per forward, speed.

TASK is a protocol (--list names them all) or "bundled", the bundled model's four own task families.
Lengths, end-of-text policy, examples and scoring come from the protocol; an option given here
overrides it and is recorded. A problem that does not fit into the model counts as wrong. Every
request's row is written as it is completed: the same command goes on where a stopped run was.
--sweep evaluates several decoders in one go.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_decode.arguments import EOS_POLICIES, add_machine, add_method, positive_int
from dlm_decode.errors import OptionError

if TYPE_CHECKING:
    from dlm_decode.eval.decoding import Asking
    from dlm_decode.eval.protocols import Protocol
    from dlm_decode.eval.runner import Job, Source

DEFAULT_OUT = Path("eval-results")
PARTS = ("cache", "schedule")
PLAIN = (None, "none", "fixed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tasks", metavar="TASK", nargs="*", help="protocols to run")
    parser.add_argument("--list", action="store_true", help="list the protocols and stop")
    _add_evaluation(parser)
    add_method(parser)
    _add_request(parser)
    add_machine(parser)
    _add_workers(parser)


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    group.add_argument(
        "--data", metavar="DIR", help="folder of the data files, or 'hub'; default: DLM_DATA"
    )
    group.add_argument(
        "--any-data-version", action="store_true", help="take data other than the pinned files"
    )
    group.add_argument("--limit", metavar="N", type=positive_int, help="only the first N problems")
    group.add_argument("--out", metavar="DIR", help=f"results folder; default: {DEFAULT_OUT}/...")
    group.add_argument("--overwrite", action="store_true", help="start anew in an existing folder")
    group.add_argument(
        "--sweep",
        metavar="SPEC",
        nargs="+",
        help="several decoders: SAMPLER[,KEY=VALUE...]; cache= and schedule= name those",
    )
    group.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run programs that the model wrote, isolated as far as this system allows",
    )
    group.add_argument(
        "--execution-workers", metavar="N", type=positive_int, help="default: number of CPUs"
    )
    group.add_argument("--trace", action="store_true", help="keep every step in requests.jsonl")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
    group.add_argument(
        "--no-warm-up", dest="warm_up", action="store_false", help="time the first request too"
    )


def _add_request(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("request (default: the protocol's)")
    group.add_argument("--gen-length", metavar="N", type=positive_int, help="tokens to decode")
    group.add_argument("--block-length", metavar="N", type=positive_int)
    group.add_argument("--eos-policy", choices=EOS_POLICIES, help="how end tokens may be chosen")
    group.add_argument(
        "--no-stop-at-eos",
        dest="stop_at_eos",
        action="store_false",
        help="decode the whole length even after an end token",
    )
    group.add_argument("--seed", metavar="N", type=int, default=0, help="default: 0")
    group.add_argument(
        "--no-chat", dest="chat", action="store_false", help="do not apply the chat template"
    )


def _add_workers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("many devices (see also torchrun in the README)")
    group.add_argument(
        "--workers", metavar="N", type=positive_int, help="decoders in a Ray pool; default: none"
    )
    group.add_argument("--gpus-per-worker", metavar="G", type=float, default=0.0, help="default: 0")
    group.add_argument(
        "--ray-address", metavar="A", help="a running cluster; default: this machine"
    )


def run(args: argparse.Namespace) -> int:
    from dlm_decode.eval.protocols import expand, load_protocol
    from dlm_decode.eval.tables import run_table
    from dlm_decode.ranks import local_device, rank_and_size

    if args.list:
        return _list()
    if not args.tasks:
        raise OptionError("name at least one TASK; --list shows them")
    if args.workers is not None and rank_and_size()[1] > 1:
        raise OptionError("--workers is for Ray; under torchrun each process is a worker")
    args.device = local_device(args.device)
    protocols = [load_protocol(name) for name in expand(args.tasks)]
    jobs = [
        _job(method, protocol, count=len(protocols) * len(args.sweep or [None]))
        for protocol in protocols
        for method in _methods(args)
    ]
    summaries = _run_all(jobs)
    if summaries:  # under torchrun the first process alone has them
        print(run_table(summaries), end="")
    return 1 if any(summary["refused"] for summary in summaries) else 0


def _list() -> int:
    from dlm_decode.eval.protocols import load_protocol, names

    for name in names():
        protocol = load_protocol(name)
        print(f"{protocol.id}: {protocol.summary}")
    return 0


def _methods(args: argparse.Namespace) -> list[argparse.Namespace]:
    """One set of arguments for each decoder of the sweep, checked before any model is loaded."""
    from dlm_decode.arguments import parse_parts

    methods = [_swept(args, spec) for spec in args.sweep] if args.sweep else [args]
    for method in methods:
        parse_parts(method)
    return methods


def _swept(args: argparse.Namespace, spec: str) -> argparse.Namespace:
    """`args` with the decoder that `spec` describes."""
    sampler, *pairs = spec.split(",")
    changed = argparse.Namespace(**{**vars(args), "sampler": sampler, "set": list(args.set)})
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise OptionError(f"--sweep takes SAMPLER[,KEY=VALUE...], got {spec!r}")
        if key in PARTS:
            setattr(changed, key, value)
        else:
            changed.set.append(pair)
    return changed


def _job(args: argparse.Namespace, protocol: Protocol, *, count: int) -> Job:
    from dlm_decode.eval.problems import load_problems
    from dlm_decode.eval.results import RunFolder
    from dlm_decode.eval.runner import Job
    from dlm_decode.eval.scoring import require_consent
    from dlm_decode.ranks import rank_and_size

    require_consent(protocol, args.allow_code_execution)
    questions = load_problems(
        protocol, args.data, limit=args.limit, any_version=args.any_data_version
    )
    out = Path(args.out) if args.out else DEFAULT_OUT
    path = out if args.out and count == 1 else out / protocol.name / _slug(args)
    rank, size = rank_and_size()
    folder = RunFolder(path, rank if size > 1 else None)
    quiet = args.quiet or not sys.stderr.isatty() or rank > 0
    return Job(args, questions, _asking(args, protocol), folder, quiet=quiet)


def _asking(args: argparse.Namespace, protocol: Protocol) -> Asking:
    from dlm_decode.eval.decoding import Asking

    return Asking(
        gen_length=args.gen_length or protocol.gen_length,
        block_length=args.block_length or protocol.block_length,
        eos=args.eos_policy or protocol.eos,
        stop_at_eos=args.stop_at_eos,
        chat=args.chat and protocol.chat != "never",
    )


def _slug(args: argparse.Namespace) -> str:
    """A folder name for a decoder."""
    words = [args.sampler, *args.set]
    words += [f"{part}={getattr(args, part)}" for part in PARTS if getattr(args, part) not in PLAIN]
    words += [f"temperature={args.temperature}"] if args.temperature is not None else []
    return "_".join(word.replace("/", "-") for word in words)


def _run_all(jobs: list[Job]) -> list[dict[str, Any]]:
    from dlm_decode.eval.runner import run_job
    from dlm_decode.eval.sandbox import isolation
    from dlm_decode.eval.scoring import executes

    if any(executes(job.protocol) for job in jobs):
        print(f"dlm-decode: {isolation().describe()}", file=sys.stderr)
    source = _source(jobs[0].args)
    done = [run_job(job, source, overwrite=job.args.overwrite) for job in jobs]
    return [summary for summary in done if summary is not None]


def _source(args: argparse.Namespace) -> Source:
    """Where requests are decoded: here, or in a Ray pool."""
    from dlm_decode.eval.runner import decode_here

    if args.workers is None:
        return decode_here
    from dlm_decode.eval.pool import decode_in_pool

    return decode_in_pool
