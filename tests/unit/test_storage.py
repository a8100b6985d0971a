"""Room in the K/V store: who is let in, what prompts share, and in which dtype K/V are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlm_decode.api import Decoder, load
from dlm_decode.audit import audit_cache
from dlm_decode.cli import main
from dlm_decode.errors import CapabilityError, CapacityError, OptionError
from dlm_decode.kv import page_bytes
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.loading import bundled_model_path, save_model
from dlm_decode.models.toy import random_llada, random_sdar
from dlm_decode.rows import make_row
from dlm_decode.speculation import with_sampler
from dlm_decode.storage import PAGE_LENGTH, Storage
from dlm_decode.tasks import FAMILIES, held_out
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


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_shared_prompts_are_exact_under_block_causal_attention(batch: int) -> None:
    """Rows begin as another one did: equal tokens, for fewer positions, whatever rows are let in at
    once; rows that differ early, or in their block length, share nothing."""
    plain = decode(SDAR, "block_causal", ALIKE, batch=batch)
    roomy = Storage(share_prompts=True, max_bytes=10**6)
    shared = decode(SDAR, "block_causal", ALIKE, batch=batch, storage=roomy)
    assert [r.canvas for r in shared] == [r.canvas for r in plain]
    saved = [
        a.trace.computed_positions - b.trace.computed_positions
        for a, b in zip(plain, shared, strict=True)
    ]
    assert saved == [0, 64, 0, 32, 0]


def test_a_row_waits_one_turn_for_what_another_one_is_about_to_store() -> None:
    """Let in together, rows of one prompt compute it once; without sharing none waits."""
    requests = [replace(ALIKE[0], id=f"{i}", stop_at_eos=False) for i in range(4)]
    roomy = Storage(share_prompts=True, max_bytes=10**6)
    turns = []
    for storage in (Storage(), roomy):
        decoder = Decoder(SDAR, "llada", "block_causal", max_batch_size=4, storage=storage)
        engine = decoder.engine
        rows = [make_row(r, SDAR.info, decoder.parts.schedule, 0) for r in requests]
        seen = [row.request.id for row, _ in engine.run(rows)]
        turns.append([seen.index(r.id) for r in requests])
    assert turns == [[0, 1, 2, 3], [0, 2, 3, 4]]


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
    size = page_bytes(SDAR.info, PAGE_LENGTH, torch.float64)
    plain = decode(SDAR, "block_causal", ALIKE, batch=4)
    tight = decode(SDAR, "block_causal", ALIKE, batch=4, storage=Storage(max_bytes=4 * size))
    assert [r.canvas for r in tight] == [r.canvas for r in plain]
    shared = Storage(max_bytes=4 * size, share_prompts=True)
    both = decode(SDAR, "block_causal", ALIKE, batch=4, storage=shared)
    assert [r.canvas for r in both] == [r.canvas for r in plain]


def test_a_row_that_could_never_fit_is_refused_with_the_numbers() -> None:
    size = page_bytes(SDAR.info, PAGE_LENGTH, torch.float64)
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


def test_the_command_line_says_what_the_cache_stores(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", "--prompt", "1+1=", "--gen-length", "16", "--cache", "dual"]
    shown = []
    for kept in ([], ["--kv-dtype", "int8"]):
        assert main([*given, *kept, "--trace"]) == 0
        steps = json.loads(capsys.readouterr().out)["steps"]
        shown.append([sure for step in steps for sure in step["confidence"]])
    assert shown[0] != shown[1], "the K/V were rounded"


def test_a_limit_may_be_any_memorys_size() -> None:
    """Bytes are counted on the host, so that 32 bits bound tensors' numbers, not these."""
    assert Storage(max_bytes=2**40).max_bytes == 2**40
    with pytest.raises(OptionError, match="max_bytes must be"):
        Storage(max_bytes=2**63)


def test_the_command_line_shares_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer positions for the same texts; refused where it would change them unasked."""
    save_model(SDAR, tmp_path)
    rows = [{"prompt_ids": r.prompt_ids, "gen_length": r.gen_length} for r in ALIKE[:3]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["generate", "--input", str(tmp_path / "rows.jsonl"), "--batch-size", "1"]
    texts, positions = [], []
    for more in ([], ["--share-prompts", "exact", "--kv-mib", "81920"]):
        out = tmp_path / f"out{len(more)}.jsonl"
        model = ["--model", str(tmp_path), "--cache", "block_causal", "--output", str(out)]
        assert main([*given, *model, *more]) == 0
        found = [json.loads(line) for line in out.read_text().splitlines()]
        texts.append([row["ids"] for row in found])
        positions.append(sum(row["computed_positions"] for row in found))
    assert texts[0] == texts[1] and positions[1] < positions[0]
    capsys.readouterr()
    assert main([*given, "--cache", "dual", "--share-prompts", "exact"]) == 2
    assert "frozen" in capsys.readouterr().err


@pytest.mark.skipif(not bundled_model_path().is_dir(), reason="the bundled model is not there")
def test_int8_holds_its_accuracy_in_the_audit() -> None:
    """On the bundled model, beside the cache's own error with K/V as they are: commits that differ
    from a full recompute by one in a hundred at most, mean logit error by 5%."""
    loaded = load()
    items = [item for name in FAMILIES for item in held_out(name, 2, split="validation")]
    reports, texts = [], []
    for dtype in ("model", "int8"):
        decoder = Decoder(loaded, "threshold", "dual", storage=Storage(dtype=dtype))
        requests = [decoder.request(i.prompt, chat=True, gen_length=64, id=i.id) for i in items]
        reports.append(audit_cache(decoder, requests).as_dict())
        texts.append([r.text for r in decoder.generate(requests)])
    plain, ours = reports
    assert abs(ours["commits_differ"] - plain["commits_differ"]) <= 0.01 * plain["commits"]
    assert ours["mean_logit_error"] == pytest.approx(plain["mean_logit_error"], rel=0.05)
    assert ours["logit_error"] != plain["logit_error"], "the K/V were rounded"
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= len(items) - 1


def test_a_decoder_with_another_sampler_keeps_its_storage() -> None:
    """`audit --lossless` compares two runs that store K/V as was asked for."""
    decoder = Decoder(LLADA, "llada", "dual", storage=Storage(dtype="int8"))
    other = with_sampler(decoder, decoder.parts.sampler)
    assert other.engine.storage == decoder.engine.storage
