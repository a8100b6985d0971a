"""Plots of finished runs; needs matplotlib (`pip install 'dlm-decode[plot]'`)."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlm_decode.errors import CapabilityError
from dlm_decode.eval.comparison import Run, by_task

COSTS = {"tpf": "tokens per forward", "tps": "tokens per second"}
COLUMNS = 32


def save_plots(runs: Sequence[Run], folder: Path, *, sample: str | None = None) -> list[Path]:
    """Accuracy against TPF and TPS for each task and, for each traced run, the commit order."""
    plt = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task, group in by_task(runs).items():
        for key in COSTS:
            path = folder / f"{task.split('@')[0]}-accuracy-{key}.png"
            _save(plt, _tradeoff(plt, task, group, key), path)
            written.append(path)
    for number, run in enumerate(runs):
        row = _traced_row(run, sample)
        if row is not None:
            path = folder / f"{run.task.split('@')[0]}-order-{number}.png"
            _save(plt, _commit_order(plt, run, row), path)
            written.append(path)
    return written


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise CapabilityError("--plot needs matplotlib: pip install 'dlm-decode[plot]'") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _tradeoff(plt: Any, task: str, runs: Sequence[Run], cost: str) -> Any:
    """A point a run, with 95% intervals both ways."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for run in runs:
        figures = run.summary["figures"]
        x, y = figures[cost], figures["accuracy"][run.summary["primary"]]
        y = {key: 100 * value for key, value in y.items()}
        axes.errorbar(
            x["value"], y["value"], xerr=_bars(x), yerr=_bars(y), fmt="o", capsize=2,
            label=run.label,
        )  # fmt: skip
    axes.set_xlabel(COSTS[cost])
    axes.set_ylabel("accuracy, %")
    axes.set_title(task)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _bars(interval: Mapping[str, float]) -> list[list[float]]:
    value = interval["value"]
    return [[max(value - interval["low"], 0)], [max(interval["high"] - value, 0)]]


def _traced_row(run: Run, sample: str | None) -> Mapping[str, Any] | None:
    traced = [row for row in run.rows.values() if "steps" in row]
    if sample is not None:
        traced = [row for row in traced if str(row["id"]) == sample]
    return traced[0] if traced else None


def commit_order(row: Mapping[str, Any]) -> list[float]:
    """For each position of the generated region, the turn that last committed it; NaN if none."""
    order = [math.nan] * len(row["ids"])
    first = row["prompt_tokens"]
    for turn, step in enumerate(row["steps"]):
        for position in step["positions"]:
            if 0 <= position - first < len(order):
                order[position - first] = turn
    return order


def _commit_order(plt: Any, run: Run, row: Mapping[str, Any]) -> Any:
    """The generated region as a heat map, row by row: dark is early."""
    order = commit_order(row)
    rows = -(-len(order) // COLUMNS)
    grid = [order[COLUMNS * i : COLUMNS * (i + 1)] for i in range(rows)]
    grid[-1] += [math.nan] * (COLUMNS - len(grid[-1]))
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.3 * rows))
    image = axes.imshow(grid, cmap="viridis", aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label="turn of commit")
    axes.set_yticks(range(rows), [str(COLUMNS * i) for i in range(rows)])
    axes.set_xlabel("position in the row")
    axes.set_title(f"{run.task}, request {row['id']}: {run.label}", fontsize="small")
    return figure
