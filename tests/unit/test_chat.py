"""What templates and tokenizers refuse is told as an error of ours, wherever a prompt is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from dlm_decode.api import Decoder, load
from dlm_decode.bridge.loading import encode_chat
from dlm_decode.chat import chat_text, text_ids
from dlm_decode.errors import RequestError
from dlm_decode.eval.decoding import Asking, encode, make_requests
from dlm_decode.eval.problems import load_problems
from dlm_decode.eval.protocols import load_protocol
from dlm_decode.models.loading import bundled_model_path, load_tokenizer

HALF = "half \ud83d"
BROKEN = {
    "refuses": ("{{ raise_exception('who?') }}", "who?"),
    "undefined": ("{{ messages[0].content.absent.deeper }}", "has no attribute 'absent'"),
    "no syntax": ("{% for m in messages %}", "end"),
    "python's own": ("{{ 1 / 0 }}", "division by zero"),
}


def tokenizer_of(template: str | None = None) -> PreTrainedTokenizerBase:
    """That of the bundled model, with a template instead of its own."""
    tokenizer = load_tokenizer(bundled_model_path())
    assert tokenizer is not None
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


def _as_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> Sequence[int]:
    return Decoder(load(), tokenizer=tokenizer).encode(text)


def _as_problem(tokenizer: PreTrainedTokenizerBase, text: str) -> Sequence[int]:
    problem = type("Asked", (), {"id": "1", "prompt": text, "prefix": ""})()
    return encode(Decoder(load(), tokenizer=tokenizer), problem, chat=True)


READERS: dict[str, Callable[[Any, str], Sequence[int]]] = {
    "api": _as_prompt,
    "eval": _as_problem,
    "bridge": encode_chat,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_template_is_named(reader: str, kind: str) -> None:
    template, reason = BROKEN[kind]
    with pytest.raises(RequestError, match=r"the chat template refuses.*") as found:
        READERS[reader](tokenizer_of(template), "Copy it")
    assert reason in str(found.value)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("chat", [True, False])
def test_half_a_character_is_refused(reader: str, chat: bool) -> None:
    tokenizer = tokenizer_of()
    if not chat:
        tokenizer.chat_template = None
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        READERS[reader](tokenizer, HALF)


def test_all_read_a_prompt_alike() -> None:
    found = {tuple(read(tokenizer_of(), "Copy it")) for read in READERS.values()}
    assert len(found) == 1


def test_a_problem_that_the_template_refuses_counts_as_wrong() -> None:
    """An evaluation goes on, and has the reason."""
    decoder = Decoder(load(), tokenizer=tokenizer_of(BROKEN["refuses"][0]))
    problems = load_problems(load_protocol("mini-gsm8k"), limit=2)
    asking = Asking(gen_length=8, block_length=8, eos="normal", stop_at_eos=True, chat=True)
    requests, refused = make_requests(decoder, problems.problems, asking)
    assert not requests
    assert [reason for _, reason in refused] == [
        "the chat template refuses these messages: who?"
    ] * 2


def test_the_last_message_can_be_left_open() -> None:
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    assert chat_text(tokenizer_of(), history, leave_open=True).endswith("So")
    with pytest.raises(RequestError, match="the chat template refuses"):
        chat_text(tokenizer_of("{{ raise_exception('who?') }}"), history, leave_open=True)


def test_text_is_enclosed_in_the_tokenizers_own_tokens_only_if_asked() -> None:
    tokenizer = tokenizer_of()
    assert (
        text_ids(tokenizer, "Copy it")
        == tokenizer("Copy it", add_special_tokens=False)["input_ids"]
    )
    assert text_ids(tokenizer, "Copy it", special=True) == tokenizer("Copy it")["input_ids"]
