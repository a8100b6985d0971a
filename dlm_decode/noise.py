"""Keyed noise: a counter-based function of (request key, position, commits so far, stream, id).

Two runs that reach the same state draw the same numbers, whatever the batch, tile size, device,
cache or speculation did in between. The generator is Philox 4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011) in integer tensor arithmetic. Nothing here syncs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from dlm_decode.types import Canvas

TOKENS = 0
"""Stream of the token draws; samplers take other numbers for their own noise."""
ORDER = 1
"""Stream of random unmasking orders."""
REMASK = 2
"""Stream of which tokens are masked again."""
RENOISE = 3
"""Stream of the random tokens of a canvas without masks."""
DENOISE = 4
"""Stream of the tokens drawn in place of those."""
PROPOSALS = 16
"""First stream of tokens proposed for one position, one stream each."""

_MASK32 = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def request_key(seed: int, ids: Iterable[int], sample: int = 0) -> int:
    """The 63-bit key of a request: its seed, the ids it was given, and which draw it is."""
    digest = hashlib.blake2b(digest_size=8)
    for value in (seed, sample, *ids):
        digest.update(int(value).to_bytes(9, "little", signed=True))
    return int.from_bytes(digest.digest(), "little") >> 1


def uniform(canvas: Canvas, stream: int, counter: Tensor | None = None) -> Tensor:
    """One number in (0, 1) for each window position, fp32 `(B, W)`.

    Another one for each value of `counter (B,)`, as for turns between which nothing is committed.
    """
    zeros = torch.zeros_like(canvas.positions)
    count = zeros if counter is None else zeros + counter[:, None]
    return _unit(position_words(canvas, stream, count)[0])


def gumbel(canvas: Canvas, stream: int) -> Tensor:
    """One standard Gumbel draw for each window position, fp32 `(B, W)`."""
    words = position_words(canvas, stream, torch.zeros_like(canvas.positions))
    return _gumbel(words[0])


def token_gumbel(
    keys: Tensor, positions: Tensor, commits: Tensor, start: int, stop: int, stream: int = TOKENS
) -> Tensor:
    """Gumbel noise of the ids `[start, stop)` for n positions, fp32 `(n, stop - start)`.

    `keys`, `positions` and `commits` are `(n,)`. Any tiling of the vocabulary gives the same noise.
    """
    first, last = start // 4, (stop + 3) // 4
    counters = torch.arange(first, last, device=keys.device)[None, :]
    words = philox(
        keys[:, None],
        counters,
        positions[:, None],
        commits[:, None],
        torch.full_like(counters, stream),
    )
    noise = _gumbel(torch.stack(words, dim=-1)).flatten(1)
    return noise[:, start - 4 * first : stop - 4 * first]


def id_gumbel(canvas: Canvas, ids: Tensor, stream: int = TOKENS) -> Tensor:
    """Gumbel noise of some `ids (B, W, J)`, as `token_gumbel` has it for them."""
    words = philox(
        canvas.keys[:, None, None],
        ids // 4,
        canvas.positions[..., None],
        canvas.commits[:, None, None],
        torch.full_like(ids, stream),
    )
    chosen = torch.stack(words, dim=-1).gather(-1, (ids % 4)[..., None])
    return _gumbel(chosen[..., 0])


def position_words(canvas: Canvas, stream: int, counter: Tensor) -> tuple[Tensor, ...]:
    """Four 32-bit words (as int64) for each window position, each `(B, W)`."""
    return philox(
        canvas.keys[:, None],
        counter,
        canvas.positions,
        canvas.commits[:, None],
        torch.full_like(canvas.positions, stream),
    )


def philox(key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Philox 4x32-10 of four counters under a 64-bit key; int64 tensors holding 32-bit words."""
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    words = tuple(torch.broadcast_tensors(c0 & _MASK32, c1 & _MASK32, c2 & _MASK32, c3 & _MASK32))
    for _ in range(_ROUNDS):
        words = _round(words, k0, k1)
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return words


def _round(words: tuple[Tensor, ...], k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    high0, low0 = _multiply(words[0], _MULTIPLIERS[0])
    high1, low1 = _multiply(words[2], _MULTIPLIERS[1])
    return _mixed(high1, words[1], k0), low1, _mixed(high0, words[3], k1), low0


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High (with bits above that do not count) and low 32 bits of a product, in int64.

    `factor` is at least 2^31, so that with factor - 2^32 in its place nothing overflows.
    """
    product = word * (factor - (1 << 32))
    return (product >> 32).add_(word), product.bitwise_and_(_MASK32)


def _mixed(high: Tensor, word: Tensor, key: Tensor) -> Tensor:
    return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(_MASK32)


def _unit(words: Tensor) -> Tensor:
    """23 high bits to the open interval (0, 1): with 24, fp32 would round the last half up to 1."""
    return ((words >> 9).float() + 0.5) * 2.0**-23


def _gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel in fp32: -log E with E = -log(1 - v), v dense near 0, so the tail is kept."""
    v = (words.float() + 0.5) * 2.0**-32
    v = v.clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))
