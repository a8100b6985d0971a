"""One evaluation run: problems to requests, requests to rows, rows to scores and figures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dlm_decode.eval.identity import describe_machine, describe_run
from dlm_decode.eval.metrics import peak_bytes, summarise
from dlm_decode.eval.problems import Problem, ProblemSet
from dlm_decode.eval.protocols import Protocol
from dlm_decode.eval.results import SUMMARY, TABLE, RunFolder, in_order
from dlm_decode.eval.scoring import (
    executes,
    require_consent,
    score_answers,
    score_names,
    score_text,
)
from dlm_decode.eval.tables import run_table
from dlm_decode.ranks import join_group, wait_for_all

if TYPE_CHECKING:
    from dlm_decode.eval.decoding import Asking

Row = Mapping[str, Any]
Source = Callable[["Job", Sequence[Problem]], Iterator[Row]]
"""Decodes the problems that are not finished, in any order: `(job, all problems) -> rows`."""

SCORED_AT_ONCE = 16
REFUSED = "refused"


@dataclass(frozen=True)
class Job:
    """What one run evaluates: `args` are the method, model and machine of the command line."""

    args: argparse.Namespace
    questions: ProblemSet
    asking: Asking
    folder: RunFolder
    finished: frozenset[str] = frozenset()
    quiet: bool = False

    @property
    def protocol(self) -> Protocol:
        return self.questions.protocol


def run_job(job: Job, source: Source, *, overwrite: bool = False) -> dict[str, Any] | None:
    """Decode what is not finished, score everything, write and return the summary.

    Under torchrun every process decodes its share; the first one concludes, the others return None.
    """
    require_consent(job.protocol, job.args.allow_code_execution)
    rank, size = join_group()
    described = describe_run(job.args, job.questions, job.asking)
    if rank == 0:
        job.folder.open(described, describe_machine(job.args), overwrite=overwrite)
    wait_for_all()
    others = {p.id for i, p in enumerate(job.questions.problems) if i % size != rank}
    job = replace(job, finished=frozenset(job.folder.finished()) | others)
    if any(problem.id not in job.finished for problem in job.questions.problems):
        collect(job, source)
    wait_for_all()
    return conclude(job, described) if rank == 0 else None


def collect(job: Job, source: Source) -> None:
    """Write each row the moment it is there; a second row of one request is dropped."""
    problems = {problem.id: problem for problem in job.questions.problems}
    written = set(job.finished)
    with job.folder.writer() as writer:
        for row in _with_progress(job, source(job, job.questions.problems), problems):
            if row["id"] in problems and row["id"] not in written:
                written.add(row["id"])
                writer.write(row)


def _with_progress(job: Job, rows: Iterable[Row], problems: Mapping[str, Problem]) -> Iterator[Row]:
    """The rows, with a bar that shows the accuracy so far where scoring runs no program."""
    from tqdm import tqdm

    right = done = tokens = forwards = 0
    scored = not job.quiet and not executes(job.protocol)
    total, before = len(problems), len(job.finished & problems.keys())
    with tqdm(total=total, initial=before, unit="row", file=sys.stderr, disable=job.quiet) as bar:
        for row in rows:
            done, tokens = done + 1, tokens + row["tokens"]
            forwards += row["forwards"]
            shown = f"{tokens / max(forwards, 1):.2f} tokens/forward"
            if scored and row["id"] in problems:
                scores = score_text(job.protocol, problems[row["id"]], row["text"] or "")
                right += scores[job.protocol.primary]
                shown = f"{job.protocol.primary} {right / done:.1%}, {shown}"
            bar.set_postfix_str(shown, refresh=False)
            bar.update()
            yield row


def conclude(job: Job, described: Row) -> dict[str, Any]:
    """Score all rows and write results, summary and table; returns the summary."""
    problems = {problem.id: problem for problem in job.questions.problems}
    rows = in_order(job.folder.finished(), list(problems))
    scored = list(score_rows(job, rows, problems))
    job.folder.write_results(scored)
    names = score_names(job.protocol)
    machine = {"peak_bytes": peak_bytes(str(job.args.device or "cpu"))}
    summary = {
        "task": job.protocol.id,
        "primary": names[0],
        "problems": len(problems),
        "refused": sum(row["finish_reason"] == REFUSED for row in rows),
        "figures": summarise(scored, names) | machine if scored else None,
        "run": dict(described),
    }
    job.folder.write(SUMMARY, summary)
    job.folder.write_text(TABLE, run_table([summary]))
    return summary


def score_rows(
    job: Job, rows: Sequence[Row], problems: Mapping[str, Problem]
) -> Iterator[dict[str, Any]]:
    """The rows with their scores, a few at a time so that programs run side by side."""
    from tqdm import tqdm

    right = done = 0
    silent = job.quiet or not executes(job.protocol)
    with tqdm(total=len(rows), unit="program", file=sys.stderr, disable=silent) as bar:
        for start in range(0, len(rows), SCORED_AT_ONCE):
            part = rows[start : start + SCORED_AT_ONCE]
            pairs = [(problems[row["id"]], row["text"] or "") for row in part]
            judged = score_answers(
                job.protocol,
                pairs,
                allow_code_execution=job.args.allow_code_execution,
                workers=job.args.execution_workers,
            )
            for row, (scores, notes) in zip(part, judged, strict=True):
                done, right = done + 1, right + scores[job.protocol.primary]
                yield {**row, "scores": dict(scores), **({"notes": dict(notes)} if notes else {})}
            bar.set_postfix_str(f"{job.protocol.primary} {right / done:.1%}", refresh=False)
            bar.update(len(part))


def decode_here(job: Job, problems: Sequence[Problem]) -> Iterator[Row]:
    """The plain source: one decoder in this process."""
    from dlm_decode.arguments import build_decoder, parse_parts
    from dlm_decode.eval.decoding import decode, make_requests

    decoder = build_decoder(job.args, parse_parts(job.args))
    requests, refused = make_requests(decoder, problems, job.asking)
    yield from refused_rows(job, refused)
    todo = [request for request in requests if request.id not in job.finished]
    yield from decode(decoder, todo, trace=job.args.trace, warm_up=job.args.warm_up)


def refused_rows(job: Job, refused: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Rows of the problems that the model cannot be asked: empty answers, which count as wrong."""
    left = [pair for pair in refused if pair[0] not in job.finished]
    if left:
        identifier, reason = left[0]
        print(
            f"dlm-decode: {len(left)} of {job.protocol.name}'s problems cannot be asked and count"
            f" as wrong; the first, {identifier}: {reason}",
            file=sys.stderr,
        )
    for identifier, reason in left:
        yield refused_row(identifier, reason)


def refused_row(identifier: str, reason: str) -> Row:
    return {
        "id": identifier, "text": "", "ids": [], "finish_reason": REFUSED, "reason": reason,
        "forwards": 0, "forwards_by_kind": {}, "computed_positions": 0, "tokens": 0,
        "seconds": 0.0, "decode_s": 0.0, "ttfb_s": None, "prompt_tokens": None,
    }  # fmt: skip
