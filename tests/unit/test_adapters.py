"""LoRA adapters: what peft itself merges, whatever way a family stores its layers, and refusals."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlm_decode.api import load
from dlm_decode.cli import main
from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.models.adapters import merge_adapter
from dlm_decode.models.loading import save_model
from dlm_decode.models.published import Family
from tests.families import made

peft = pytest.importorskip("peft", reason="needs the extra lora")

BASE = "base_model.model."


def adapter(path: Path, base: Family, targets: list[str], **settings: Any) -> Path:
    """An adapter of rank 3 of the layers of `base` whose names end in `targets`, by hand."""
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": targets}
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(config | settings))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for stored, view in base.weights().items():
        name = stored.removesuffix(".weight")
        if name.rsplit(".", 1)[-1] in targets:
            out_size, in_size = view.shape
            for part, shape in (("A", (3, in_size)), ("B", (out_size, 3))):
                tensors[f"{BASE}{name}.lora_{part}.weight"] = torch.randn(
                    shape, generator=generator
                )
    save_file(tensors, path / "adapter_model.safetensors")
    return path


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        {"r": 2, "use_rslora": True, "target_modules": ["k_proj"], "rank_pattern": {"k_proj": 5}},
        {"r": 2, "use_dora": True, "target_modules": ["o_proj", "gate_proj"]},
    ],
    ids=["plain", "rank-stabilised", "dora"],
)
def test_weights_are_those_that_peft_merges_into_transformers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Dream's layers are Qwen2's: an adapter trained there, saved, and merged both ways."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ours = made("dream")
    theirs = Qwen2ForCausalLM(Qwen2Config.from_dict({**ours.published, "model_type": "qwen2"}))
    theirs.load_state_dict(ours.weights())
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 + torch.randn(weight.shape, generator=generator))
    wrapped.save_pretrained(tmp_path)
    merged = wrapped.merge_and_unload().state_dict()
    before = {name: view.clone() for name, view in ours.weights().items()}
    merge_adapter(ours, tmp_path)
    for name, view in ours.weights().items():
        torch.testing.assert_close(view, merged[name], rtol=0, atol=0)
        layer, kind = name.split(".")[-2:]
        targeted = kind == "weight" and layer in settings["target_modules"]
        assert torch.equal(view, before[name]) != targeted


@pytest.mark.parametrize(
    ("name", "target"),
    [("llada2", "query_key_value"), ("llada_moe", "up_proj"), ("bd3lm", "attn_qkv")],
)
def test_fused_layers_and_experts_are_updated_in_place(
    name: str, target: str, tmp_path: Path
) -> None:
    model = made(name)
    folder = adapter(tmp_path / "a", model, [target])
    before = {key: view.clone() for key, view in model.weights().items()}
    merge_adapter(model, folder)
    updates = load_file(folder / "adapter_model.safetensors")
    assert updates
    for key, view in model.weights().items():
        layer = f"{BASE}{key.removesuffix('.weight')}.lora_"
        if f"{layer}A.weight" not in updates:
            assert torch.equal(view, before[key])
            continue
        update = 2.0 * updates[f"{layer}B.weight"] @ updates[f"{layer}A.weight"]
        torch.testing.assert_close(view, before[key] + update)


def test_an_adapter_is_merged_at_load_and_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(made("sdar"), tmp_path / "model")
    folder = adapter(tmp_path / "a", made("sdar"), ["q_proj"])
    plain, changed = (load(tmp_path / "model", adapter=a).model for a in (None, folder))
    views = zip(plain.weights().values(), changed.weights().values(), strict=True)
    same = [torch.equal(a, b) for a, b in views]
    assert same.count(False) == plain.info.layers
    arguments = ["generate", "--prompt", "x", "--adapter"]
    assert main([*arguments, str(folder)]) == 2
    assert "the adapter does not fit the model" in capsys.readouterr().err


def refusal(path: Path, model: Family | None = None) -> str:
    with pytest.raises(CheckpointError) as raised:
        merge_adapter(model or made("sdar"), path)
    return str(raised.value)


def test_misfits_are_refused(tmp_path: Path) -> None:
    sdar = made("sdar")
    assert "size mismatch" in refusal(
        adapter(tmp_path / "wide", made("sdar", hidden_size=16), ["q_proj"])
    )
    assert "Target modules" in refusal(adapter(tmp_path / "other", made("llada"), ["ff_proj"]))
    more = adapter(tmp_path / "more", sdar, ["q_proj"])
    tensors = load_file(more / "adapter_model.safetensors")
    key = next(iter(tensors))
    save_file(tensors | {"lora_A.weight": torch.zeros(1)}, more / "adapter_model.safetensors")
    assert "of no layer here" in refusal(more)
    del tensors[key]
    save_file(tensors, more / "adapter_model.safetensors")
    assert "1 tensors missing" in refusal(more)


def test_what_is_not_a_number_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", made("sdar"), ["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values())).fill_(torch.nan)
    save_file(tensors, folder / "adapter_model.safetensors")
    assert "has NaN" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa"),
        ("r", 0),
    ],
)
def test_settings_beyond_a_plain_lora_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", made("sdar"), ["q_proj"], **{field: value})
    assert field in refusal(folder)


class Trap:
    """Unpickling it would end the test run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('unpickled')",))


def test_pickles_and_absent_files_are_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", made("sdar"), ["q_proj"])
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    assert "adapter_model.bin is a pickle" in refusal(folder)
    assert "has no adapter_config.json" in refusal(tmp_path)
    assert "must be a folder" in refusal(tmp_path / "nowhere")


def test_without_peft_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapter(tmp_path / "a", made("sdar"), ["q_proj"])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(CapabilityError, match=r"dlm-decode\[lora\]"):
        merge_adapter(made("sdar"), folder)
