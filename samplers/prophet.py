"""Fill everything once the answer is sure: Prophet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dlm_decode.errors import OptionError
from dlm_decode.exits import EarlyExit
from dlm_decode.options import option
from dlm_decode.samplers import SAMPLERS, in_window
from dlm_decode.types import Canvas


@SAMPLERS.register("prophet")
@dataclass(frozen=True)
class Prophet(EarlyExit):
    """Fill all masks as soon as the mean margin over the answer reaches a staged threshold.

    "Diffusion Language Models Know the Answer Before Decoding", arXiv:2508.19982: the threshold is
    7.5, 5.0 and 2.5 nats before progress 0.33, before 0.67 and after; see `EarlyExit` for margin
    and progress. The published code averages over the answer's decided positions too, whose margins
    are large (`average=all`), and knows a prompted answer slot only (`region=span`, 5 positions).
    Derived: averaging over masks, and the other regions.
    """

    paper: ClassVar[str] = "Prophet, arXiv:2508.19982"

    early: float = option(7.5, "threshold in nats at first", low=0.0)
    mid: float = option(5.0, "threshold in nats from progress `mid_from`", low=0.0)
    late: float = option(2.5, "threshold in nats from progress `late_from`", low=0.0)
    mid_from: float = option(0.33, "progress at which `mid` begins", low=0.0, high=1.0)
    late_from: float = option(0.67, "progress at which `late` begins", low=0.0, high=1.0)
    answer: str = option(
        "all",
        "where the answer is: anywhere, in the block, at `answer_start`, or behind `marker`",
        choices=("all", "block", "span", "marker"),
    )
    answer_start: int = option(
        0,
        "positions before the answer, from the generated region's start or the marker's end",
        low=0,
    )
    answer_length: int = option(5, "positions of the answer", low=1)
    marker: str | None = option(
        None, "ids that the answer follows, e.g. '201 202'; the last place where they are decided"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.answer == "marker") != (self.marker is not None):
            raise OptionError(
                "Prophet.marker must be given with answer=marker and only then, "
                f"got marker={self.marker!r} and answer={self.answer!r}"
            )
        marker_ids(self.marker)

    def region(self, canvas: Canvas) -> Tensor:
        if self.answer == "all":
            return torch.ones_like(canvas.masked)
        if self.answer == "block":
            return in_window(canvas)
        offset = canvas.positions - canvas.positions[:, :1]
        start = torch.full_like(canvas.start, self.answer_start)
        if self.answer == "marker":
            end = marker_end(canvas, marker_ids(self.marker))
            start = torch.where(end < 0, offset.shape[-1], end + self.answer_start)
        start = start[:, None]
        return (offset >= start) & (offset < start + self.answer_length)

    def tau(self, progress: Tensor) -> Tensor:
        tau = torch.full_like(progress, self.early)
        tau = tau.masked_fill(progress >= self.mid_from, self.mid)
        return tau.masked_fill(progress >= self.late_from, self.late)


def marker_ids(text: str | None) -> tuple[int, ...]:
    """Ids of a text such as "201 202" or "201,202"."""
    try:
        ids = tuple(int(word) for word in str(text or "0").replace(",", " ").split())
    except ValueError:
        ids = ()
    if not ids or min(ids) < 0:
        raise OptionError(f"Prophet.marker must be token ids such as '201 202', got {text!r}")
    return ids


def marker_end(canvas: Canvas, ids: tuple[int, ...]) -> Tensor:
    """Offset `(B,)` behind the last decided occurrence of `ids` in the window, -1 if none."""
    width = canvas.tokens.shape[-1]
    place = torch.arange(width, device=canvas.tokens.device)
    end = (canvas.editable * (place + 1)).amax(-1, keepdim=True)
    known = ~canvas.masked & (place < end)  # a frozen marker counts, padding does not
    found = torch.ones_like(canvas.masked)
    for j, token in enumerate(ids):
        here = known & (canvas.tokens == token)
        found = found & torch.roll(here, -j, dims=-1) & (place + j < width)
    return (found * (place + len(ids) + 1)).amax(-1) - 1
