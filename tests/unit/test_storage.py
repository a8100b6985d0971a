"""Room in the K/V store: who is let in, what prompts share, and in which dtype K/V are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dlm_decode.api import Decoder
from dlm_decode.errors import CapabilityError, CapacityError
from dlm_decode.kv import page_bytes
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.toy import random_llada, random_sdar
from dlm_decode.storage import PAGE_LENGTH, Storage
from dlm_decode.types import Generation, Request

SIZES: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 1, "vocab": 32}
SDAR = random_sdar(3, dtype=torch.float64, **SIZES)
LLADA = random_llada(3, dtype=torch.float64, **SIZES)
PROMPT = [int(i) for i in np.random.default_rng(0).integers(0, 26, 70)]
ALIKE = [
    Request(PROMPT, gen_length=4, id="a"),
    Request([*PROMPT[:66], 3, 5], gen_length=3, id="b"),
    Request([9, *PROMPT[1:]], gen_length=3, id="c"),
    Request(PROMPT[:40], gen_length=3, id="d"),
    Request(PROMPT, gen_length=4, block_length=3, id="e"),
]


def decode(model: Backbone, cache: str, requests: list[Request], **more: Any) -> list[Generation]:
    batch = more.pop("batch", 1)
    decoder = Decoder(model, "llada", cache, max_batch_size=batch, debug=True, **more)
    return decoder.generate(requests)


@pytest.mark.parametrize("batch", [1, 2])
def test_shared_prompts_are_exact_under_block_causal_attention(batch: int) -> None:
    """Rows begin as another one did: equal tokens, for fewer positions; rows that differ early, or
    in their block length, share nothing."""
    plain = decode(SDAR, "block_causal", ALIKE, batch=batch)
    roomy = Storage(share_prompts=True, max_bytes=10**6)
    shared = decode(SDAR, "block_causal", ALIKE, batch=batch, storage=roomy)
    assert [r.canvas for r in shared] == [r.canvas for r in plain]
    saved = [
        a.trace.computed_positions - b.trace.computed_positions
        for a, b in zip(plain, shared, strict=True)
    ]
    if batch == 1:
        assert saved == [0, 64, 0, 32, 0]
    else:
        assert saved[0] == saved[1] == saved[2] == saved[4] == 0 and saved[3] == 32


def test_under_full_attention_sharing_is_refused_with_the_reason() -> None:
    with pytest.raises(CapabilityError, match="depend on what follows it"):
        decode(LLADA, "dual", ALIKE, storage=Storage(share_prompts=True))
    storage = Storage(share_prompts=True, frozen_prompt=True)
    with pytest.raises(CapabilityError, match="refresh_region=generation"):
        decode(LLADA, "dual", ALIKE, storage=storage)
    with pytest.raises(CapabilityError, match="guidance"):
        decode(SDAR, "block_causal", ALIKE, storage=storage, cfg_scale=1.0)
    with pytest.raises(CapabilityError, match="stores no K/V"):
        decode(SDAR, "none", ALIKE, storage=storage)


def test_a_frozen_prompt_is_shared_when_asked_for() -> None:
    """Only a prompt that is the same as a whole: its K/V depend on all of it."""
    storage = Storage(share_prompts=True, frozen_prompt=True)
    options = {"refresh_region": "generation"}
    shared = decode(LLADA, "dual", ALIKE, options=options, storage=storage)
    plain = decode(LLADA, "dual", ALIKE, options=options)
    kinds = [r.trace.forwards_by_kind for r in shared]
    assert [k.get("refresh", 0) for k in kinds] == [1, 1, 1, 1, 1]
    twice = decode(LLADA, "dual", [ALIKE[0], ALIKE[0]], options=options, storage=storage)
    assert twice[1].trace.forwards_by_kind.get("refresh", 0) == 0
    saved = twice[0].trace.computed_positions - twice[1].trace.computed_positions
    assert saved == 64 and plain[0].canvas == shared[0].canvas


def test_rows_wait_for_free_pages_and_decode_the_same() -> None:
    size = page_bytes(SDAR.info, PAGE_LENGTH, 8)
    plain = decode(SDAR, "block_causal", ALIKE, batch=4)
    tight = decode(SDAR, "block_causal", ALIKE, batch=4, storage=Storage(max_bytes=4 * size))
    assert [r.canvas for r in tight] == [r.canvas for r in plain]
    shared = Storage(max_bytes=4 * size, share_prompts=True)
    both = decode(SDAR, "block_causal", ALIKE, batch=4, storage=shared)
    assert [r.canvas for r in both] == [r.canvas for r in plain]


def test_a_row_that_could_never_fit_is_refused_with_the_numbers() -> None:
    size = page_bytes(SDAR.info, PAGE_LENGTH, 8)
    with pytest.raises(CapacityError, match=r"needs 3 pages .* leaves 2"):
        decode(SDAR, "block_causal", ALIKE, storage=Storage(max_bytes=2 * size))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_in_half_precision_logits_are_close(dtype: str) -> None:
    """Attention still computes in the model's dtype; what differs is the rounding of K and V."""
    plain = decode(LLADA, "dual", ALIKE[:2])
    half = decode(LLADA, "dual", ALIKE[:2], storage=Storage(dtype=dtype))
    for ours, theirs in zip(half, plain, strict=True):
        first, second = ours.trace.steps[0], theirs.trace.steps[0]
        assert first.confidence == pytest.approx(second.confidence, rel=0.2)
        assert ours.trace.forwards_by_kind == theirs.trace.forwards_by_kind
