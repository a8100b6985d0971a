"""What the CPU at hand can do, and what follows for threads and dtypes. Nothing is changed here."""

from __future__ import annotations

import os
from typing import Any

import torch

from dlm_decode.errors import OptionError


def cpu_capabilities() -> dict[str, Any]:
    """Instruction sets and core counts by torch's names; empty where torch is too old to say."""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return found


def cpu_has_bf16(capabilities: dict[str, Any] | None = None) -> bool:
    """Whether bfloat16 is multiplied in hardware; without that it is slower than float32."""
    known = cpu_capabilities() if capabilities is None else capabilities
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))


def automatic_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that "auto" stands for; None is the checkpoint's own, as everywhere but on CPUs."""
    if device.type != "cpu":
        return None
    return torch.bfloat16 if cpu_has_bf16() else torch.float32


def named_device(device: str | torch.device) -> torch.device:
    """The device of a name, whether this machine has it or not; raises `OptionError` for no name of
    one."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(_unusable(device, error)) from None


def usable_device(device: str | torch.device) -> torch.device:
    """The device of a name; raises `OptionError` for one that can't be used here."""
    found = named_device(device)
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(_unusable(device, error)) from None
    return found


def _unusable(device: str | torch.device, error: Exception) -> str:
    first = str(error).split("\n", 1)[0]
    return f"device {device!r} cannot be used: {first}"


def cpu_report() -> dict[str, Any]:
    """Cores, threads and dtypes of the CPU, for people; `advice` where something is amiss."""
    cores = cpu_capabilities().get("num_physical_cores") or os.cpu_count() or 1
    threads = torch.get_num_threads()
    return {
        "cores": cores,
        "threads": threads,
        "bf16_in_hardware": cpu_has_bf16(),
        "dtype_auto": str(automatic_dtype(torch.device("cpu"))).removeprefix("torch."),
        "advice": thread_advice(threads, cores),
    }


def thread_advice(threads: int, cores: int) -> str:
    """What to change about the number of threads, if anything."""
    if threads > cores:
        return f"{threads} threads share {cores} cores: give --threads {cores}"
    if threads < cores:
        return f"{cores - threads} of {cores} cores idle: --threads {cores} if nothing else runs"
    return "none"
