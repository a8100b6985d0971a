"""Training of DEMASK's predictor: exact targets, learning, files, and the script."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlm_decode.api import Decoder, load
from dlm_decode.dependency import read_predictor
from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.models.toy import Tabular, from_table, random_dream, random_llada, xor_task
from dlm_decode.training.data import Corpus
from dlm_decode.training.demask import (
    LEVELS,
    DemaskConfig,
    Text,
    block_states,
    draw_pairs,
    fingerprint,
    initial_weights,
    is_for,
    laws,
    measure,
    pair_loss,
    save_predictor,
    train_predictor,
)
from dlm_decode.training.export import export_diffusion
from dlm_decode.training.models import ModelConfig, TinyTransformer
from dlm_decode.training.tokenizer import build_tokenizer, padded_vocab_size
from dlm_decode.types import Request
from tests.unit.dependency_cases import check_batched_is_alone, exact_llada, make

SMALL = DemaskConfig(steps=60, rows=8, reveals=3, block_length=4, rank=8, heads=2, reach=4)


def texts(count: int = 20, *, vocab: int = 40) -> list[Text]:
    """Random texts whose answers are two or three blocks of four."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        prompt, answer = 2 + i % 3, 8 + 4 * (i % 2)
        ids = torch.randint(vocab, (prompt + answer,), generator=generator)
        made.append(Text(tuple(ids.tolist()), prompt))
    return made


def test_targets_are_the_exact_total_variations() -> None:
    """Bits 0 and 1 are equal, bit 2 is apart; revealing bit 0 or 1 settles the other."""
    table = torch.zeros(2, 2, 2)
    table[0, 0], table[1, 1] = torch.tensor([0.3, 0.3]), torch.tensor([0.2, 0.2])
    model = from_table(table, offset=1)
    config = replace(SMALL, rows=1, block_length=3, greedy=True)
    noised, masked = torch.tensor([0, 2, 2, 2]), torch.ones(1, 3).bool()
    pairs = measure(model, [noised], [1], masked, config, torch.Generator().manual_seed(0))
    d = {int(i): pairs.target[0, n].tolist() for n, i in enumerate(pairs.revealed[0])}
    assert d[0] == pytest.approx([0.4, 0.4, 0.0])  # the most probable bit 0 has .6
    assert d[1] == pytest.approx([0.4, 0.4, 0.0])
    assert d[2][:2] == pytest.approx([0.0, 0.0])
    assert pairs.counts.sum() == 6, "every pair but the diagonal"


def test_an_exclusive_or_has_targets_of_zero() -> None:
    config = replace(SMALL, rows=1, block_length=3)
    noised, masked = torch.tensor([0, 2, 2, 2]), torch.ones(1, 3).bool()
    model = xor_task(offset=1)
    pairs = measure(model, [noised], [1], masked, config, torch.Generator().manual_seed(0))
    assert not pairs.target[pairs.counts].any()


@pytest.mark.parametrize("family", [random_llada, random_dream])
def test_states_are_those_the_engine_reads(family: object) -> None:
    """Rows of several lengths in one packed forward, shifted or not, as each row alone."""
    model = family(dtype=torch.float64)  # type: ignore[operator]
    rows = [torch.arange(n) % 40 for n in (6, 6, 9)]
    together = block_states(model, rows, [0, 2, 5], 4)
    for row, start, found in zip(rows, [0, 2, 5], together, strict=True):
        (alone,) = block_states(model, [row], [start], 4)
        torch.testing.assert_close(found, alone)
    first = laws(model, together)[0, 0]
    assert first[model.info.mask_id] == 0
    assert float(first.sum()) == pytest.approx(1)


def test_only_masks_of_one_block_count() -> None:
    model, config = random_llada(), SMALL
    pairs = draw_pairs(model, texts(), config, 3)
    assert pairs.target.shape == pairs.counts.shape == (8, 3, 4)
    assert pairs.hidden.shape == (8, 4, model.info.hidden_size)
    itself = pairs.revealed[..., None] == torch.arange(4)
    assert not (pairs.counts & itself).any()
    assert pairs.target.min() >= 0 and pairs.target.max() <= 1 + 1e-6


def test_a_batch_is_a_function_of_the_step() -> None:
    model = random_llada()
    one, again, other = (draw_pairs(model, texts(), SMALL, step) for step in (5, 5, 6))
    assert torch.equal(one.target, again.target)
    assert not torch.equal(one.target, other.target)


