"""Finished runs side by side: paired tests, identity with the first run, AUP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlm_decode.eval.results import SUMMARY, RunFolder
from dlm_decode.eval.statistics import aup, mcnemar
from dlm_decode.eval.tables import decoder_label, markdown, percent, run_table
from dlm_decode.jsonl import FileFormatError

Row = Mapping[str, Any]
HEAD = ("run", "against", "n", "difference", "only A right", "only B right", "p", "identical")


@dataclass(frozen=True)
class Run:
    """A finished run: its summary and its rows by request id."""

    path: Path
    summary: Mapping[str, Any]
    rows: Mapping[str, Row]

    @property
    def task(self) -> str:
        return str(self.summary["task"])

    @property
    def label(self) -> str:
        return decoder_label(self.summary["run"])

    def verdicts(self) -> dict[str, bool]:
        """Which problems are right, by the primary score."""
        name = self.summary["primary"]
        return {key: bool(row["scores"][name]) for key, row in self.rows.items()}

    @property
    def point(self) -> tuple[float, float]:
        """Tokens per forward and accuracy in percent."""
        figures = self.summary["figures"]
        accuracy = figures["accuracy"][self.summary["primary"]]["value"]
        return figures["tpf"]["value"], 100 * accuracy


def load_run(path: Path) -> Run:
    """A run's folder; raises `FileFormatError` if it holds no finished run."""
    folder = RunFolder(path)
    rows = folder.read_results()
    summary = folder.read(SUMMARY)
    if not rows or summary.get("figures") is None:
        raise FileFormatError(f"{path} holds a run without results")
    return Run(path, summary, {str(row["id"]): row for row in rows})


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these folders or anywhere below them, in the order given."""
    found: list[Run] = []
    for path in paths:
        below = [path] if (path / SUMMARY).is_file() else sorted(
            file.parent for file in path.rglob(SUMMARY)
        )  # fmt: skip
        if not below:
            raise FileFormatError(f"{path} holds no finished run: run `dlm-decode eval` first")
        found += map(load_run, below)
    return found


def by_task(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.task, []).append(run)
    return groups


def compare(first: Run, other: Run) -> dict[str, Any]:
    """McNemar's test and the share of identical token sequences, over shared problems.

    Identity is of the ids before the first end id: what a lossless decoder must keep.
    """
    paired = mcnemar(first.verdicts(), other.verdicts())
    shared = first.rows.keys() & other.rows.keys()
    same = sum(_text_ids(first.rows[key]) == _text_ids(other.rows[key]) for key in shared)
    return {
        "task": first.task,
        "a": str(first.path),
        "b": str(other.path),
        "problems": len(shared),
        **asdict(paired),
        "difference": paired.difference,
        "identical": same / len(shared),
    }


def _text_ids(row: Row) -> Sequence[int]:
    ids: Sequence[int] = row["ids"][: row["tokens"]]
    return ids


def accuracy_under_parallelism(runs: Sequence[Run]) -> dict[str, float]:
    """AUP of each sampler of one task: a sampler's settings are its points."""
    points: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        points.setdefault(run.summary["run"]["sampler"], []).append(run.point)
    best = max(run.point[1] for run in runs)
    return {sampler: aup(of_one, best) for sampler, of_one in points.items()}


def report(runs: Sequence[Run]) -> dict[str, Any]:
    """All comparisons as plain data."""
    groups = by_task(runs)
    return {
        "runs": [dict(run.summary) for run in runs],
        "comparisons": [
            compare(group[0], other) for group in groups.values() for other in group[1:]
        ],
        "aup": {task: accuracy_under_parallelism(group) for task, group in groups.items()},
    }


def report_text(runs: Sequence[Run]) -> str:
    """The comparisons as Markdown."""
    parts = [run_table([run.summary for run in runs])]
    lines = [
        _line(group[0], other, compare(group[0], other))
        for group in by_task(runs).values()
        for other in group[1:]
    ]
    if lines:
        parts.append("B against A, the task's first run; p: McNemar's exact test\n")
        parts.append(markdown(HEAD, lines))
    scores = [
        [task, sampler, f"{value:.1f}"]
        for task, group in by_task(runs).items()
        for sampler, value in accuracy_under_parallelism(group).items()
    ]
    parts.append(markdown(("task", "sampler", "AUP"), scores))
    return "\n".join(parts)


def _line(first: Run, other: Run, found: Mapping[str, Any]) -> list[str]:
    return [
        f"{other.task} {other.label}",
        first.label,
        str(found["problems"]),
        f"{100 * found['difference']:+.1f} points",
        str(found["only_a"]),
        str(found["only_b"]),
        f"{found['p_value']:.3g}",
        percent(found["identical"]),
    ]
