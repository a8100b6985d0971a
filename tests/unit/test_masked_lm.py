"""Masked LMs of transformers: their own logits, decoding, infilling, checkpoints, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import WhitespaceSplit

from dlm_decode import api
from dlm_decode.api import Decoder
from dlm_decode.attention import Group, PackedAttention
from dlm_decode.caches import CACHES
from dlm_decode.cli import main
from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.footprint import forecast
from dlm_decode.models.loading import load_model, planned, save_model
from dlm_decode.models.masked_lm import MaskedLM
from dlm_decode.models.toy import random_llada
from dlm_decode.types import Request
from tests.families import TINY, made
from tests.unit.test_loading import word_tokenizer

NAMES = [name for name in TINY if name.startswith("masked_lm")]
EVERY = pytest.mark.parametrize("name", NAMES)


def hosted(name: str, dtype: torch.dtype = torch.float32) -> MaskedLM:
    model = made(name, dtype)
    assert isinstance(model, MaskedLM)
    return model


def upstream(path: Path) -> transformers.PreTrainedModel:
    """The checkpoint as transformers itself loads it."""
    net, found = transformers.AutoModelForMaskedLM.from_pretrained(path, output_loading_info=True)
    assert not found["missing_keys"] and not found["mismatched_keys"]
    return net.eval()


# --------------------------------------------------------------------------------------- logits


@EVERY
@torch.no_grad()
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of packed rows, one of them longer than ModernBERT's local window; without padding ids."""
    model = hosted(name)
    save_model(model, tmp_path)
    net = upstream(tmp_path)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 48, (n,), generator=generator) for n in (9, 9, 40, 3)]
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    groups = (Group(0, 2, 9, True), Group(18, 1, 40, True), Group(58, 1, 3, True))
    ours = model.logits(model.forward(torch.cat(rows), positions, PackedAttention(groups)))
    expected = torch.cat([net(input_ids=row[None]).logits[0] for row in rows])
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    assert expected.std() > 0.5
    tile = model.logits(model.forward(torch.cat(rows), positions, PackedAttention(groups)), 7, 19)
    torch.testing.assert_close(tile, expected[:, 7:19], atol=1e-5, rtol=0)


@EVERY
@torch.no_grad()
def test_embeddings_can_be_given_in_place_of_ids(name: str) -> None:
    model, ids, n = hosted(name), torch.arange(2, 14), 12
    attend = PackedAttention((Group(0, 1, n, True),))
    plain = model.forward(ids, torch.arange(n), attend)
    given = model.forward(ids * 0, torch.arange(n), attend, embeds=model.embedding(ids))
    torch.testing.assert_close(given, plain)


def test_roberta_counts_positions_from_behind_its_padding_id() -> None:
    """A padding id that was decided is a token like others: it shifts no position behind it."""
    model = hosted("masked_lm-roberta", torch.float64)
    assert (model.first_position, model.info.max_positions) == (2, 126)
    with torch.no_grad():
        attend = PackedAttention((Group(0, 1, 6, True),))
        read = model.forward(torch.tensor([5, 1, 7, 1, 9, 3]), torch.arange(6), attend)
        ids = torch.tensor([[5, 1, 7, 1, 9, 3]])
        whole = model.net(input_ids=ids, position_ids=torch.arange(2, 8)[None]).logits[0]
    assert torch.equal(read, whole)


def test_rows_as_long_as_the_table_are_the_longest() -> None:
    model = hosted("masked_lm-roberta")
    decoder = Decoder(model, options={"threshold": 0.0})
    assert len(decoder.generate([[5, 6]], gen_length=124)[0].canvas) == 126
    with pytest.raises(api.RequestError, match="take 127 positions, but the model has 126"):
        decoder.generate([[5, 6]], gen_length=125)


# ------------------------------------------------------------------------------------- decoding


@EVERY
@pytest.mark.parametrize("sampler", ["llada", "lrd", "lopa"])
def test_rows_decode_the_same_alone_and_together(name: str, sampler: str) -> None:
    model = hosted(name, torch.float64)
    mask = model.info.mask_id
    requests = [
        Request([41, 5, 6, 7], gen_length=9, block_length=4, stop_at_eos=False),
        Request([41, 8, mask, mask, 9, mask, 42], gen_length=0, infill=True),
        Request([41, 3, 2], gen_length=5, suffix_ids=[6, 42], frozen={2: 11}),
    ]
    decoder = Decoder(model, sampler, max_batch_size=2, temperature=0.7, seed=3, debug=True)
    together = decoder.generate(requests)
    for request, result in zip(requests, together, strict=True):
        assert decoder.generate(request)[0].ids == result.ids
        assert mask not in result.canvas
    given = together[1].canvas
    assert (given[:2], given[4], given[6]) == ((41, 8), 9, 42)
    assert together[2].canvas[3 + 2] == 11 and together[2].canvas[-2:] == (6, 42)


def test_one_mask_at_a_time_is_greedy_mask_filling() -> None:
    """The most certain mask first, each from transformers' own logits of the row so far."""
    model = hosted("masked_lm", torch.float64)
    mask = model.info.mask_id
    row = torch.tensor([41, 5, mask, 6, mask, mask, mask, 42])
    options = {"steps": 4}
    result = Decoder(model, "llada", options=options).generate(
        Request(row.tolist(), gen_length=0, block_length=8, infill=True, stop_at_eos=False)
    )[0]
    with torch.no_grad():
        while (row == mask).any():
            logits = model.logits(model.net(input_ids=row[None]).logits[0])
            logits[:, mask] = -torch.inf
            best, token = logits.softmax(-1).max(-1)
            place = best.masked_fill(row != mask, -1).argmax()
            row[place] = token[place]
    assert list(result.canvas) == row.tolist()


