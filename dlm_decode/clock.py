"""The clock by which decoders are compared."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds that this process has spent, if it computes on one thread of a CPU; else the wall
    clock's.

    Other programs on a CPU lengthen what the wall clock says of one far more than what it spends.
    With several threads the seconds of all would count, so that saving none could look like it.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter
