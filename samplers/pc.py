"""Confidence discounted by position and by how common the token is: PC-Sampler."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.errors import OptionError
from dlm_decode.options import option
from dlm_decode.quotas import QuotaSampler
from dlm_decode.samplers import SAMPLERS
from dlm_decode.scores import LAWS, confidence
from dlm_decode.types import Canvas, Decision, Output


@SAMPLERS.register("pc")
@dataclass(frozen=True)
class Pc(QuotaSampler):
    """Commit confident, informative tokens first, with a preference for the block's beginning.

    "PC-Sampler: Position-Aware Calibration of Decoding Bias in Masked Diffusion Models",
    arXiv:2508.13021: score_i = exp(-lambda (i - start)) min(-p_i(x_i) ln p_D(x_i),
    alpha), where p_D are token frequencies of a text collection and start is the block's. Without
    frequencies the second factor is p_i(x_i). A fixed quota a step as in `llada`.
    """

    paper: ClassVar[str] = "PC-Sampler, arXiv:2508.13021"

    lambda_: float = option(0.25, "decay of the preference per position", low=0.0)
    alpha: float = option(10.0, "cap of the calibrated confidence", above=0.0)
    frequencies: str | None = option(
        None, "JSON file of token id: count or frequency (none: no calibration by token)"
    )
    law: str = option(
        "propose",
        "at temperature > 0: draw everywhere and rank the draws, or rank positions, then draw",
        choices=LAWS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frequencies is not None:
            read_counts(self.frequencies)

    def init(self, canvas: Canvas) -> Any:
        state = super().init(canvas)
        if self.frequencies is None:
            return state
        row = _surprisals_on(canvas.tokens.device, self.frequencies, canvas.vocab_size)
        return state | {"surprisal": row.expand(canvas.tokens.shape[0], -1)}

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        offset = (canvas.positions - canvas.start[:, None]).double()
        content = self._content(output, state).double()
        # In logarithms, so that far positions keep their order when exp(-lambda i) underflows.
        score = content.clamp(min=0).log() - self.lambda_ * offset
        return self.take(canvas, output, state, score), state

    def _content(self, output: Output, state: Any) -> Tensor:
        """The calibrated confidence `(B, W)`."""
        p = confidence(output, law=self.law)
        if self.frequencies is None:
            return p
        token = output.candidate if self.law == "propose" else output.top1
        surprisal = state["surprisal"].gather(-1, token.clamp(0, state["surprisal"].shape[-1] - 1))
        return (p * surprisal).clamp(max=self.alpha)


@lru_cache(maxsize=8)
def surprisals(path: str, vocab_size: int) -> tuple[float, ...]:
    """-ln(p_D + 1e-9) of each token id; an id that is not listed is as rare as the rarest one."""
    counts = read_counts(path)
    if max(counts) >= vocab_size:
        raise OptionError(
            f"frequencies must have ids below the vocabulary's {vocab_size}, "
            f"got {max(counts)} in {path}: use those of the model's tokenizer"
        )
    total, rarest = sum(counts.values()), min(counts.values())
    ids = range(vocab_size)
    return tuple(-math.log(counts.get(v, rarest) / total + 1e-9) for v in ids)


@cache
def _surprisals_on(device: torch.device, path: str, vocab_size: int) -> Tensor:
    """The surprisals `(V,)`, sent to the device once: a turn sends no numbers of its own."""
    return torch.tensor(surprisals(path, vocab_size), dtype=torch.float32, device=device)


@lru_cache(maxsize=8)
def read_counts(path: str) -> dict[int, float]:
    """Positive counts or frequencies by token id; PC-Sampler's own file layout is read too."""
    try:
        content = json.loads(Path(path).read_text())
        content = content.get("p_baseline_dict", content)
        counts = {int(v): float(n) for v, n in content.items() if n != 0}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise OptionError(
            f"frequencies must be a JSON file of id: count, {path}: {error}"
        ) from None
    if not counts or min(counts) < 0 or not all(0 < n < math.inf for n in counts.values()):
        raise OptionError(f"frequencies must have ids >= 0 and positive counts, got {path}")
    return counts
