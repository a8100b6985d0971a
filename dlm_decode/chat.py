"""Chat messages as the text of a template, and text as ids; refusals are errors of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlm_decode.errors import RequestError


def chat_text(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, leave_open: bool = False
) -> str:
    """`messages` in the tokenizer's chat template, and the beginning of the answer.

    With `leave_open` the last message is left open instead. Raises `RequestError` with what a
    template says that refuses the messages or is broken, in whatever class of its own.
    """
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=not leave_open,
            continue_final_message=leave_open,
        )
    except Exception as error:
        raise RequestError(f"the chat template refuses these messages: {error}") from None
    return str(text)


def text_ids(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Ids of `text`, between the tokenizer's own tokens for beginning and end if `special`."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError("the prompt holds half of a surrogate pair, which is no character")
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])
