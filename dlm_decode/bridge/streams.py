"""The keyed randomness of the bridge, apart from the engine's.

Letters: n positions, V vocabulary. EMIT noise is a function of (key, absolute position) alone, so
that drafter and verifier share it whatever the draft was. The others are also keyed by the length
of the sequence when the round began: no number is used in two rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlm_decode.noise import token_gumbel

EMIT, TEST, REST, DRAFT = 16, 17, 18, 19
"""Streams: shared emission noise, acceptance tests, residual draws, soft draft draws."""


def gumbel(
    key: int, start: int, count: int, vocab_size: int, *, stream: int = EMIT, round_: int = 0
) -> Tensor:
    """Gumbel noise `(count, V)` of the positions from `start`, fp32, on the CPU."""
    keys = torch.full((count,), key)
    positions = torch.arange(start, start + count)
    rounds = torch.full((count,), round_)
    return token_gumbel(keys, positions, rounds, 0, vocab_size, stream)


def uniform(key: int, start: int, count: int, *, round_: int) -> Tensor:
    """Numbers in (0, 1) `(count,)` for the acceptance tests of one round."""
    noise = gumbel(key, start, count, 1, stream=TEST, round_=round_)[:, 0]
    return torch.exp(-torch.exp(-noise.double()))
