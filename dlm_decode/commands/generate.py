"""Decode one prompt, or each row of a JSONL file, with a masked diffusion language model.

--prompt prints the text; with --json or --trace, or with --output, its result is one JSON row.
--input reads one JSON object a line: `id` (the line number if absent) and one of `prompt` (text),
`messages` (chat) and `prompt_ids` (token ids, taken as they are), optionally `gen_length`,
`block_length` and `seed`. Other keys are ignored. Results are written as they are completed, so
their order can differ from the input's. A row that cannot be decoded is reported with its line
number; the others run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_decode.errors import OptionError, RequestError
from dlm_decode.jsonl import (
    FileFormatError,
    Finished,
    Problem,
    Row,
    RowWriter,
    check_text,
    read_finished,
    read_rows,
    result_row,
)

if TYPE_CHECKING:
    from dlm_decode.api import Decoder
    from dlm_decode.types import Generation, Request

EOS_POLICIES = ("none", "no_confidence", "banned", "ban_start")
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_files(parser)
    _add_method(parser)
    _add_request(parser)
    _add_machine(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input and output")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="decode this prompt")
    source.add_argument(
        "--input", metavar="FILE", help="decode each row of this JSONL file; - is stdin"
    )
    group.add_argument("--output", metavar="FILE", help="write JSON rows here (default: stdout)")
    existing = group.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="skip rows that --output already holds, append the rest",
    )
    existing.add_argument("--overwrite", action="store_true", help="replace an existing --output")
    group.add_argument("--trace", action="store_true", help="add every step to the JSON rows")
    group.add_argument("--json", action="store_true", help="print a JSON row for --prompt too")
    group.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="progress on stderr (default: if it is a terminal)",
    )


def _add_method(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("method (see `dlm-decode list`)")
    group.add_argument(
        "--sampler", metavar="NAME", default="threshold", help="default: %(default)s"
    )
    group.add_argument("--cache", metavar="NAME", default="none", help="default: %(default)s")
    group.add_argument("--schedule", metavar="NAME", default="fixed", help="default: %(default)s")
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
        "--cfg-scale", metavar="S", type=float, default=0.0, help="guidance (default: 0, off)"
    )


def _add_request(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("request")
    group.add_argument(
        "--gen-length", metavar="N", type=int, default=128, help="tokens to decode (default: 128)"
    )
    group.add_argument(
        "--block-length",
        metavar="N",
        type=int,
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


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and machine")
    group.add_argument(
        "--model", metavar="NAME_OR_PATH", help="folder or hub name (default: the bundled model)"
    )
    group.add_argument(
        "--batch-size", metavar="B", type=_positive, default=8, help="rows at a time (default: 8)"
    )
    group.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    group.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 ... (default: cpu)")
    group.add_argument("--threads", metavar="N", type=_positive, help="CPU threads")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


@dataclass(frozen=True)
class Job:
    """What there is to decode and where results go."""

    rows: list[Row]
    problems: list[Problem]
    output: Path | None
    finished: Finished


def run(args: argparse.Namespace) -> int:
    options = _options(args)
    _check_names(args)
    job = _job(args)
    if args.prompt is not None:
        return _run_prompt(args, options, job)
    _report(job.problems, args.input)
    failed = _run_rows(args, options, job) if job.rows else 0
    return 1 if job.problems or failed else 0


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


def _check_names(args: argparse.Namespace) -> None:
    """Refuse unknown names before a model is loaded."""
    from dlm_decode.commands.list import registry

    for kind, name in (
        ("samplers", args.sampler),
        ("caches", args.cache),
        ("schedules", args.schedule),
    ):
        registry(kind).get(name)


def _job(args: argparse.Namespace) -> Job:
    output = None if args.output in (None, "-") else Path(args.output)
    finished = _finished(args, output)
    rows, problems = _read(args)
    _refuse_foreign(output, finished, rows, problems)
    rows = [row for row in rows if row.key not in finished.ids]
    return Job(rows, problems, output, finished)


def _finished(args: argparse.Namespace, output: Path | None) -> Finished:
    if output is None:
        if args.resume or args.overwrite:
            raise OptionError("--resume and --overwrite need --output FILE")
        return Finished()
    if not output.parent.is_dir():
        raise OptionError(f"--output {output}: there is no folder {output.parent}")
    if args.input not in (None, "-") and output.exists() and output.samefile(args.input):
        raise OptionError(f"--output {output} is the input file")
    if args.resume and output.is_file():
        return read_finished(output)
    if output.is_file() and not args.overwrite:
        raise OptionError(f"--output {output} exists; add --resume to go on or --overwrite")
    return Finished()


def _read(args: argparse.Namespace) -> tuple[list[Row], list[Problem]]:
    if args.prompt is not None:
        return [Row(1, "1", check_text(args.prompt), {})], []
    if args.input == "-":
        return read_rows(sys.stdin.buffer)
    with open(args.input, "rb") as lines:
        return read_rows(lines)


def _refuse_foreign(
    output: Path | None, finished: Finished, rows: list[Row], problems: list[Problem]
) -> None:
    """A file of results for other prompts is not continued."""
    foreign = finished.ids - {row.key for row in rows}
    if foreign and not problems:
        raise FileFormatError(
            f"{output} has a row {min(foreign)!r} that the input lacks; not resumed"
        )


def _run_prompt(args: argparse.Namespace, options: dict[str, str], job: Job) -> int:
    if not job.rows:
        return 0
    decoder = _decoder(args, options)
    requests = {row.key: _request(decoder, args, row) for row in job.rows}
    as_rows = job.output is not None or args.json or args.trace
    if as_rows:
        _write_results(args, job, decoder.run(requests.values()))
        return 0
    for generation in decoder.run(requests.values()):
        print(generation.text)
        if _shows_progress(args):
            print(_cost_line(generation), file=sys.stderr)
    return 0


def _run_rows(args: argparse.Namespace, options: dict[str, str], job: Job) -> int:
    """Decode the job's rows; returns how many of them could not be."""
    decoder = _decoder(args, options)
    requests, problems = _requests(decoder, args, job.rows)
    _report(problems, args.input)
    _write_results(args, job, decoder.run(requests), total=len(requests))
    return len(problems)


