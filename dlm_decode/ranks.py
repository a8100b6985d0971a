"""Processes started by torchrun: who this is, meeting the others, and sharing one model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from dlm_decode.errors import CapabilityError, DlmDecodeError, ParallelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")

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


@dataclass(frozen=True)
class Ranks:
    """The processes of torch's default group, which share one model; this is `rank` of `size`.

    All of them call every method, in the same order. Where one has gone, `ParallelError`.
    """

    rank: int
    size: int

    def total(self, x: Tensor) -> Tensor:
        """The sum of all processes' `x`, put into `x`; the same bits everywhere."""
        import torch.distributed as dist

        with self._at_work():
            dist.all_reduce(x)
        return x

    def gathered(self, x: Tensor) -> list[Tensor]:
        """All processes' `x`, of one shape, in the order of their ranks."""
        import torch.distributed as dist

        parts = [x.new_empty(x.shape) for _ in range(self.size)]
        with self._at_work():
            dist.all_gather(parts, x.contiguous())
        return parts

    def agreed(self, run: Callable[[], T]) -> T:
        """What `run` returns; where it raises a `DlmDecodeError` in any process, all raise that.

        So nobody waits for a process that gave up. `run` must not call these methods itself.
        """
        import torch.distributed as dist

        results, failure = [], None
        try:
            results.append(run())
        except DlmDecodeError as error:
            failure = error
        failures: list[DlmDecodeError | None] = [None] * self.size
        with self._at_work():
            dist.all_gather_object(failures, failure)
        for found in (failure, *failures):
            if found is not None:
                raise found
        return results[0]

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
            raise ParallelError(
                f"process {self.rank} of {self.size} lost the others, whose own messages say why: "
                f"{reason}"
            ) from error


@dataclass(frozen=True)
class Share:
    """One process's share of a model's vocabulary: the ids `columns` are those of its LM head."""

    ranks: Ranks
    columns: range


def model_ranks(device: torch.device) -> Ranks:
    """The processes of torch's process group, which is begun where torchrun started this one.

    Raises `CapabilityError` where there is no group to join.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not (dist.is_initialized() or "RANK" in os.environ):
        raise CapabilityError(
            "tensor_parallel shares a model among processes, and this one is alone: start them "
            "with torchrun --nproc-per-node N, or begin torch's process group in each"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave_group() -> None:
    """End torch's process group, if there is one; each process for itself."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
