"""One of two processes that share a model: run as a program, twice, by `test_tensor_parallel`.

The first one also decodes with the whole model, which is the yardstick. Each writes what it
decoded, so that the processes can be compared with one another.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from dlm_decode import api
from dlm_decode.attention import Group, PackedAttention
from dlm_decode.errors import CapacityError, CheckpointError, ParallelError
from dlm_decode.head import HeadPlan, Scored, statistics
from dlm_decode.models.backbone import Backbone
from dlm_decode.ranks import Ranks
from dlm_decode.types import Draw, Request

NEEDS = frozenset({"p2", "top2", "entropy", "filtered"})
CASES: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "llada": (
        ("threshold", {}),
        ("credit", {"temperature": 1.0}),
        ("threshold", {"cache": "dual", "cfg_scale": 0.5}),
        ("entropy", {"cache": "dual", "temperature": 0.7}),
        ("wino", {}),
    ),
    "dream": (
        ("dapd", {}),
        ("credit", {"cache": "dual"}),
        ("margin", {"cache": "prefix", "temperature": 1.0, "cfg_scale": 1.5}),
        ("self_speculative+threshold", {"cache": "dual"}),
    ),
    "llada2": (("threshold", {}), ("entropy", {"cache": "block_causal", "temperature": 1.0})),
    "llada_moe": (("threshold", {"cache": "dual"}),),
    "qwen3_diffusion-blocks": (("threshold", {"cache": "block_causal", "temperature": 1.0}),),
}


def decoded(model: Any, sampler: str, settings: dict[str, Any]) -> list[tuple[int, ...]]:
    """Ids of a ragged batch, of which two rows are in flight at a time."""
    decoder = api.Decoder(model, sampler, seed=3, max_batch_size=2, **settings)
    prompts = ([1, 2, 3], [4, 5, 6, 7, 8, 9], [10])
    requests = [Request(p, gen_length=6, block_length=4, id=str(len(p))) for p in prompts]
    return [g.ids for g in sorted(decoder.run(requests), key=lambda g: g.id)]


def hidden_of(model: Backbone, ids: Tensor) -> Tensor:
    attend = PackedAttention((Group(0, 1, len(ids), own=True),))
    return model.forward(ids, torch.arange(len(ids)), attend)


@torch.inference_mode()
def differences(part: Backbone, whole: Backbone) -> dict[str, float]:
    """How far logits and statistics of the part are from those of the whole, at most.

    Relative to the largest of them, where that is above 1: logits of 20 in fp32 are not closer.
    """
    assert part.share is not None
    info, own = whole.info, part.share.columns
    ids = torch.arange(11) % info.vocab_size
    ours, theirs = hidden_of(part, ids), hidden_of(whole, ids)
    count = torch.arange(len(ids))
    probe = torch.tensor([[0, 30, info.vocab_size - 1]]).expand(len(ids), -1)
    scored = Scored(count * 0x123456789, count + 5, count % 3, probe=probe)
    plan = HeadPlan(info.vocab_size, NEEDS, Draw(0.7), info.mask_id, info.end_ids)
    share = part.share
    found = statistics(lambda a, b: part.logits(ours, a, b), scored, plan, share)
    expected = statistics(lambda a, b: whole.logits(theirs, a, b), scored, plan)
    assert found.keys() == expected.keys() and {"top2", "sampled", "lse", "q_entropy"} < set(found)
    pairs = {name: (value, expected[name]) for name, value in found.items()}
    mine = part.logits(ours, own.start, own.stop)
    pairs["logits"] = mine, whole.logits(theirs, own.start, own.stop)
    pairs["embedding"] = part.embedding(ids), whole.embedding(ids)
    for name in ("top1", "top2", "sampled"):
        assert torch.equal(*pairs[name]), name
    return {name: _distance(a, b) for name, (a, b) in pairs.items()}


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.abs().max().clamp(min=1))


def check_model(name: str, path: Path) -> list[Any]:
    """A model shared by both processes gives what the whole one gives; returns its tokens."""
    part, whole = api.load(path, tensor_parallel=True), api.load(path)
    assert isinstance(part.model, Backbone) and isinstance(whole.model, Backbone)
    assert part.model.share is not None
    sizes = [sum(view.nbytes for view in m.model.weights().values()) for m in (part, whole)]
    assert sizes[0] < 0.65 * sizes[1], sizes
    assert part.model.info.kv_heads * 2 == whole.model.info.kv_heads
    off = differences(part.model, whole.model)
    assert max(off.values()) < 1e-5, off
    ids = torch.arange(9)
    with patch.object(Ranks, "total", lambda self, x: x):
        assert _distance(hidden_of(part.model, ids), hidden_of(whole.model, ids)) > 1e-2
    results = [decoded(part, sampler, settings) for sampler, settings in CASES[name]]
    if part.model.share.ranks.rank == 0:
        expected = [decoded(whole, sampler, settings) for sampler, settings in CASES[name]]
        assert results == expected, (name, results, expected)
    return results


def check_half_precision(path: Path) -> list[Any]:
    """In bfloat16 both processes still agree with each other, as the test compares."""
    part = api.load(path, tensor_parallel=True, dtype="bfloat16")
    return decoded(part, "entropy", {"cache": "dual", "temperature": 1.0})


def check_shared_failure(path: Path, rank: int) -> None:
    """What stops one process from loading, or from starting a run, is told by both."""
    try:
        api.load(path / ("nowhere" if rank else "."), tensor_parallel=True)
    except CheckpointError as error:
        assert "nowhere" in str(error)
    else:
        raise AssertionError("the failure of the other process went unnoticed")
    full = CapacityError("no room for K/V here")
    part = api.load(path, tensor_parallel=True)
    with patch("dlm_decode.storage.require_bytes", side_effect=full if rank else None):
        try:
            decoded(part, "threshold", {"cache": "dual"})
        except CapacityError as error:
            assert str(error) == str(full)
        else:
            raise AssertionError("the other process's want of memory went unnoticed")


def check_lost_process(path: Path, rank: int) -> None:
    """A process that ends in the middle of a run ends the other's wait."""
    part = api.load(path, tensor_parallel=True)
    frames = api.Decoder(part).stream([[1, 2, 3]], gen_length=32, block_length=32)
    next(frames)
    if rank == 1:
        os._exit(7)
    try:
        for _ in frames:
            pass
    except ParallelError as error:
        assert "process 0 of 2 lost the others" in str(error)
    else:
        raise AssertionError("the other process was not missed")


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    results = {name: check_model(name, folder / name) for name in CASES}
    results["half"] = check_half_precision(folder / "llada")
    check_shared_failure(folder / "llada", rank)
    assert dist.get_world_size() == 2
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    check_lost_process(folder / "llada", rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
