"""Samplers side by side on the bundled tasks: accuracy against tokens per forward.

A method is a sampler with one option taken through several values; each value is one point. A
task's items, their order and the greedy decoding are the same for all.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlm_decode.api import Decoder
from dlm_decode.clock import clock_of
from dlm_decode.compose import chain_classes
from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.eval.statistics import aup, wilson
from dlm_decode.models.loading import LoadedModel
from dlm_decode.options import acts
from dlm_decode.tasks import FAMILIES, Item, held_out, verify

KNOBS: Mapping[str, tuple[Any, ...]] = {
    "threshold": (0.95, 0.9, 0.8, 0.7, 0.6, 0.5),
    "tau1": (0.95, 0.9, 0.8, 0.7, 0.6, 0.5),
    "factor": (0.25, 0.5, 1.0, 1.5, 2.0),
    "gamma": (0.01, 0.05, 0.1, 0.3, 1.0),
    "tau": (0.01, 0.03, 0.1, 0.3),
    "tau_low": (0.9, 0.8, 0.7, 0.6, 0.5),
    "conf_threshold": (0.95, 0.9, 0.8, 0.7),
    "epsilon": (0.01, 0.03, 0.1, 0.3),
    "tau_decode": (0.0, 0.01, 0.03, 0.1, 0.3),
    "base": (2, 3, 4),
    "steps": (48, 32, 24, 16),
    "n": (2, 3, 4),
}
"""The option that trades accuracy for speed, the first that a sampler has and uses by default, and
its values."""


@dataclass(frozen=True)
class Method:
    """A sampler (or a chain) and the values that one of its options takes."""

    sampler: str
    knob: str | None = None
    values: tuple[Any, ...] = (None,)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def options(self, value: Any) -> dict[str, Any]:
        return dict(self.fixed) | ({} if self.knob is None else {self.knob: value})


@dataclass(frozen=True)
class Point:
    """What one method gave at one value on one task, over all items."""

    method: str
    setting: str
    task: str
    items: int
    correct: int
    tokens: int
    forwards: int
    positions: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.forwards, 1)

    @property
    def positions_per_token(self) -> float:
        return self.positions / max(self.tokens, 1)


def parse_method(text: str) -> Method:
    """`NAME`, `NAME:OPTION=V1,V2` or `NAME:OPTION=V;OTHER=V1,V2`; NAME may be a chain.

    Without values the sampler's own knob (see `KNOBS`) takes its usual ones. One option at most may
    have several values.
    """
    name, _, rest = text.partition(":")
    classes = chain_classes(name)
    given: dict[str, list[str]] = {}
    for part in filter(None, rest.split(";")):
        key, equals, values = part.partition("=")
        if not equals or not key or not values:
            raise OptionError(f"a method is NAME:OPTION=V1,V2;OTHER=V, got {text!r}")
        given[key] = values.split(",")
    several = [key for key, values in given.items() if len(values) > 1]
    if len(several) > 1:
        raise OptionError(f"only one option may take several values, got {text!r}")
    fixed = {key: values[0] for key, values in given.items() if key not in several}
    if several:
        return Method(name, several[0], tuple(given[several[0]]), fixed)
    if given:
        return Method(name, None, (None,), fixed)
    layer, cls = list(classes.items())[-1]
    knob = next((key for key in KNOBS if acts(cls, key)), None)
    return Method(name) if knob is None else Method(name, f"{layer}.{knob}", KNOBS[knob])


def run(
    model: LoadedModel,
    methods: Sequence[Method],
    tasks: Sequence[str],
    *,
    items: int,
    gen_length: int = 64,
    block_length: int | None = None,
    cache: str = "none",
    schedule: str | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> Iterator[Point]:
    """Every method at every value on every task, in that order."""
    for task in tasks:
        if task not in FAMILIES:
            raise OptionError(f"tasks must be of {', '.join(FAMILIES)}, got {task!r}")
    drawn = {task: held_out(task, items, seed) for task in tasks}
    for method in methods:
        for value in method.values:
            decoder = Decoder(
                model,
                method.sampler,
                cache,
                schedule,
                options=method.options(value),
                seed=seed,
                max_batch_size=batch_size,
            )
            for task in tasks:
                lengths = {"gen_length": gen_length, "block_length": block_length}
                yield _point(decoder, method, value, task, drawn[task], lengths)


def _point(
    decoder: Decoder,
    method: Method,
    value: Any,
    task: str,
    items: Sequence[Item],
    lengths: Mapping[str, Any],
) -> Point:
    requests = [decoder.request(item.prompt, id=item.id, **lengths) for item in items]
    clock = clock_of(decoder.model.device)
    started = clock()
    results = decoder.generate(requests)
    seconds = clock() - started
    return Point(
        method.sampler + "".join(f" {k}={v}" for k, v in method.fixed.items()),
        "" if method.knob is None else f"{method.knob.rpartition('.')[2]}={value}",
        task,
        len(items),
        sum(verify(item, r.text or "") for item, r in zip(items, results, strict=True)),
        sum(result.tokens for result in results),
        sum(result.forwards for result in results),
        sum(result.trace.computed_positions for result in results),
        seconds,
    )


def pooled(points: Iterable[Point]) -> list[Point]:
    """The points of each method and setting added up over the tasks."""
    found: dict[tuple[str, str], Point] = {}
    for p in points:
        key = (p.method, p.setting)
        old = found.get(key)
        if old is None:
            found[key] = p if p.task == "all" else Point(**(asdict(p) | {"task": "all"}))
            continue
        counts = ("items", "correct", "tokens", "forwards", "positions", "seconds")
        sums = {name: getattr(old, name) + getattr(p, name) for name in counts}
        found[key] = Point(p.method, p.setting, "all", **sums)
    return list(found.values())


def scores(points: Sequence[Point]) -> dict[str, float]:
    """Accuracy under parallelism of each method, averaged over the tasks."""
    tasks = list(dict.fromkeys(p.task for p in points))
    methods = list(dict.fromkeys(p.method for p in points))
    totals = dict.fromkeys(methods, 0.0)
    for task in tasks:
        best = max(_percent(p) for p in points if p.task == task)
        for method in methods:
            own = [p for p in points if p.task == task and p.method == method]
            curve = [(p.tokens_per_forward, _percent(p)) for p in own]
            totals[method] += aup(curve, best) / len(tasks)
    return totals


def as_json(points: Sequence[Point]) -> dict[str, Any]:
    """Every point with its derived figures, those over all tasks too, and each method's AUP."""
    return {
        "aup": {name: round(value, 3) for name, value in scores(points).items()},
        "points": [_figures(p) for p in points],
        "pooled": [_figures(p) for p in pooled(points)],
    }


