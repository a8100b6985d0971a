"""Our forwards against the published reference code, on tiny models in the published layouts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlm_decode.models.backbone import Backbone
from dlm_decode.models.loading import load_model
from tests.support import attention, full_attend, row_positions

GOLDEN = Path(
    os.environ.get("DLM_GOLDEN", Path(__file__).resolve().parents[3] / "shared" / "golden")
)
TOLERANCE = 5e-4
MODELS = ("llada-tiny-a", "dream-tiny-a")
CASES = [
    (model, case)
    for model in MODELS
    for case in ("plain", "prompt_plus_masks", "batch_random_masks", "left_padded", "right_padded")
    if (model, case) != ("dream-tiny-a", "right_padded")
]

pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"no golden fixtures in {GOLDEN} (set DLM_GOLDEN)"
)


def load(name: str, dtype: torch.dtype = torch.float32) -> tuple[Backbone, Mapping[str, Tensor]]:
    model = load_model(GOLDEN / name, dtype=dtype).model
    assert isinstance(model, Backbone)
    return model, load_file(GOLDEN / name / "forward.safetensors")


def real_tokens(tensors: Mapping[str, Tensor], case: str) -> Tensor:
    """Which entries of a batch `(B, L)` are no padding."""
    ids = tensors[f"{case}.input_ids"]
    return tensors.get(f"{case}.attention_mask", torch.ones_like(ids)).bool()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "case"), CASES)
def test_packed_rows_without_pads_give_the_reference_logits(
    name: str, case: str, dtype: torch.dtype
) -> None:
    model, tensors = load(name, dtype)
    real = real_tokens(tensors, case)
    lengths = real.sum(1).tolist()
    hidden = model.forward(
        tensors[f"{case}.input_ids"][real], row_positions(lengths), full_attend(lengths)
    )
    assert hidden.dtype == dtype
    for ours, theirs in ((hidden, "final_hidden"), (model.logits(hidden), "logits")):
        expected = tensors[f"{case}.{theirs}"][real]
        torch.testing.assert_close(ours.float(), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_every_block_gets_the_reference_input(name: str) -> None:
    model, tensors = load(name)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = tensors["prompt_plus_masks.input_ids"][0]
    seen.append(model.forward(ids, torch.arange(len(ids)), full_attend([len(ids)])))
    for layer, hidden in enumerate(seen):
        expected = tensors[f"prompt_plus_masks.hidden.{layer}"][0]
        torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=0)


class StoredRow:
    """K and V of one row at absolute positions; the queries' are overwritten, all are visible."""

    def __init__(self) -> None:
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.positions = torch.empty(0)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer not in self.stored:
            self.stored[layer] = (k.clone(), v.clone())
        for stored, fresh in zip(self.stored[layer], (k, v), strict=True):
            stored[self.positions] = fresh
        return attention(q, *self.stored[layer])


@pytest.mark.parametrize("what", ["prefix", "dual"])
@pytest.mark.parametrize("name", MODELS)
def test_stored_keys_and_values_give_the_cached_reference_logits(name: str, what: str) -> None:
    model, tensors = load(name)
    warm, second = (tensors[f"cached.{kind}_input_ids"][0] for kind in ("warm", "second"))
    attend = StoredRow()
    attend.positions = torch.arange(len(warm))
    model.forward(warm, attend.positions, attend)
    attend.positions = torch.arange(12, 20 if what == "dual" else len(warm))
    hidden = model.forward(second[attend.positions], attend.positions, attend)
    expected = tensors[f"cached.{what}_logits"][0]
    torch.testing.assert_close(model.logits(hidden), expected, atol=TOLERANCE, rtol=0)
