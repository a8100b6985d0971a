"""Replay prompts in two ways and compare: what must not differ, and what it costs.

--lossless decodes with and without self-speculation, with the same sampler, cache and seed, and
reports the share of identical outputs, the ratios of forwards, of positions computed and of
seconds, and for each divergence how close the first differing decision was. The exit status is 1 if
any output differs.

Without --lossless it is the cache that is audited: beside every turn the whole row is computed
again, and the logits, and the sampler's decision, are compared. --plot draws the error over the
turns and how old the K/V were.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from dlm_decode.arguments import add_machine, add_method, add_request, build_decoder, parse_parts
from dlm_decode.errors import OptionError, RequestError
from dlm_decode.jsonl import Row, check_text, read_rows

if TYPE_CHECKING:
    from dlm_decode.api import Decoder
    from dlm_decode.speculation import LosslessReport
    from dlm_decode.types import Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("audit")
    group.add_argument("--lossless", action="store_true", help="with and without self-speculation")
    group.add_argument("--plot", metavar="FILE", help="cache audit: draw it into this image")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", nargs="+", help="replay these prompts")
    source.add_argument("--input", metavar="FILE", help="replay each row of this JSONL file")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_method(parser)
    add_request(parser)
    add_machine(parser)


def run(args: argparse.Namespace) -> int:
    return _lossless(args) if args.lossless else _cache(args)


def _cache(args: argparse.Namespace) -> int:
    from dlm_decode.audit import audit_cache, report_text, save_plot

    parts = parse_parts(args)
    rows = _rows(args)
    decoder = build_decoder(args, parts)
    report = audit_cache(decoder, [_request(decoder, args, row) for row in rows])
    if args.plot:
        save_plot(report, args.plot)
    print(json.dumps(report.as_dict()) if args.json else report_text(report))
    return 0


def _lossless(args: argparse.Namespace) -> int:
    from dlm_decode.speculation import audit_lossless

    if args.plot:
        raise OptionError("--plot draws the audit of a cache: leave out --lossless")
    args.verify = "lossless"
    parts = parse_parts(args)
    rows = _rows(args)
    decoder = build_decoder(args, parts)
    report = audit_lossless(decoder, [_request(decoder, args, row) for row in rows])
    print(json.dumps(report.as_dict()) if args.json else _text(report))
    return int(report.identical < report.rows)


def _rows(args: argparse.Namespace) -> list[Row]:
    if args.prompt is not None:
        return [Row(i, str(i), check_text(p), {}) for i, p in enumerate(args.prompt, 1)]
    if args.input == "-":
        rows, problems = read_rows(sys.stdin.buffer)
    else:
        with open(args.input, "rb") as lines:
            rows, problems = read_rows(lines)
    if problems:
        raise RequestError(f"{args.input} line {problems[0].line}: {problems[0].message}")
    if not rows:
        raise RequestError(f"{args.input} has no rows")
    return rows


def _request(decoder: Decoder, args: argparse.Namespace, row: Row) -> Request:
    lengths = {"gen_length": args.gen_length, "block_length": args.block_length}
    request = decoder.request(
        row.source,
        chat=args.chat,
        id=row.key,
        eos=args.eos_policy,
        stop_at_eos=args.stop_at_eos,
        **(lengths | dict(row.overrides)),
    )
    decoder.check(request)
    return request


def _text(report: LosslessReport) -> str:
    content = report.as_dict()
    lines = [f"identical outputs: {report.identical} of {report.rows}"]
    for name, what in (("forwards", "forwards"), ("positions", "positions computed")):
        plain, ahead = content[name]
        lines.append(f"{what}: {ahead} instead of {plain} ({content[name + '_ratio']:.2f}x)")
    plain, ahead = report.seconds
    lines.append(f"seconds: {ahead:.2f} instead of {plain:.2f} ({content['seconds_ratio']:.2f}x)")
    lines.append(f"states drafted: {report.drafted}, accepted: {report.accepted}")
    for found in report.divergences:
        gap = "one run decided more" if found.score_gap is None else f"gap {found.score_gap:.3g}"
        lines.append(f"row {found.id} differs from step {found.step} on: {gap}")
    return "\n".join(lines)
