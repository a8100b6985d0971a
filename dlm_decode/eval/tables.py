"""Figures as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Summary = Mapping[str, Any]
PLAIN = ("fixed", "the model's")
HEAD = (
    "task", "decoder", "n", "score", "accuracy [95%]", "other scores", "TPF [95%]",
    "TPS [95%]", "PPT", "TTFB s",
)  # fmt: skip


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def run_table(summaries: Sequence[Summary]) -> str:
    """One line a run."""
    return markdown(HEAD, [_line(summary) for summary in summaries])


def decoder_label(run: Mapping[str, Any]) -> str:
    """The sampler, and of cache, schedule and drawing what is not the plainest."""
    parts = [run["sampler"] + _options(run["sampler_options"])]
    parts += [f"{run['cache']} cache"] if run["cache"] != "none" else []
    parts += [f"{run['schedule']} schedule"] if run["schedule"] not in PLAIN else []
    parts += [f"T={run['draw']['temperature']:g}"] if run["draw"]["temperature"] else []
    parts += [f"cfg={run['cfg_scale']:g}"] if run["cfg_scale"] else []
    return ", ".join(parts)


def _options(options: Mapping[str, Any]) -> str:
    """The first few numbers of a sampler's options: what usually tells two runs apart."""
    shown = [
        f"{key}={value:g}"
        for key, value in options.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    return f" ({', '.join(shown[:3])})" if shown else ""


def _line(summary: Summary) -> list[str]:
    label, figures = decoder_label(summary["run"]), summary["figures"]
    if figures is None:
        return [summary["task"], label, "0", summary["primary"], *["-"] * (len(HEAD) - 4)]
    accuracy = figures["accuracy"]
    others = [
        f"{name} {percent(interval['value'])}"
        for name, interval in accuracy.items()
        if name != summary["primary"]
    ]
    return [
        summary["task"],
        label,
        str(figures["requests"]),
        summary["primary"],
        percent_interval(accuracy[summary["primary"]]),
        ", ".join(others) or "-",
        number_interval(figures["tpf"]),
        number_interval(figures["tps"], digits=1),
        f"{figures['ppt']:.1f}",
        "-" if figures["ttfb_s"] is None else f"{figures['ttfb_s']:.3f}",
    ]


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def percent_interval(interval: Mapping[str, float]) -> str:
    low, high = 100 * interval["low"], 100 * interval["high"]
    return f"{percent(interval['value'])} [{low:.1f}, {high:.1f}]"


def number_interval(interval: Mapping[str, float], digits: int = 2) -> str:
    value, low, high = (f"{interval[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