def test_training_learns_what_depends_on_what() -> None:
    """Bits in equal pairs, the pairs apart: the predictor tells them, on batches it never saw."""
    joint = {(a, a, b, b): 1.0 for a in (0, 1) for b in (0, 1)}
    model = Tabular(joint, vocab_size=3, offset=1)
    sequences = [Text((0, *bits), 1) for bits in joint]
    config = replace(SMALL, learning_rate=0.03)
    losses: list[float] = []
    weights, calibration = train_predictor(
        model, sequences, config, log=lambda step, loss: losses.append(loss)
    )
    assert len(losses) == config.steps
    batches = [draw_pairs(model, sequences, config, 1000 + i) for i in range(5)]
    with torch.no_grad():
        before, after = (
            sum(float(pair_loss(w, batch, config.floor)) for batch in batches)
            for w in (initial_weights(model, config), weights)
        )
    assert after < 0.8 * before
    assert calibration.correlation > 0.6
    assert abs(calibration.mean_error) < 0.1
    assert list(calibration.quantiles) == sorted(calibration.quantiles)


def test_training_leaves_the_model_alone() -> None:
    model = random_llada()
    before = fingerprint(model)
    losses: list[float] = []
    config = replace(SMALL, steps=20)
    train_predictor(model, texts(), config, log=lambda step, loss: losses.append(loss))
    assert sum(losses[-5:]) < sum(losses[:5])
    assert fingerprint(model) == before
    assert not any(p.requires_grad for p in model.parameters())


def test_a_predictor_is_written_and_used(tmp_path: Path) -> None:
    model, path = exact_llada(), tmp_path / "demask.safetensors"
    config = replace(SMALL, steps=2)
    weights, calibration = train_predictor(model, texts(), config)
    save_predictor(path, model, weights, calibration, config)
    assert path.stat().st_size < 40_000
    stored = read_predictor(str(path))
    assert stored.weights["query"].shape == (2, 8, model.info.hidden_size)
    assert stored.weights["errors"].tolist() == pytest.approx(calibration.quantiles)
    assert stored.weights["levels"].tolist() == pytest.approx(LEVELS)
    expected = {"layers": "3", "rank": "8", "hidden_size": "32", "block_length": "4"}
    assert expected.items() <= dict(stored.metadata).items()
    assert is_for(str(path), model)
    assert not is_for(str(path), exact_llada(9))
    for cache in ("none", "dual"):
        sampler = make("demask", predictor=str(path), tau=0.2, quantile=0.5)
        check_batched_is_alone(model, sampler, cache, 0.7)
    narrow = random_llada(hidden=16)
    decoder = Decoder(narrow, "demask", options={"predictor": str(path)})
    with pytest.raises(CapabilityError, match="of size 32, but this model's have 16"):
        decoder.generate(Request([1, 2], gen_length=4))


def test_models_are_told_apart_whatever_dtype_they_are_in() -> None:
    model = random_llada(1)
    assert fingerprint(model) == fingerprint(random_llada(1))
    assert fingerprint(model) != fingerprint(random_llada(2))
    assert fingerprint(model.half()) == fingerprint(random_llada(1).half().float())
    assert fingerprint(xor_task()) == fingerprint(xor_task())


def test_texts_without_a_block_are_refused() -> None:
    with pytest.raises(OptionError, match="at least one text"):
        train_predictor(random_llada(), [], SMALL)
    with pytest.raises(OptionError, match="at most the shortest answer's 3 tokens, got 4"):
        train_predictor(random_llada(), [Text((1, 2, 3, 4), 1)], SMALL)


@pytest.mark.slow
def test_the_script_trains_on_the_models_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    tiny = TinyTransformer(ModelConfig(padded_vocab_size(tokenizer), 32, 1, 2, 64))
    export_diffusion(tiny, Corpus(tokenizer, {"lists": 1.0}, seed=0), tmp_path / "model")
    out = tmp_path / "made" / "demask.safetensors"
    small = "--examples 6 --gen-length 8 --block-length 4 --steps 3 --rows 2 --rank 4 --threads 1"
    script = Path(__file__).parents[2] / "scripts" / "train_demask.py"
    argv = [str(script), "--model", str(tmp_path / "model"), "--out", str(out), *small.split()]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    assert stopped.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bytes"] == out.stat().st_size
    loaded = load(tmp_path / "model", dtype=torch.float32)
    assert is_for(str(out), loaded.model)
    decoder = Decoder(loaded, "demask", options={"predictor": str(out)})
    assert len(decoder.generate("Reverse the list", gen_length=8)[0].ids) == 8


def test_the_bundled_predictor_is_that_of_the_bundled_model() -> None:
    """It names the weights it was trained on, and its influences stay inside the bound."""
    loaded = load()
    assert is_for("bundled", loaded.model)
    prompt = "Reverse the list [ lion owl wolf ]"
    found = {}
    for tau in (0.01, 0.3):
        options = {"predictor": "bundled", "tau": tau}
        decoder = Decoder(loaded, "demask", options=options)
        (found[tau],) = decoder.generate(prompt, gen_length=32, block_length=32)
    assert found[0.01].text == "[ wolf owl lion ]"
    assert found[0.3].forwards < found[0.01].forwards <= found[0.01].tokens
