"""The clock by which decoders are compared."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds that this process has spent, if it computes on a CPU; of the wall clock otherwise.

    Other programs on a CPU lengthen what the wall clock says of one far more than what it spends.
    With several threads the seconds of all of them count.
    """
    return time.process_time if device.type == "cpu" else time.perf_counter
