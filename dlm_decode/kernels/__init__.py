"""What the LM head's statistics are computed with: one small interface, several implementations.

A kernel reads one tile of logits once and returns its statistics; `dlm_decode.head` merges tiles.
`reference` is plain torch. `compiled` is torch.compile over the same formulae, several times faster
on a CPU but a minute or two in coming, so it is taken only when asked for. `triton` is a pair of
Triton kernels for GPUs. The environment variable DLM_KERNELS names one of them; `auto`, the
default, takes `triton` on a GPU where that is installed and agrees with the reference there, else
`reference`. Letters: n scored positions, V vocabulary, S columns of a tile.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.types import Draw

VARIABLE = "DLM_KERNELS"
NAMES = ("auto", "reference", "compiled", "triton")


@dataclass(frozen=True)
class Scored:
    """What identifies the n scored positions: noise keys, positions, commits so far, each `(n,)`.

    `ban_end (n,)` bool, where given, forbids end ids at those positions; `demote_end (n,)` takes
    all confidence from positions whose token would be one, so that they come last. `probe (n, J)`
    are ids whose logits are asked for.
    """

    keys: Tensor
    positions: Tensor
    commits: Tensor
    ban_end: Tensor | None = None
    demote_end: Tensor | None = None
    probe: Tensor | None = None


@dataclass(frozen=True)
class HeadPlan:
    """What to compute: the sampler's needs, the drawing law, and the ids treated specially."""

    vocab_size: int
    needs: frozenset[str]
    draw: Draw
    mask_id: int
    end_ids: tuple[int, ...] = ()
    tile_bytes: int | None = None

    @property
    def tempered(self) -> bool:
        """Whether a second distribution, beside the raw one, is asked for."""
        return "filtered" in self.needs and not self.draw.is_raw

    @property
    def by_rows(self) -> bool:
        """Whether whole rows of logits have to exist at a time."""
        return "logits" in self.needs or self.draw.filters

    @property
    def second(self) -> bool:
        """Whether the second-best logit is asked for."""
        return bool(self.needs & {"p2", "top2"})


@dataclass(frozen=True)
class Law:
    """Statistics `(n,)` of one distribution: best and second logit, their ids, and two sums.

    With x the logits and m the best, `total` is the sum of e^(x - m), `moment` that of
    (x - m) e^(x - m). Of equal logits the smallest id comes first.
    """

    best: Tensor
    id: Tensor
    second: Tensor | None
    total: Tensor
    moment: Tensor | None
    second_id: Tensor | None = None


@dataclass(frozen=True)
class Drawn:
    """The best `(n,)` of logit / T + noise: its value, its id, and that id's raw logit."""

    value: Tensor
    id: Tensor
    logit: Tensor


@dataclass(frozen=True)
class TileStats:
    """What a plan asks for of one tile: the raw law, the tempered one, the draw."""

    raw: Law
    tempered: Law | None = None
    drawn: Drawn | None = None


Kernel = Callable[[Tensor, int, Scored, HeadPlan], TileStats]
"""Statistics of the logits `(n, S)` of the ids from `start` on, in fp32 or wider.

Forbidden ids are at -inf. The kernel may overwrite the logits; it never syncs.
"""


def kernel_for(logits: Tensor) -> Kernel:
    """The kernel for a tile of such logits: what DLM_KERNELS names, or the best that works."""
    name = os.environ.get(VARIABLE) or "auto"
    if name not in NAMES:
        raise OptionError(f"{VARIABLE} must be one of {', '.join(NAMES)}, got {name!r}")
    return _kernel(name, logits.device, logits.dtype)


@cache
def _kernel(name: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    from dlm_decode.kernels.reference import tile_stats

    if name == "compiled":
        from dlm_decode.kernels.compiled import tile_stats as compiled

        return compiled
    if dtype == torch.float64:  # double precision is for comparisons: it is the reference's
        return tile_stats
    if name == "triton":
        return _triton(device)
    if name == "auto" and device.type == "cuda" and find_spec("triton") is not None:
        return checked(_triton(device), device)
    return tile_stats


def _triton(device: torch.device) -> Kernel:
    if find_spec("triton") is None:
        raise CapabilityError(f"{VARIABLE}=triton needs triton: pip install dlm-decode[triton]")
    from dlm_decode.kernels.fused import INTERPRETED, tile_stats

    if device.type != "cuda" and not INTERPRETED:
        raise CapabilityError(
            f"{VARIABLE}=triton needs a GPU, got the device {device}: choose {VARIABLE}=reference, "
            "or set TRITON_INTERPRET=1 to try the kernels on the CPU, slowly"
        )
    return tile_stats


def checked(kernel: Kernel, device: torch.device) -> Kernel:
    """`kernel` if it runs on `device` and gives what the reference does there; else the reference.

    Syncs, once for each device and kind of logits.
    """
    from dlm_decode.kernels.reference import tile_stats

    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(3, 5000, generator=generator)
    logits = logits.round().clamp(max=16).to(device)  # with many that tie for the best
    keys = torch.arange(3, device=device) * 0x1234567890
    needs = frozenset({"p2", "top2", "entropy", "filtered"})
    plan = HeadPlan(5000, needs, Draw(0.7), mask_id=0)
    try:
        found, expected = (
            k(logits.clone(), 0, Scored(keys, keys + 5, keys + 1), plan)
            for k in (kernel, tile_stats)
        )
        problem = "" if _agree(found, expected) else "its results differ"
    except Exception as error:  # whatever a compiler or driver raises
        problem = f"{type(error).__name__}: {error}"
    if problem:
        warnings.warn(
            f"the faster statistics kernel is not used on {device}: {problem}", stacklevel=2
        )
    return tile_stats if problem else kernel


def _agree(a: TileStats, b: TileStats) -> bool:
    return all(
        torch.equal(x, y) if x.dtype == torch.int64 else torch.allclose(x, y, rtol=1e-4, atol=1e-4)
        for x, y in zip(_tensors(a), _tensors(b), strict=True)
    )


def _tensors(stats: TileStats) -> list[Tensor]:
    parts = [part for part in (stats.raw, stats.tempered, stats.drawn) if part is not None]
    return [value for part in parts for value in vars(part).values() if value is not None]
