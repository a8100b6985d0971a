"""Processes started by torchrun: who this is, and meeting the others."""

from __future__ import annotations

import os
from datetime import timedelta

PATIENCE = timedelta(days=7)
"""A share may take this much longer than another."""


def rank_and_size() -> tuple[int, int]:
    """This process's rank and how many there are, as torchrun tells them; (0, 1) without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def join_group() -> tuple[int, int]:
    """Join torchrun's group, if there is one; returns rank and size.

    Only small objects are exchanged, so the CPU's backend does whatever the devices are.
    """
    rank, size = rank_and_size()
    if size > 1:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)
    return rank, size


def wait_for_all() -> None:
    """Until every process of the group is here."""
    if rank_and_size()[1] > 1:
        import torch.distributed as dist

        dist.barrier()


def local_device(device: str | None) -> str | None:
    """ "cuda" becomes this process's own device; anything else stays."""
    if device == "cuda" and rank_and_size()[1] > 1:
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    return device
