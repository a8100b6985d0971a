"""One definition of every figure of a run.

- tokens: ids before the first end id, as the engine counts them; never padding, never the prompt.
- forwards: turns in which the request took part, by kind ("full", "refresh", "window").
- computed positions: query positions over all forwards (rows x positions), guidance lanes and
  branches included: the cost that caches save.
- TPF: sum of tokens / sum of forwards over all requests (not a mean of ratios).
- PPT: sum of computed positions / sum of tokens.
- TPS: sum of tokens / decoding seconds. Decoding seconds run only while the decoder works; loading,
  warm-up (one discarded request), tokenising, scoring and writing are outside. Every turn of the
  engine ends with a device read-back, so the clock is synchronised.
- TTFB: seconds from a request's admission until its first block has no masks.
- peak memory: the device's allocator peak, or the process's peak resident size on the CPU.
- accuracy: share of problems right, with a 95% Wilson interval; TPF and TPS get 95% bootstrap
  intervals over problems (of TPS: at these decoding seconds per request).

TPS and TTFB of a batch are those of the batch: compare speeds at batch size 1 on one quiet device.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dlm_decode.eval.statistics import Interval, bootstrap, wilson

Row = Mapping[str, Any]
"""A row of requests.jsonl (see `results`)."""


def summarise(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """All figures of a run's scored rows; intervals as `{"value", "low", "high"}`."""
    if not rows:
        raise ValueError("a run without a finished request has no figures")
    scores = {name: asdict(accuracy(rows, name)) for name in names}
    return {"requests": len(rows), "accuracy": scores, **costs(rows), **speeds(rows)}


def accuracy(rows: Sequence[Row], name: str) -> Interval:
    return wilson(sum(bool(row["scores"][name]) for row in rows), len(rows))


def costs(rows: Sequence[Row]) -> dict[str, Any]:
    """What was computed; these figures do not depend on the machine."""
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds.update(row["forwards_by_kind"])
    tokens, positions = total(rows, "tokens"), total(rows, "computed_positions")
    return {
        "tokens": tokens,
        "forwards": total(rows, "forwards"),
        "forwards_by_kind": dict(sorted(kinds.items())),
        "computed_positions": positions,
        "tpf": asdict(bootstrap(rows, tokens_per_forward)),
        "ppt": positions / max(tokens, 1),
        "finish_reasons": dict(sorted(Counter(row["finish_reason"] for row in rows).items())),
    }


def speeds(rows: Sequence[Row]) -> dict[str, Any]:
    """What it took on this machine."""
    times = [row["ttfb_s"] for row in rows if row.get("ttfb_s") is not None]
    return {
        "decode_s": round(total(rows, "decode_s"), 6),
        "tps": asdict(bootstrap(rows, tokens_per_second)),
        "ttfb_s": statistics.median(times) if times else None,
    }


def tokens_per_forward(rows: Sequence[Row]) -> float:
    return total(rows, "tokens") / max(total(rows, "forwards"), 1)


def tokens_per_second(rows: Sequence[Row]) -> float:
    return total(rows, "tokens") / max(total(rows, "decode_s"), 1e-9)


def total(rows: Iterable[Row], key: str) -> Any:
    return sum(row[key] for row in rows)


def peak_bytes(device: str) -> int:
    """Peak memory of the device, of several together, or of this process on the CPU."""
    if device.startswith("cuda"):
        import torch

        return sum(int(torch.cuda.max_memory_allocated(name)) for name in device.split(","))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
