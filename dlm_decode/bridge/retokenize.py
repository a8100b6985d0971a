"""A drafter with another tokenizer: ids to text, text to ids, and an exact re-alignment.

Whatever comes out is a one-hot draft of verifier ids, so the output stays the verifier's; only how
much of it is accepted depends on how well the tokenizers agree. After universal assisted generation
in transformers and Timor et al., arXiv:2502.05202 (string-level verification).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dlm_decode.bridge.draft import Draft
from dlm_decode.bridge.drafters import Context, Drafter
from dlm_decode.chat import text_ids
from dlm_decode.errors import CapabilityError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "The 3 cats sat.\nA = [1, 20]"
UNFINISHED = "\ufffd"
"""What a decoder shows for bytes that are not a whole character yet."""

EncodePrompt = Callable[[str], list[int]]


@dataclass
class _Own:
    """What a row keeps between rounds: the drafter's prompt, and its own memory."""

    prompt: list[int]
    memory: Any = None


class Retokenized:
    """Lets `inner` draft in its own ids for a verifier with another tokenizer.

    `encode_prompt` turns the prompt's text (special tokens left out) into the drafter's ids; by
    default it is encoded as it is. `lookbehind` verifier tokens before the draft are encoded again
    with it, so that the draft's first token may depend on them.
    """

    vocab_size: int | None = None

    def __init__(
        self,
        inner: Drafter,
        verifier_tokenizer: PreTrainedTokenizerBase,
        drafter_tokenizer: PreTrainedTokenizerBase,
        *,
        end_ids: Sequence[int] = (),
        encode_prompt: EncodePrompt | None = None,
        lookbehind: int = 8,
    ) -> None:
        """`end_ids` are the drafter's. Raises `CapabilityError` where text does not survive."""
        for name, tokenizer in (("verifier", verifier_tokenizer), ("drafter", drafter_tokenizer)):
            _check_keeps_text(name, tokenizer)
        self.inner, self.end_ids, self.lookbehind = inner, tuple(end_ids), lookbehind
        self.verifier_tokenizer, self.drafter_tokenizer = verifier_tokenizer, drafter_tokenizer
        self.encode_prompt = encode_prompt or (lambda text: text_ids(drafter_tokenizer, text))

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """One-hot drafts in verifier ids; none while a character is unfinished."""
        texts = [_decode(self.verifier_tokenizer, c.ids[c.prompt_length :]) for c in contexts]
        ready = [i for i, text in enumerate(texts) if not text.endswith(UNFINISHED)]
        inner = [self._inner_context(contexts[i], texts[i]) for i in ready]
        drafts = [Draft() for _ in contexts]
        for i, own, found in zip(ready, inner, self.inner.propose(inner), strict=True):
            contexts[i].memory.memory = own.memory
            drafts[i] = self._translated(contexts[i], found)
        return drafts

    def _inner_context(self, context: Context, text: str) -> Context:
        if not isinstance(context.memory, _Own):
            given = context.ids[: context.prompt_length]
            shown = _decode(self.verifier_tokenizer, given, skip_special=True)
            context.memory = _Own(self.encode_prompt(shown))
        own = context.memory
        return replace(
            context,
            ids=[*own.prompt, *text_ids(self.drafter_tokenizer, text)],
            prompt_length=len(own.prompt),
            temperature=0.0,
            soft=False,
            warp=None,
            end_ids=self.end_ids,
            vocab_size=None,
            memory=own.memory,
        )

    def _translated(self, context: Context, draft: Draft) -> Draft:
        """The draft's text in verifier ids; its last id is left out unless the text ends there."""
        if draft.tree is not None:
            raise CapabilityError("a token tree cannot cross tokenizers: draft chains")
        tokens = list(draft.tokens)
        ended = bool(tokens) and tokens[-1] in self.end_ids
        text = _decode(self.drafter_tokenizer, tokens[:-1] if ended else tokens)
        ids = self._aligned(context, text.rstrip(UNFINISHED))
        ids = [*ids, *context.end_ids[:1]] if ended else ids[:-1]
        return Draft(tuple(ids[: context.room]), forwards=draft.forwards)

    def _aligned(self, context: Context, text: str) -> list[int]:
        """Ids of `text` such that the tokens before it, encoded with it, stay what they are."""
        new = context.ids[context.prompt_length :]
        for size in range(min(self.lookbehind, len(new)), 0, -1):
            tail = new[-size:]
            both = text_ids(self.verifier_tokenizer, _decode(self.verifier_tokenizer, tail) + text)
            if both[:size] == tail:
                return both[size:]
        return text_ids(self.verifier_tokenizer, text)


def _decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special: bool = False
) -> str:
    return str(
        tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
    )


def _check_keeps_text(name: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if tokenizer is None:
        raise CapabilityError(f"the {name} has no tokenizer, so no text can pass between the two")
    back = _decode(tokenizer, text_ids(tokenizer, PROBE))
    if back.strip() != PROBE:
        raise CapabilityError(
            f"the {name}'s tokenizer does not keep text: {PROBE!r} comes back as {back!r}, so "
            "drafts cannot pass through text"
        )
