"""A config.json with values of any type and size makes a model or is refused; nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_decode.errors import CheckpointError
from dlm_decode.models import FAMILIES
from dlm_decode.models.loading import load_model, meta_model, save_model
from dlm_decode.models.published import Family, Published
from tests.families import made
from tests.unit.test_loading import word_tokenizer

ODD: tuple[Any, ...] = (None, -1, 1.5, 10**30, math.inf, "x", ["x"], {})
EXTRA = (
    "rope_parameters",
    "rope_scaling",
    "head_dim",
    "mlp_only_layers",
    "partial_rotary_factor",
    "block_size",
)
"""Fields that not every tiny config.json has."""

HOSTED = {
    "masked_lm": ("num_hidden_layers", "vocab_size", "hidden_size", "mask_token_id"),
    "diffusion_gemma": ("text_config", "eos_token_id", "canvas_length"),
}
"""Of families that transformers makes the models of, which are slow: the fields that are tried."""


@pytest.mark.parametrize("family", FAMILIES.names())
def test_odd_values_are_refused_or_harmless(family: str) -> None:
    tiny = cast("type[Family]", FAMILIES.get(family)).tiny
    fields = HOSTED.get(family) or ({*tiny, *EXTRA} - {"model_type"})
    refused = 0
    for field in sorted(fields):
        for value in ODD:
            try:
                model = meta_model(Published({**tiny, field: value}), torch.float32)
            except CheckpointError:
                refused += 1
            else:
                assert 0 < model.info.layers <= 10_000 and 0 < model.info.vocab_size <= 2**24
    assert refused > len(fields)


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("dream", "tie_word_embeddings", "false", "must be true or false, got 'false'"),
        ("dream", "num_hidden_layers", 10_001, "integer up to 10,000, got 10001"),
        ("llada_moe", "num_experts", 10_001, "integer up to 10,000, got 10001"),
        ("dream", "max_position_embeddings", 2**24 + 1, "integer up to 16,777,216"),
        ("dream", "rms_norm_eps", math.inf, "positive number, got inf"),
        ("dream", "rope_parameters", {"full_attention": {}}, "differ between layers"),
        ("dream", "rope_parameters", [], r"rope_type \[\]"),
        ("dream", "mask_token_id", None, "neither it nor the tokenizer names one: add it"),
        ("dream", "mask_token_id", [43, 44], r"must be one id, got \(43, 44\)"),
        ("llada2", "first_k_dense_replace", False, "first_k_dense_replace"),
        ("masked_lm", "num_hidden_layers", 10**30, "at most 10,000"),
        ("diffusion_gemma", "text_config", {"num_experts": 2**20}, "at most 10,000"),
    ],
)
def test_the_field_and_what_it_may_be_are_named(
    name: str, field: str, value: Any, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        made(name, **{field: value})


def test_a_plan_of_too_many_numbers_is_refused() -> None:
    sizes = {"vocab_size": 2**24, "hidden_size": 2**24, "num_experts": 2**13}
    config = {**cast("type[Family]", FAMILIES.get("rnd1")).tiny, **sizes}
    with pytest.raises(CheckpointError, match=r"config\.json: torch makes no model of it"):
        meta_model(Published({**config, "moe_intermediate_size": 2**24}), torch.float32)


def test_a_plan_takes_no_memory_for_positions() -> None:
    """The table of angles of 16 million positions would be of gigabytes."""
    config = {**cast("type[Family]", FAMILIES.get("dream")).tiny, "max_position_embeddings": 2**24}
    assert meta_model(Published(config), torch.float32).info.max_positions == 2**24


def test_an_empty_list_of_ids_counts_as_none() -> None:
    with_ends = {**cast("type[Family]", FAMILIES.get("dream")).tiny, "eos_token_id": []}
    files = Published(with_ends, {"eos_token_id": [41]})
    assert meta_model(files, torch.float32).info.end_ids == (41,)


@pytest.mark.parametrize("value", [["bfloat16"], {}, 16, "bf16", True])
def test_dtypes_that_are_none_are_refused(value: Any, tmp_path: Path) -> None:
    save_model(made("dream"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"torch_dtype": value or "int8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: dtype .* is none of"):
        load_model(tmp_path)


def test_without_a_dtype_most_of_the_stored_numbers_decide(tmp_path: Path) -> None:
    """A single wide tensor, as a router's bias is kept, makes no wide model."""
    save_model(made("llada2", torch.bfloat16), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["torch_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    first = min(tensors)
    tensors[first] = tensors[first].double()
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_model(tmp_path).model.dtype == torch.bfloat16


def test_a_byte_order_mark_before_config_is_no_harm(tmp_path: Path) -> None:
    """Editors put it there, and some checkpoints need an edit."""
    save_model(made("adapted"), tmp_path)
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_model(tmp_path).model.info.shift == 1


@pytest.mark.parametrize("name", ["masked_lm", "adapted"])
def test_a_word_that_reads_none_is_no_special_token(name: str, tmp_path: Path) -> None:
    """A tokenizer without a mask token names none, whatever words it knows."""
    save_model(made(name), tmp_path, word_tokenizer("?", "None"))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["mask_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="nor the tokenizer names one"):
        load_model(tmp_path)


def test_json_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(CheckpointError, match="not readable JSON"):
        load_model(tmp_path)


@pytest.mark.parametrize("added", [5, [1], {"4": "<|im_end|>"}, {"4": {"content": 7}}])
def test_added_tokens_that_are_none_are_refused(added: Any, tmp_path: Path) -> None:
    save_model(made("dream"), tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    described = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"added_tokens_decoder|tokenizer files"):
        load_model(tmp_path)
