"""Training of the tiny models: tokenizer, noise, loop and the exported layouts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

import dlm_decode.tasks
from dlm_decode.tasks import get_family, held_out, verify
from dlm_decode.training.data import Corpus, NoiseConfig, causal_batch, diffusion_batch
from dlm_decode.training.decode import accuracy, decode_causal, decode_diffusion
from dlm_decode.training.export import export_causal, export_diffusion
from dlm_decode.training.loop import LoopConfig, Run, causal_loss, diffusion_loss
from dlm_decode.training.models import ModelConfig, TinyTransformer, to_diffusion
from dlm_decode.training.optim import orthogonalise, schedule
from dlm_decode.training.tokenizer import ASSISTANT, build_tokenizer, padded_vocab_size

ASSETS = Path(dlm_decode.tasks.__file__).parents[1] / "assets"
WEIGHTS = {"lists": 1.0, "grids": 1.0, "mini-gsm8k": 1.0}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small run faster on one thread, and resuming is compared bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(build_tokenizer(items_per_family=500), WEIGHTS, seed=0)


@pytest.fixture()
def model(corpus: Corpus) -> TinyTransformer:
    torch.manual_seed(0)
    size = padded_vocab_size(corpus.tokenizer)
    return TinyTransformer(ModelConfig(size, width=32, layers=2, heads=2, hidden=48))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a\n    b",
        "Ana has 12 eggs.",
        "1_3_\n__4_",
        "naïve 世界 🙂 \t\r\n\x00 ½",
        "  x  \n\n  ",
    ],
)
def test_tokenizer_round_trips_any_text(corpus: Corpus, text: str) -> None:
    ids = corpus.tokenizer(text, add_special_tokens=False).input_ids
    assert corpus.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_tokenizer_takes_digits_apart_and_keeps_words_and_indents_whole(corpus: Corpus) -> None:
    item = get_family("mini-mbpp").make(random.Random(0))
    assert corpus.tokenizer.tokenize(" has 12") == ["Ġhas", "Ġ", "1", "2"]
    assert corpus.tokenizer.tokenize("1_\n23") == ["1", "_", "Ċ", "2", "3"]
    assert "Ċ" + 4 * "Ġ" in corpus.tokenizer.tokenize(item.answer)


def test_chat_template_is_user_prompt_assistant(corpus: Corpus) -> None:
    """The template and the training documents agree token for token."""
    item = held_out("lists", 1)[0]
    turns = [{"role": "user", "content": item.prompt}]
    text = corpus.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == f"<|user|>{item.prompt}<|assistant|>"
    ids = corpus.tokenizer(text, add_special_tokens=False).input_ids
    assert ids == corpus.encode(item).prompt


def test_causal_documents_are_islands_and_only_see_the_past(corpus: Corpus) -> None:
    batch = causal_batch(corpus, 0, rows=2, length=128, prompt_weight=0.3)
    starts = (batch.positions == 0) & (batch.weights == 0)
    assert not batch.mask.triu(1).any()
    row = starts[0].nonzero().flatten()
    assert not batch.mask[0, 0, row[1], : row[1]].any()
    assert batch.mask[0, 0].diagonal().all()


def test_diffusion_masks_are_complementary_and_only_masked_tokens_are_scored(
    corpus: Corpus,
) -> None:
    noise = NoiseConfig(blockwise=0.0, prompt_share=0.0)
    batch = diffusion_batch(corpus, 0, tokens=2000, lengths={80: 1.0}, noise=noise)
    masked = batch.noised == corpus.mask_id
    first, second = masked.chunk(2)
    assert not (first & second).any()
    assert torch.equal(batch.ids[~masked], batch.noised[~masked])
    assert not batch.weights[~masked].any()
    marker = batch.ids[: len(first)] == corpus.tokenizer.convert_tokens_to_ids(ASSISTANT)
    after_marker = marker.int().cumsum(-1) - marker.int()
    assert torch.equal(first | second, after_marker.bool())


def test_blockwise_rows_have_a_clean_prefix_one_noised_block_and_a_masked_suffix(
    corpus: Corpus,
) -> None:
    noise = NoiseConfig(blockwise=1.0)
    batch = diffusion_batch(corpus, 1, tokens=4000, lengths={80: 1.0}, noise=noise)
    masked = batch.noised == corpus.mask_id
    either = masked[: len(masked) // 2] | masked[len(masked) // 2 :]
    first = either.int().argmax(-1)
    assert either.flip(-1).cummin(-1).values.flip(-1).sum(-1).eq(80 - first).all()
    suffix = masked[: len(masked) // 2] & masked[len(masked) // 2 :]
    assert suffix.int().argmax(-1)[suffix.any(-1)].eq(first[suffix.any(-1)] + 16).all()


def test_batches_are_a_function_of_the_step(corpus: Corpus) -> None:
    make = partial(
        diffusion_batch, corpus, tokens=1000, lengths={56: 1.0, 80: 1.0}, noise=NoiseConfig()
    )
    assert torch.equal(make(3).noised, make(3).noised)
    assert make(3).noised.shape != make(4).noised.shape or not make(3).noised.equal(make(4).noised)


def test_orthogonalise_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 16, 40)))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_schedule_warms_up_stays_and_decays() -> None:
    scales = [schedule(step, 1000, warmup=100, decay=0.4, floor=0.0) for step in range(1000)]
    assert scales[0] == pytest.approx(0.01)
    assert scales[100] == scales[599] == 1.0
    assert scales[800] == pytest.approx(0.5)


def _run(model: TinyTransformer, folder: Path) -> Run:
    return Run(model, folder, LoopConfig(steps=24, warmup=4, log_every=4, save_every=100))


@pytest.mark.parametrize("kind", ["causal", "diffusion"])
def test_a_short_run_decreases_the_loss(
    corpus: Corpus, model: TinyTransformer, tmp_path: Path, kind: str
) -> None:
    if kind == "causal":
        make = partial(causal_batch, corpus, rows=4, length=128, prompt_weight=0.3)
        losses = _run(model, tmp_path).train(make, causal_loss)
    else:
        make = partial(diffusion_batch, corpus, tokens=1000, lengths={56: 1.0}, noise=NoiseConfig())
        losses = _run(model, tmp_path).train(make, diffusion_loss)
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [4, 8, 12, 16, 20, 24]


def test_a_resumed_run_is_the_run_that_was_not_stopped(
    corpus: Corpus, model: TinyTransformer, tmp_path: Path
) -> None:
    make = partial(causal_batch, corpus, rows=2, length=128, prompt_weight=0.3)
    twin = TinyTransformer(model.config)
    twin.load_state_dict(model.state_dict())
    whole = _run(model, tmp_path / "whole").train(make, causal_loss)
    first = _run(twin, tmp_path / "parts").train(make, causal_loss, until=10)
    fresh = _run(TinyTransformer(model.config), tmp_path / "parts")
    assert fresh.resume()
    assert first + fresh.train(make, causal_loss) == whole
    for name, p in model.state_dict().items():
        assert torch.equal(p, fresh.model.state_dict()[name])


def test_causal_export_loads_in_transformers_with_the_same_logits(
    corpus: Corpus, model: TinyTransformer, tmp_path: Path
) -> None:
    _roughen(model)
    export_causal(model, corpus, tmp_path)
    llama = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, model.config.vocab_size, (2, 40))
    with torch.no_grad():
        ours = model.half().float()(ids, causal=True)
        theirs = llama(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == corpus.eos_id == llama.config.eos_token_id
    assert tokenizer.mask_token_id == corpus.mask_id
    assert tokenizer.chat_template


def test_diffusion_export_has_the_published_tensor_names_and_shapes(
    corpus: Corpus, model: TinyTransformer, tmp_path: Path
) -> None:
    diffusion = to_diffusion(model, mask_id=corpus.mask_id, n_tokens=len(corpus.tokenizer))
    export_diffusion(diffusion, corpus, tmp_path)
    v, d, h = model.config.vocab_size, model.config.width, model.config.hidden
    block = {
        "attn_norm": (d,), "ff_norm": (d,), "q_proj": (d, d), "k_proj": (d, d), "v_proj": (d, d),
        "attn_out": (d, d), "ff_proj": (h, d), "up_proj": (h, d), "ff_out": (d, h),
    }  # fmt: skip
    wanted = {"wte": (v, d), "ln_f": (d,), "ff_out": (v, d)} | {
        f"blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()
    }
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {f"model.transformer.{name}.weight": shape for name, shape in wanted.items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llada", ["LLaDAModelLM"])
    assert config["mask_token_id"] == corpus.mask_id
    assert config["vocab_size"] == config["embedding_size"] == v


def test_the_mask_embedding_starts_as_the_mean_of_the_real_tokens(
    corpus: Corpus, model: TinyTransformer
) -> None:
    n = len(corpus.tokenizer)
    diffusion = to_diffusion(model, mask_id=corpus.mask_id, n_tokens=n)
    torch.testing.assert_close(diffusion.embed[corpus.mask_id], model.embed[:n].mean(0))
    assert torch.equal(diffusion.head, model.head)


def test_decoding_a_row_alone_or_in_a_batch_is_the_same(
    corpus: Corpus, model: TinyTransformer
) -> None:
    """Right padding of shorter prompts must not be seen."""
    _roughen(model)
    prompts = [corpus.encode(item).prompt for item in held_out("lists", 6)]
    assert len({len(prompt) for prompt in prompts}) > 1
    diffusion = partial(decode_diffusion, mask_id=corpus.mask_id, eos_id=corpus.eos_id, length=32)
    for decode in (partial(diffusion, per_step=3), partial(decode_causal, eos_id=corpus.eos_id)):
        together = decode(model, prompts)
        alone = torch.cat([decode(model, [prompt]) for prompt in prompts])
        assert torch.equal(together, alone)
        assert not (together == corpus.mask_id).any() or decode.func is decode_causal


def test_accuracy_judges_every_item(corpus: Corpus, model: TinyTransformer) -> None:
    items = held_out("lists", 5)
    assert accuracy(model, corpus, items, per_step=8, rows=2) == [False] * 5


def test_the_shipped_models_use_the_tokenizer_the_script_builds() -> None:
    """Also a guard on the generators: a change to them may change the tokenizer."""
    built = build_tokenizer()
    for name in ("tiny-ar", "tiny-llada"):
        shipped = AutoTokenizer.from_pretrained(ASSETS / name)
        assert shipped.get_vocab() == built.get_vocab()
        assert shipped.chat_template == built.chat_template


def test_the_shipped_twin_loads_in_transformers_and_answers() -> None:
    llama = LlamaForCausalLM.from_pretrained(ASSETS / "tiny-ar", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-ar")
    item = next(i for i in held_out("lists", 20) if i.meta["operation"] == "copy")
    ids = tokenizer(f"<|user|>{item.prompt}<|assistant|>", return_tensors="pt").input_ids
    out = llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16)
    assert verify(item, tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _roughen(model: TinyTransformer) -> None:
    """Random weights large enough that mistakes in the maths show."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.ndim == 2 else 0.1) + (p.ndim == 1))
