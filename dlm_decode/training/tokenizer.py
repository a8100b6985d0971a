"""The tiny models' tokenizer: byte-level BPE whose merges are whole words of the task families.

Digits and grid blanks are always single tokens, a newline with its indent is one token, any other
text falls back to bytes, so that everything encodes and round trips.
"""

from __future__ import annotations

import random
from collections import Counter

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlm_decode.tasks import FAMILIES

EOS, MASK, USER, ASSISTANT = "<|eos|>", "<|mask|>", "<|user|>", "<|assistant|>"
SPECIALS = (EOS, MASK, USER, ASSISTANT)
PATTERN = r"\n *| ?\p{L}+|\p{N}|_| ?[^\s\p{L}\p{N}_]+|\s"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{%- else %}{{ '<|user|>' + message['content'] }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)
ROUND_TO = 64
"""The embedding has a multiple of this many rows; rows above the tokenizer's size are never trained
nor predicted.
"""


def build_tokenizer(*, items_per_family: int = 4000, seed: int = 0) -> PreTrainedTokenizerFast:
    """The tokenizer of the families in `FAMILIES`, the same for the same arguments."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), byte_level])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet + [word for word in _words(split, items_per_family, seed) if len(word) > 1]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    # With `ignore_merges` a word in the vocabulary is a token: no chain of merges spells it.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _words(split: pre_tokenizers.PreTokenizer, items_per_family: int, seed: int) -> list[str]:
    """Every piece the families' texts split into, the most frequent first."""
    counts: Counter[str] = Counter()
    for name, family in FAMILIES.items():
        rng = random.Random(f"tokenizer/{name}/{seed}")
        for _ in range(items_per_family):
            item = family.make(rng)
            for text in (item.prompt, item.answer):
                counts.update(piece for piece, _ in split.pre_tokenize_str(text))
    return sorted(counts, key=lambda word: (-counts[word], word))


def padded_vocab_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """The tokenizer's size rounded up to a multiple of `ROUND_TO`."""
    return -(-len(tokenizer) // ROUND_TO) * ROUND_TO
