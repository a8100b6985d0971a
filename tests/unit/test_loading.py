"""Reading and writing checkpoints, and refusing broken ones."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dlm_decode import memory
from dlm_decode.errors import CapacityError, CheckpointError
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.dream import Dream
from dlm_decode.models.llada import LLaDA
from dlm_decode.models.loading import (
    bundled_model_path,
    fill,
    load_model,
    save_model,
    weight_shards,
)
from dlm_decode.models.published import Family, Published
from dlm_decode.models.toy import random_dream, random_llada, randomise

HEAD = "model.transformer.ff_out.weight"
EMBED = "model.transformer.wte.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole LLaDA checkpoint in one file, to be broken."""
    save_model(random_llada(), tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def same_weights(ours: Family, theirs: Family) -> bool:
    mine, yours = ours.weights(), theirs.weights()
    return list(mine) == list(yours) and all(torch.equal(mine[n], yours[n]) for n in mine)


def word_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0])


# --- what loads


@pytest.mark.parametrize("max_shard_bytes", [2**30, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [random_llada, random_dream])
def test_saved_models_load_bit_for_bit(
    make: Callable[..., LLaDA | Dream], dtype: torch.dtype, max_shard_bytes: int, tmp_path: Path
) -> None:
    model = make(dtype=dtype)
    save_model(model, tmp_path, max_shard_bytes=max_shard_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_bytes < 2**30)
    loaded = load_model(tmp_path)
    assert isinstance(loaded.model, type(model))
    assert loaded.model.dtype == dtype
    assert loaded.model.info == model.info
    assert loaded.tokenizer is None and loaded.path == tmp_path
    assert same_weights(model, loaded.model)
    again = tmp_path / "again"
    save_model(loaded.model, again, max_shard_bytes=max_shard_bytes)
    for file in tmp_path.glob("*.*"):
        assert file.read_bytes() == (again / file.name).read_bytes()


def test_stored_tensors_are_the_published_ones(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 2 * 9 + 3
    assert tensors["model.transformer.blocks.1.k_proj.weight"].shape == (32, 32)


def test_dtype_is_the_callers_then_configs_then_the_files(folder: Path) -> None:
    assert load_model(folder, dtype=torch.float64).model.dtype == torch.float64
    edit_config(folder, torch_dtype="bfloat16")
    assert load_model(folder).model.dtype == torch.bfloat16
    edit_config(folder, torch_dtype=None, dtype="float16")
    assert load_model(folder).model.dtype == torch.float16
    edit_config(folder, dtype=None)
    assert load_model(folder).model.dtype == torch.float32


def test_loaded_parameters_take_part_in_autograd(folder: Path) -> None:
    with torch.inference_mode():
        model = load_model(folder).model
    assert isinstance(model, Backbone)
    assert not model.embed.is_inference()


def tied_llada() -> LLaDA:
    config = random_llada().published | {"weight_tying": True}
    files = Published(config)
    return randomise(LLaDA.from_published(files, device="cpu", dtype=torch.float32), 0)


def test_a_tied_head_is_stored_once_and_may_be_repeated(tmp_path: Path) -> None:
    model = tied_llada()
    save_model(model, tmp_path)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    edit_weights(tmp_path, lambda t: t.update({HEAD: t[EMBED].clone()}))
    loaded = load_model(tmp_path).model
    assert isinstance(loaded, Backbone) and loaded.head is loaded.embed
    edit_weights(tmp_path, lambda t: t[HEAD].add_(1.0))
    with pytest.raises(CheckpointError, match="differs from"):
        load_model(tmp_path)


def test_the_tokenizer_is_saved_and_read_and_tells_the_end_of_a_turn(tmp_path: Path) -> None:
    tokenizer = word_tokenizer("?", "red", "<|eot_id|>")
    save_model(random_llada(), tmp_path, tokenizer)
    loaded = load_model(tmp_path)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.convert_tokens_to_ids("red") == 1
    assert loaded.model.info.end_ids == (42, 2)


def write_dream_tokenizer(folder: Path, turn_id: int) -> None:
    """Four byte-pair tokens and an added one, of a class that only remote code has."""
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "c": 3}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    described = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {str(turn_id): {"content": "<|im_end|>", "special": True}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "tokenization_dream.py").write_text("raise SystemExit('remote code ran')\n")


def test_tokenizers_with_code_of_their_own_load_as_their_plain_equivalent(tmp_path: Path) -> None:
    save_model(random_dream(), tmp_path)
    write_dream_tokenizer(tmp_path, turn_id=4)
    loaded = load_model(tmp_path)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("abc")["input_ids"] == [2, 3]
    assert loaded.model.info.end_ids == (42, 4)


def test_tokenizers_that_number_added_tokens_otherwise_are_refused(tmp_path: Path) -> None:
    save_model(random_dream(), tmp_path)
    write_dream_tokenizer(tmp_path, turn_id=5)
    with pytest.raises(CheckpointError, match="the id 5, but it loads as 4"):
        load_model(tmp_path)


def test_the_bundled_model_is_a_folder_of_the_package() -> None:
    assert bundled_model_path().parts[-3:] == ("dlm_decode", "assets", "tiny-llada")


# --- what is refused


def test_unknown_families_are_refused_with_the_known_ones(folder: Path) -> None:
    edit_config(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    with pytest.raises(CheckpointError, match=r"gpt2.*GPT2LMHeadModel.*known: .*dream.*llada"):
        load_model(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not readable JSON"), ("[]", "must hold a JSON object"), ("\xff", "not readable JSON")],
)
def test_broken_config_files_are_refused(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_absent_files_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_model(folder)
    with pytest.raises(CheckpointError, match="no folder"):
        load_model(folder / "nowhere")


class Trap:
    """Unpickling it would end the test run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_pickles_are_never_loaded(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match=r"is a pickle|not a complete safetensors file"):
        load_model(folder)


@pytest.mark.parametrize("kept", [0, 7, 1000, -5])
def test_truncated_weight_files_are_refused(folder: Path, kept: int) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        load_model(folder)


def test_tensors_are_read_into_their_places(folder: Path) -> None:
    """No second copy where the dtype is the stored one, and a refusal if the file shrank since."""
    shards, slots = weight_shards(folder), random_llada(1).weights()
    with open(folder / "model.safetensors", "rb", buffering=0) as file:
        assert shards.read(HEAD, file, slots[HEAD]) is slots[HEAD]
        wide = slots[EMBED].double()
        assert shards.read(EMBED, file, wide) is not wide
    assert torch.equal(slots[HEAD], random_llada().weights()[HEAD])
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-9])
    with pytest.raises(CheckpointError, match="ends within"):
        fill(random_llada(1), shards)


def test_missing_unexpected_and_misshapen_tensors_are_named(folder: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        for layer in (0, 1):
            for part in ("q_proj", "k_proj"):
                del tensors[f"model.transformer.blocks.{layer}.{part}.weight"]
        tensors["model.extra"] = torch.zeros(2)
        tensors[EMBED] = torch.zeros(47, 32)

    edit_weights(folder, damage)
    with pytest.raises(CheckpointError) as raised:
        load_model(folder)
    message = str(raised.value)
    assert "4 missing: model.transformer.blocks.0.q_proj.weight" in message
    assert "and 1 more" in message
    assert "1 unexpected: model.extra" in message
    assert f"1 misshapen: {EMBED} (47, 32) instead of (48, 32)" in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named(folder: Path, bad: float) -> None:
    edit_weights(folder, lambda t: t[HEAD].view(-1)[7].fill_(bad))
    with pytest.raises(CheckpointError, match=f"{HEAD} has NaN or infinite"):
        load_model(folder)


def test_weights_that_overflow_the_target_dtype_are_named(folder: Path) -> None:
    edit_weights(folder, lambda t: t[HEAD].view(-1)[7].fill_(1e6))
    load_model(folder)
    with pytest.raises(CheckpointError, match=f"{HEAD} has NaN or infinite.*float16"):
        load_model(folder, dtype=torch.float16)


def test_quantised_weights_and_unknown_dtypes_are_refused(folder: Path) -> None:
    edit_config(folder, torch_dtype="int8")
    with pytest.raises(CheckpointError, match="dtype 'int8'"):
        load_model(folder)
    edit_weights(folder, lambda t: t.update({HEAD: t[HEAD].to(torch.int8)}))
    with pytest.raises(CheckpointError, match="stored as I8"):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("weight_map"), "no weight_map"),
        (lambda index: index["weight_map"].update({HEAD: "absent.safetensors"}), "has no absent"),
        (
            lambda index: index["weight_map"].update({HEAD: "../x.safetensors"}),
            "outside its folder",
        ),
    ],
)
def test_broken_indices_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    save_model(random_llada(), tmp_path, max_shard_bytes=20_000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save_model(random_llada(), tmp_path, max_shard_bytes=20_000)
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    save_file(load_file(second) | load_file(first), second)
    with pytest.raises(CheckpointError, match=f"in {first.name} and in {second.name}"):
        load_model(tmp_path)


def test_weights_larger_than_the_memory_are_refused_with_the_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(view.nbytes for view in random_llada().weights().values())
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed)
    load_model(folder)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    with pytest.raises(CapacityError, match=f"{needed:,} bytes .* {needed - 1:,} bytes"):
        load_model(folder)


def test_available_memory_is_known_or_none() -> None:
    available = memory.available_bytes(torch.device("cpu"))
    assert available is None or available > 2**20
    assert memory.available_bytes(torch.device("meta")) is None


def test_tokenizers_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    save_model(random_llada(vocab=48), tmp_path, word_tokenizer(*map(str, range(49))))
    with pytest.raises(CheckpointError, match=r"ids up to 48, but .* ends at 47"):
        load_model(tmp_path)


def test_broken_tokenizer_files_are_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer files"):
        load_model(folder)


# --- the hub, which tests never reach


def test_hub_ids_are_fetched_without_code_or_pickles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot(hub_id: str, *, allow_patterns: list[str]) -> str:
        assert hub_id == "owner/name"
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load_model("owner/name").path == folder
    assert "*.safetensors" in asked and not any(p.endswith((".py", ".bin", "*")) for p in asked)


def test_unknown_hub_families_are_refused_before_their_weights_are_fetched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(folder, model_type="gpt2")

    def snapshot(hub_id: str, *, allow_patterns: list[str]) -> str:
        assert "*.safetensors" not in allow_patterns
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(CheckpointError, match="no known family"):
        load_model("owner/name")


def test_an_unreachable_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(hub_id: str, *, allow_patterns: list[str]) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(CheckpointError, match=r"owner/name.*cannot reach.*folder"):
        load_model("owner/name")
