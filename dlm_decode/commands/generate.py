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
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_decode.arguments import (
    add_machine,
    add_method,
    add_parallel,
    add_request,
    build_decoder,
    parse_parts,
)
from dlm_decode.errors import DlmDecodeError, OptionError, RequestError
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
from dlm_decode.ranks import leave_group, rank_and_size

if TYPE_CHECKING:
    from dlm_decode.api import Decoder, Parts
    from dlm_decode.types import Generation, Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_files(parser)
    add_method(parser)
    add_request(parser)
    add_machine(parser)
    parser.add_argument(
        "--graphs", action="store_true", help="replay turns as CUDA graphs (GPUs, dense models)"
    )
    add_parallel(parser)


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


@dataclass(frozen=True)
class Job:
    """What there is to decode and where results go; `rows` includes those finished earlier."""

    rows: list[Row]
    problems: list[Problem]
    output: Path | None
    finished: Finished

    @property
    def is_finished(self) -> bool:
        return all(row.key in self.finished.ids for row in self.rows)


def run(args: argparse.Namespace) -> int:
    if args.tensor_parallel:
        return _run_together(args)
    return _run(args, shown=True)


def _run_together(args: argparse.Namespace) -> int:
    """All processes of `--tensor-parallel` decode the same rows; the first one writes them."""
    if args.input == "-":
        raise OptionError(
            "--tensor-parallel reads the rows in every process: name a file as --input"
        )
    status = _run(args, shown=rank_and_size()[0] == 0)
    leave_group()
    return status


def _run(args: argparse.Namespace, *, shown: bool) -> int:
    parts = parse_parts(args)
    job = _job(args)
    if shown:
        _report(job.problems, args.input)
    if job.is_finished:
        failed = _end_cleanly(job) if shown else 0
    else:
        failed = _decode(args, parts, job, shown=shown)
    return 1 if job.problems or failed else 0


def _end_cleanly(job: Job) -> int:
    """With nothing to decode, the output still must exist and end with a whole line."""
    with RowWriter(job.output, keep_bytes=job.finished.size):
        return 0


def _job(args: argparse.Namespace) -> Job:
    output = None if args.output in (None, "-") else Path(args.output)
    finished = _finished(args, output)
    rows, problems = _read(args)
    foreign = finished.ids - {row.key for row in rows}
    if foreign and not problems:
        raise FileFormatError(
            f"{output} has a row {min(foreign)!r} that the input lacks: not resumed"
        )
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
        raise OptionError(f"--output {output} exists: add --resume to go on or --overwrite")
    return Finished()


def _read(args: argparse.Namespace) -> tuple[list[Row], list[Problem]]:
    if args.prompt is not None:
        return [Row(1, "1", check_text(args.prompt), {})], []
    if args.input == "-":
        return read_rows(sys.stdin.buffer)
    with open(args.input, "rb") as lines:
        return read_rows(lines)


def _decode(args: argparse.Namespace, parts: Parts, job: Job, *, shown: bool) -> int:
    """Decode what is not finished and write it; returns how many rows could not be."""
    decoder = build_decoder(args, parts, graphs=args.graphs)
    requests, problems = _requests(decoder, args, job.rows)
    if args.prompt is not None and problems:
        raise RequestError(problems[0].message)
    todo = [request for request in requests if request.id not in job.finished.ids]
    if not shown:
        deque(decoder.run(todo), maxlen=0)
        return len(problems)
    _report(problems, args.input)
    results = _with_progress(decoder.run(todo), len(todo), shown=_shows_progress(args))
    if args.prompt is None or job.output is not None or args.json or args.trace:
        _write_rows(job, results, trace=args.trace)
    else:
        _print_texts(results, with_cost=_shows_progress(args))
    return len(problems)


def _requests(
    decoder: Decoder, args: argparse.Namespace, rows: Iterable[Row]
) -> tuple[list[Request], list[Problem]]:
    requests: list[Request] = []
    problems: list[Problem] = []
    for row in rows:
        try:
            requests.append(_request(decoder, args, row))
        except DlmDecodeError as error:
            problems.append(Problem(row.line, str(error)))
    return _numbered(requests), problems


def _request(decoder: Decoder, args: argparse.Namespace, row: Row) -> Request:
    _refuse_mask_text(decoder, row)
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


def _refuse_mask_text(decoder: Decoder, row: Row) -> None:
    """A text that spells the mask token would become a hole to fill."""
    if decoder.tokenizer is None:
        return
    mask = str(decoder.tokenizer.convert_ids_to_tokens(decoder.model.info.mask_id))
    if any(mask in text for text in row.texts):
        raise RequestError(f"the prompt holds {mask!r}, which is the model's mask token: remove it")


def _numbered(requests: Iterable[Request]) -> list[Request]:
    """Equal rows draw different tokens, by their order in the file and not by what is finished."""
    seen: Counter[tuple[Any, ...]] = Counter()
    numbered = []
    for request in requests:
        content = (tuple(request.prompt_ids), request.gen_length, request.seed)
        numbered.append(replace(request, sample=seen[content]))
        seen[content] += 1
    return numbered


def _write_rows(job: Job, results: Iterable[Generation], *, trace: bool) -> None:
    ids = {row.key: row.id for row in job.rows}
    with RowWriter(job.output, keep_bytes=job.finished.size) as writer:
        for generation in results:
            writer.write(result_row(ids[generation.id], generation, trace=trace))


def _print_texts(results: Iterable[Generation], *, with_cost: bool) -> None:
    for generation in results:
        print(generation.text)
        if with_cost:
            print(_cost_line(generation), file=sys.stderr)


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