def _decoder(args: argparse.Namespace, options: dict[str, str]) -> Decoder:
    import torch

    from dlm_decode import api

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    return api.Decoder(
        api.load(args.model, dtype=dtype, device=args.device),
        sampler=args.sampler,
        cache=args.cache,
        schedule=args.schedule,
        options=options,
        cfg_scale=args.cfg_scale,
        seed=args.seed,
        max_batch_size=args.batch_size,
    )


def _requests(
    decoder: Decoder, args: argparse.Namespace, rows: Iterable[Row]
) -> tuple[list[Request], list[Problem]]:
    requests: list[Request] = []
    problems: list[Problem] = []
    for row in rows:
        try:
            requests.append(_request(decoder, args, row))
        except RequestError as error:
            problems.append(Problem(row.line, str(error)))
    return requests, problems


def _request(decoder: Decoder, args: argparse.Namespace, row: Row) -> Request:
    fields: dict[str, Any] = {"gen_length": args.gen_length, "block_length": args.block_length}
    request = decoder.request(
        row.source,
        chat=args.chat,
        id=row.key,
        eos=args.eos_policy,
        stop_at_eos=args.stop_at_eos,
        stop=tuple(args.stop),
        **(fields | dict(row.overrides)),
    )
    decoder.check(request)
    return request


def _write_results(
    args: argparse.Namespace, job: Job, results: Iterable[Generation], *, total: int = 1
) -> None:
    ids = {row.key: row.id for row in job.rows}
    with RowWriter(job.output, keep_bytes=job.finished.size) as writer:
        for generation in _with_progress(results, total, shown=_shows_progress(args)):
            writer.write(result_row(ids[generation.id], generation, trace=args.trace))


def _with_progress(
    results: Iterable[Generation], total: int, *, shown: bool
) -> Iterator[Generation]:
    from tqdm import tqdm

    tokens = forwards = 0
    with tqdm(total=total, unit="row", file=sys.stderr, disable=not shown) as bar:
        for generation in results:
            tokens += generation.tokens
            forwards += generation.forwards
            bar.set_postfix_str(f"{tokens / max(forwards, 1):.2f} tokens/forward", refresh=False)
            bar.update()
            yield generation


def _shows_progress(args: argparse.Namespace) -> bool:
    return sys.stderr.isatty() if args.progress is None else args.progress


def _cost_line(generation: Generation) -> str:
    per_forward = generation.tokens / max(generation.forwards, 1)
    return (
        f"{generation.tokens} tokens in {generation.forwards} forwards"
        f" ({per_forward:.2f} tokens/forward), {generation.trace.elapsed_s:.2f} s,"
        f" ended by {generation.finish_reason}"
    )


def _report(problems: Iterable[Problem], name: str) -> None:
    shown = "stdin" if name == "-" else name
    for problem in problems:
        print(f"dlm-decode: error: {shown} line {problem.line}: {problem.message}", file=sys.stderr)