def test_speculation_guidance_and_streaming_work_over_whole_rows() -> None:
    model = hosted("masked_lm-modernbert", torch.float64)
    prompt = [41, 5, 6, 7]
    plain = Decoder(model, "llada").generate([prompt], gen_length=12, block_length=6)[0]
    ahead = Decoder(model, "self_speculative+llada", options={"max_states": 3})
    drafted = ahead.generate([prompt], gen_length=12, block_length=6)[0]
    assert drafted.ids == plain.ids and drafted.forwards <= plain.forwards
    guided = Decoder(model, "llada", cfg_scale=1.5).generate([prompt], gen_length=4)[0]
    assert model.info.mask_id not in guided.ids
    frames = list(Decoder(model, "llada").stream([prompt], gen_length=12, block_length=6))
    assert frames[-1].result is not None and frames[-1].result.ids == plain.ids


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("cache", [n for n in CACHES.names() if CACHES.get(n).stores])
def test_caches_that_store_are_refused_with_the_reason(cache: str) -> None:
    with pytest.raises(CapabilityError, match="does not fit masked_lm"):
        Decoder(hosted("masked_lm"), cache=cache)
    if cache == "dual":
        with pytest.raises(CapabilityError, match=r"transformers' own class.*take cache none"):
            Decoder(hosted("masked_lm"), cache=cache)


@pytest.mark.parametrize(("sampler", "need"), [("dapd", "attention"), ("wino", "shadow")])
def test_samplers_that_look_inside_are_refused(sampler: str, need: str) -> None:
    with pytest.raises(CapabilityError, match=f"needs {need}, which masked_lm does not offer"):
        Decoder(hosted("masked_lm"), sampler)
    Decoder(random_llada(), sampler)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, "is_decoder is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": 33}, "config.json: "),
        ({"mask_token_id": None}, "mask_token_id must be one id"),
        ({"mask_token_id": 48}, "mask token id 48 lies outside"),
        ({"model_type": "yoso"}, "depend on the rows beside it"),
        (
            {"model_type": "mobilebert", "embedding_size": 16},
            "MobileBertForMaskedLM cannot be decoded as a masked LM",
        ),
        ({"model_type": "esm"}, "EsmForMaskedLM cannot be decoded as a masked LM"),
    ],
)
def test_what_cannot_be_hosted_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_model(made("masked_lm"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_model(tmp_path)


# ---------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_as_it_is_published_loads(tmp_path: Path) -> None:
    """BERT's has the old names of its norms, a pooler and a sentence head, its tied head twice."""
    model = hosted("masked_lm")
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): v
        for k, v in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    extra = {
        "bert.embeddings.position_ids": torch.arange(128)[None],
        "bert.pooler.dense.weight": torch.zeros(32, 32),
        "cls.seq_relationship.bias": torch.zeros(2),
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
    }
    save_file(renamed | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(tmp_path).model
    ours = loaded.weights()
    assert all(torch.equal(ours[name], view) for name, view in model.weights().items())
    assert main(["inspect", str(tmp_path)]) == 1  # no tokenizer, nothing else
    extra["cls.predictions.decoder.bias"] += 1
    save_file(renamed | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"differs from cls\.predictions\.bias"):
        load_model(tmp_path)


def test_special_ids_and_texts_are_the_tokenizers(tmp_path: Path) -> None:
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *(f"w{i}" for i in range(43))]
    tokenizer = word_tokenizer(*words)
    special = {"mask": "[MASK]", "sep": "[SEP]", "cls": "[CLS]", "pad": "[PAD]"}
    tokenizer.add_special_tokens({f"{key}_token": text for key, text in special.items()})
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    save_model(made("masked_lm"), tmp_path, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("mask_token_id", "eos_token_id"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    loaded = api.load(tmp_path)
    info = loaded.model.info
    assert (info.mask_id, info.end_ids, info.pad_id) == (4, (2,), 3)
    decoder = Decoder(loaded, "llada")
    text = "[CLS] w1 [MASK] w2 [MASK] [SEP]"
    result = decoder.generate(text, gen_length=0, infill=True)[0]
    assert result.canvas[0] == 1 and result.canvas[5] == 2 and 4 not in result.canvas
    assert result.text is not None


def test_inspect_says_what_is_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(made("masked_lm-modernbert"), tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["supports"]["caches"] == found["supports"]["exact_caches"] == ["none"]
    assert "transformers' own class" in found["supports"]["no_cache_because"]
    assert "llada" in found["supports"]["samplers"]
    assert not {"dapd", "wino"} & set(found["supports"]["samplers"])


def test_memory_can_be_foretold(tmp_path: Path) -> None:
    save_model(made("masked_lm"), tmp_path)
    build = planned(tmp_path)
    small, large = (
        forecast(lambda: build("cpu"), batch=b, length=16, window=8, stores=False) for b in (1, 8)
    )
    assert small.weight_bytes == large.weight_bytes > 4 * 48 * 32
    assert 4 < large.activation_bytes / small.activation_bytes < 9