def table(points: Sequence[Point]) -> str:
    """A Markdown table of the figures over all tasks, the methods with the best AUP first."""
    area = scores(points)
    rows = sorted(pooled(points), key=lambda p: (-area[p.method], p.method, p.tokens_per_forward))
    head = "| method | setting | accuracy % (95%) | tokens/forward | positions/token | s | AUP |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- |"]
    named: set[str] = set()
    for p in rows:
        first = p.method not in named
        named.add(p.method)
        name, score = (f"`{p.method}`", f"{area[p.method]:.1f}") if first else ("", "")
        low, high = _interval(p)
        cells = [
            name,
            p.setting,
            f"{_percent(p):.1f} ({low:.1f} to {high:.1f})",
            f"{p.tokens_per_forward:.2f}",
            f"{p.positions_per_token:.0f}",
            f"{p.seconds:.1f}",
            score,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def save_plot(points: Sequence[Point], path: Path) -> None:
    """Accuracy against tokens per forward, a line a method, with the 95% intervals."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise CapabilityError("--plot needs matplotlib: pip install 'dlm-decode[plot]'") from None
    matplotlib.use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(7, 5))
    everything = pooled(points)
    for name in dict.fromkeys(p.method for p in everything):
        own = sorted(
            (p for p in everything if p.method == name), key=lambda p: p.tokens_per_forward
        )
        y = [_percent(p) for p in own]
        ends = [_interval(p) for p in own]
        bars = [
            [v - low for v, (low, _) in zip(y, ends, strict=True)],
            [high - v for v, (_, high) in zip(y, ends, strict=True)],
        ]
        x = [p.tokens_per_forward for p in own]
        axes.errorbar(x, y, yerr=bars, label=name, marker="o", markersize=3, capsize=2, lw=1)
    axes.set(xlabel="tokens per forward", ylabel="accuracy, %")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _percent(point: Point) -> float:
    return 100 * point.correct / point.items


def _interval(point: Point) -> tuple[float, float]:
    found = wilson(point.correct, point.items)
    return 100 * found.low, 100 * found.high


def _figures(point: Point) -> dict[str, Any]:
    low, high = _interval(point)
    derived = {
        "accuracy": _percent(point),
        "low": low,
        "high": high,
        "tokens_per_forward": point.tokens_per_forward,
        "positions_per_token": point.positions_per_token,
    }
    return asdict(point) | {name: round(value, 3) for name, value in derived.items()}
