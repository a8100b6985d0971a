"""How much memory there is, asked before it is used."""

from __future__ import annotations

from pathlib import Path

import torch

from dlm_decode.errors import CapacityError

_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`, or None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu" or not _MEMINFO.exists():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def require_bytes(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """Raise `CapacityError` with the numbers when `needed` bytes for `what` are not there."""
    have = available_bytes(device)
    if have is not None and needed > have:
        raise CapacityError(
            f"{what} take {needed:,} bytes ({needed / 2**30:.2f} GiB), but {have:,} bytes "
            f"({have / 2**30:.2f} GiB) are available on {device}: {remedy}"
        )
