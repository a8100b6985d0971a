"""Rows of several lengths attended in one call, through torch's FlexAttention.

Scaled dot-product attention takes one call for each group of rows of one shape; here a packed token
names the run of keys that it sees, in the K/V pool or among the packed tokens, so that one call
does for all. That works on the keys as they lie: rows whose pages are scattered or shared, stores
in another dtype than the model's, branches, hooks and watched attention would need copies of the
pool and stay with a call a group.

The environment variable DLM_ATTENTION names what is taken: `sdpa`, the default; `flex`, compiled on
a GPU (a minute in coming) and unfused on a CPU, where it is for comparisons; `auto`: on a GPU
`flex` if it agrees with the other there and is faster, measured once, else `sdpa`. None of it has
been run on a GPU. Letters: T tokens of the call, S keys, H, G, K as in `dlm_decode.models`.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dlm_decode.errors import OptionError
from dlm_decode.models import DiffusionLM, ModelInfo

VARIABLE = "DLM_ATTENTION"
NAMES = ("sdpa", "flex", "auto")

BLOCK = 128
"""Tokens and keys of a block, which the kernel takes or leaves as a whole."""

_RUNS = 10


@dataclass(frozen=True)
class Ragged:
    """Packed tokens `[start, stop)`, each of which sees the keys `[begin, end)`, each `(T,)`.

    Keys are counted in the pool of `keys` places if `stored`, else from `start` on. Of each block
    of tokens `counts (1, 1, T / BLOCK)` are how many blocks of keys it sees anything of, and
    `blocks (1, 1, T / BLOCK, S / BLOCK)` which, in front.
    """

    start: int
    stop: int
    stored: bool
    keys: int
    begin: Tensor
    end: Tensor
    counts: Tensor
    blocks: Tensor


def ragged(
    rows: Sequence[tuple[int, np.ndarray]],
    *,
    start: int,
    stored: bool,
    keys: int,
    send: Callable[[np.ndarray], Tensor],
) -> Ragged:
    """Rows side by side from packed token `start`, as where their keys begin and, for each of their
    tokens, end."""
    ends = np.concatenate([end for _, end in rows])
    begins = np.concatenate([np.full(len(end), begin) for begin, end in rows])
    seen = np.zeros((-(-len(ends) // BLOCK), -(-keys // BLOCK)), dtype=bool)
    first = 0
    for begin, end in rows:
        last = first + len(end)
        seen[first // BLOCK : -(-last // BLOCK), begin // BLOCK : -(-int(end.max()) // BLOCK)] = (
            True
        )
        first = last
    counts = seen.sum(1).astype(np.int32)
    blocks = np.argsort(~seen, axis=1, kind="stable").astype(np.int32)
    sent = [send(x) for x in (begins, ends, counts[None, None], blocks[None, None])]
    return Ragged(start, start + len(ends), stored, keys, *sent)


def attend(part: Ragged, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`q (T, H, K)` over `k` and `v` `(S, G, K)`; returns `(T, H, K)`."""
    from torch.nn.attention.flex_attention import BlockMask

    def sees(row: Tensor, head: Tensor, token: Tensor, key: Tensor) -> Tensor:
        return (key >= part.begin[token]) & (key < part.end[token])

    mask = BlockMask.from_kv_blocks(
        part.counts,
        part.blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(q), part.keys),
        compute_q_blocks=False,
    )
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = _kernel(q.device.type)(queries, keys, values, block_mask=mask, enable_gqa=grouped)
    return out[0].transpose(0, 1)


@cache
def _kernel(kind: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    plain: Any = flex_attention
    return plain if kind == "cpu" else torch.compile(plain, dynamic=True)


def takes_flex(model: DiffusionLM) -> bool:
    """Whether ragged rows of `model` are attended in one call: what DLM_ATTENTION says."""
    name = os.environ.get(VARIABLE) or "sdpa"
    if name not in NAMES:
        raise OptionError(f"{VARIABLE} must be one of {', '.join(NAMES)}, got {name!r}")
    if name != "auto" or model.device.type == "cpu":
        return name == "flex"
    return pays(model.info, model.device, model.dtype)


@dataclass(frozen=True)
class Trial:
    """Random windows over random keys, to compare the two ways; see `trial`."""

    part: Ragged
    spans: tuple[tuple[int, int], ...]
    q: Tensor
    k: Tensor
    v: Tensor

    def together(self) -> Tensor:
        """One call for all rows."""
        return attend(self.part, self.q, self.k, self.v)

    def apart(self) -> Tensor:
        """A call a row."""
        found = []
        windows = self.q.chunk(len(self.spans))
        grouped = self.q.shape[1] != self.k.shape[1]
        for window, (begin, end) in zip(windows, self.spans, strict=True):
            one = window, self.k[begin:end], self.v[begin:end]
            q, k, v = (x.transpose(0, 1)[None] for x in one)
            out = scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)


def trial(
    lengths: Sequence[int],
    window: int,
    info: ModelInfo,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Trial:
    """Rows of `window` tokens over `lengths` of keys, of a model's heads."""
    ends = np.cumsum(lengths).tolist()
    spans = tuple(zip([0, *ends[:-1]], ends, strict=True))
    part = ragged(
        [(begin, np.full(window, end)) for begin, end in spans],
        start=0,
        stored=True,
        keys=ends[-1],
        send=lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device),
    )
    shapes = (part.stop, info.heads), (part.keys, info.kv_heads), (part.keys, info.kv_heads)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, info.head_size, generator=generator) for shape in shapes)
    return Trial(part, spans, *(x.to(device, dtype) for x in (q, k, v)))


@cache
def pays(info: ModelInfo, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one call agrees with a call a row on eight windows of 32, and is faster. Syncs."""
    given = trial([256 * n for n in range(1, 9)], 32, info, device=device, dtype=dtype)
    try:
        close = torch.allclose(given.together(), given.apart(), rtol=0.02, atol=0.02)
        problem = "" if close else "its results differ"
    except Exception as error:  # whatever a compiler or driver raises
        problem = f"{type(error).__name__}: {error}"
    if problem:
        warnings.warn(f"FlexAttention is not used on {device}: {problem}", stacklevel=2)
        return False
    return _seconds(given.together) < _seconds(given.apart)


def _seconds(run: Callable[[], Tensor]) -> float:
    """Seconds of some runs; reading a value at either end waits for the device."""
    run()[0, 0, 0].item()
    began = time.perf_counter()
    for _ in range(_RUNS):
        found = run()
    found[0, 0, 0].item()
    return time.perf_counter() - began
