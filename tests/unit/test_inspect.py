"""`dlm-decode inspect`: what it says of checkpoints that are whole, broken or of no known kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dlm_decode.cli import main
from dlm_decode.models.loading import save_model
from tests.families import TINY, made

Captured = pytest.CaptureFixture[str]


def inspect(path: Path, capsys: Captured, *, status: int) -> dict[str, Any]:
    assert main(["inspect", str(path), "--json"]) == status
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("name", TINY)
def test_every_family_is_described(name: str, tmp_path: Path, capsys: Captured) -> None:
    model = made(name)
    save_model(model, tmp_path)
    found = inspect(tmp_path, capsys, status=1)
    assert found["family"] == model.info.family
    assert found["missing"] == ["no tokenizer files: prompts have to be token ids"]
    assert found["ids"]["mask"] == ([model.info.mask_id] if model.info.has_mask else [])
    assert found["sizes"]["layers"] == model.info.layers
    assert found["weights"]["parameters"] == sum(v.numel() for v in model.weights().values())
    assert found["weights"]["stored_as"] == ["float32"]


def test_what_fits_follows_from_the_attention(tmp_path: Path, capsys: Captured) -> None:
    for name in ("qwen3_diffusion", "llada2"):
        save_model(made(name), tmp_path / name)
    full = inspect(tmp_path / "qwen3_diffusion", capsys, status=1)
    blocks = inspect(tmp_path / "llada2", capsys, status=1)
    assert full["attention"]["regime"] == "full"
    assert "dual" in full["supports"]["caches"] and full["supports"]["schedule"] == "fixed"
    assert blocks["supports"]["exact_caches"] == ["block_causal", "none"]
    assert blocks["supports"]["schedule"] == "absolute_aligned"
    assert blocks["attention"]["blocks_from"] == "absolute"


def test_text_has_a_line_for_each_fact(tmp_path: Path, capsys: Captured) -> None:
    save_model(made("llada2"), tmp_path)
    assert main(["inspect", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "family: llada2" in lines
    assert "  regime: block_causal" in lines
    assert "  mask: 44" in lines


def test_wrong_tensors_are_listed_as_missing(tmp_path: Path, capsys: Captured) -> None:
    save_model(made("rnd1"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    found = inspect(tmp_path, capsys, status=1)
    assert "1 missing: model.norm.weight" in found["missing"][0]
    (tmp_path / "model.safetensors").unlink()
    found = inspect(tmp_path, capsys, status=1)
    assert "has no model.safetensors" in found["missing"][0]
    assert found["weights"]["files"] == 0


def test_unknown_kinds_are_refused_with_what_is_known(tmp_path: Path, capsys: Captured) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "'gpt2'" in message and "known: adapted, bd3lm, " in message
    assert "only masked diffusion models" in message and '"diffusion_shift"' in message


def test_known_kinds_that_fit_no_family_are_refused_with_the_reason(
    tmp_path: Path, capsys: Captured
) -> None:
    config = {"model_type": "wedlm", "architectures": ["WeDLMForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(tmp_path)]) == 2
    assert "WeDLMForCausalLM'] can't be decoded: its attention is causal" in capsys.readouterr().err
