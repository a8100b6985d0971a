"""What a published checkpoint says of itself, and what is asked of a family read from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from dlm_decode.errors import CheckpointError
from dlm_decode.models import DiffusionLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST, MOST_PARTS = 2**24, 10_000
"""Above any size, and any count of layers or experts, that a config.json has cause to hold.

What is misread is so refused before it is allocated, or looped over.
"""


@dataclass(frozen=True)
class Published:
    """config.json, generation_config.json and the tokenizer of a checkpoint (the latter if any)."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None

    def number(self, key: str, most: int = MOST) -> int:
        """A positive integer up to `most` that config.json must have."""
        value = self.config.get(key)
        if type(value) is not int or not 0 < value <= most:
            raise CheckpointError(
                f"config.json: {key} must be a positive integer up to {most:,}, got {value!r}"
            )
        return value

    def number_or(self, key: str, default: int) -> int:
        """A positive integer, `default` where config.json has none or null."""
        return default if self.config.get(key) is None else self.number(key)

    def count_or(self, key: str, default: int) -> int:
        """An integer that may be 0, `default` where config.json has none or null."""
        value = self.config.get(key)
        return 0 if type(value) is int and value == 0 else self.number_or(key, default)

    def real(self, key: str, default: float) -> float:
        """A positive number, `default` where config.json has none or null."""
        value = self.config.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise CheckpointError(f"config.json: {key} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false, `default` where config.json has none or null."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def rope_field(self, key: str, default: float, kinds: tuple[str, ...] = ("default",)) -> float:
        """A number of the rotary embedding, by itself or in `rope_parameters` (transformers 5).

        Refuses kinds of scaling there other than `kinds`; `rope_scaling` is the older key for it.
        """
        nested = self.config.get("rope_parameters")
        nested = {} if nested is None else nested
        kind = nested.get("rope_type", "default") if isinstance(nested, Mapping) else nested
        if not isinstance(nested, Mapping) or kind not in kinds:
            raise CheckpointError(
                f"config.json: rope_parameters has rope_type {kind!r}, but only "
                f"{' and '.join(map(repr, kinds))} is supported"
            )
        if any(isinstance(value, Mapping) for value in nested.values()):
            raise CheckpointError(
                "config.json: rope_parameters differ between layers, which is not supported"
            )
        stated = self.config if self.config.get(key) is not None else nested
        return Published(stated).real(key, default)

    def require(self, supported: Mapping[str, Any]) -> None:
        """Refuse any field of config.json that is neither null nor the one `supported` value."""
        for key, only in supported.items():
            value = self.config.get(key)
            if value is not None and value != only:
                wanted = "null" if only is None else repr(only)
                raise CheckpointError(
                    f"config.json: {key} is {value!r}, but only {wanted} is supported"
                )

    def token_id(self, token: str | None) -> int | None:
        """The id the tokenizer gives to `token`; None if it has no such token or there is none."""
        if self.tokenizer is None or token is None:
            return None
        found = self.tokenizer.convert_tokens_to_ids(token)
        if isinstance(found, int) and self.tokenizer.convert_ids_to_tokens(found) == token:
            return found
        return None

    def special_ids(self, tokens: SpecialTokens, vocab_size: int) -> SpecialIds:
        """The ids of `tokens`: config.json, else the tokenizer, generation_config, the known ids.

        The end of a turn stands in no config.json: only the tokenizer, or without one the known
        id, tells it.
        """
        published = vocab_size == tokens.vocab_size
        known = (tokens.mask_id, tokens.end_id, tokens.turn_id) if published else (None,) * 3
        mask = self._ids("mask_token_id", tokens.mask, known[0])
        ends = self._ids("eos_token_id", tokens.end, known[1])
        turn = known[2] if self.tokenizer is None else self.token_id(tokens.turn)
        ends = tuple(dict.fromkeys((*ends, *(() if turn is None else (turn,)))))
        pads = [p for p in self._ids("pad_token_id", tokens.end, known[1]) if 0 <= p < vocab_size]
        _check_ids(vocab_size, mask=mask, ends=ends)
        return SpecialIds(mask[0], ends, pads[0] if pads else None)

    def own_tokens(self, turn: str | None = None) -> SpecialTokens:
        """Mask and end as the tokenizer itself names them: no family's texts, no known ids."""
        mask, end = (getattr(self.tokenizer, f"{name}_token", None) for name in ("mask", "eos"))
        return SpecialTokens(mask, end, turn, vocab_size=0, mask_id=0, end_id=0, turn_id=None)

    def _ids(self, key: str, token: str | None, known: int | None) -> tuple[int, ...]:
        sources = (self.config.get(key), self.token_id(token), self.generation.get(key), known)
        found = next((source for source in sources if source not in (None, [])), ())
        ids = tuple(found) if isinstance(found, (list, tuple)) else (found,)
        if not all(type(value) is int for value in ids):
            raise CheckpointError(f"config.json: {key} must be token ids, got {found!r}")
        return ids


@dataclass(frozen=True)
class SpecialTokens:
    """Texts of a family's special tokens, and their ids in its published vocabulary.

    The ids are the last resort, for a folder of `vocab_size` tokens whose files do not name them.
    None: there is no such token, or no one published it.
    """

    mask: str | None
    end: str | None
    turn: str | None
    vocab_size: int
    mask_id: int
    end_id: int
    turn_id: int | None


@dataclass(frozen=True)
class SpecialIds:
    """Special ids of one checkpoint; fields as in `ModelInfo`."""

    mask_id: int
    end_ids: tuple[int, ...]
    pad_id: int | None


def head_size(width: int, heads: int, kv_heads: int) -> int:
    """The even size of one head; refuses sizes that do not divide."""
    if width % (2 * heads) or heads % kv_heads:
        raise CheckpointError(
            f"config.json: a width of {width} with {heads} heads and {kv_heads} key/value heads "
            "does not divide into heads of an even size"
        )
    return width // heads


def check_heads(size: int, heads: int, kv_heads: int) -> int:
    """A head size that the checkpoint states itself; refuses an odd one and ungroupable heads."""
    if size % 2 or heads % kv_heads:
        raise CheckpointError(
            f"config.json: head_dim {size} must be even and {heads} heads a multiple of "
            f"{kv_heads} key/value heads"
        )
    return size


def _check_ids(vocab_size: int, *, mask: tuple[int, ...], ends: tuple[int, ...]) -> None:
    if len(mask) != 1:
        found = f"got {mask}" if mask else "and neither it nor the tokenizer names one: add it"
        raise CheckpointError(f"config.json: mask_token_id must be one id, {found}")
    for name, value in (("mask", mask[0]), *(("end", end) for end in ends)):
        if not 0 <= value < vocab_size:
            raise CheckpointError(
                f"the {name} token id {value} lies outside the vocabulary of {vocab_size}"
            )


class Family(DiffusionLM, Protocol):
    """A model that is read from and saved to a published layout."""

    published: dict[str, Any]
    tiny: ClassVar[Mapping[str, Any]]
    """A config.json of a tiny model of the family, which tests and `toy.random_model` make."""

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a config.json is of this family."""
        ...

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> Family:
        """The model with its weights allocated but not filled."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """Every stored tensor under its published name: views, to be read or filled in place."""
        ...

    def aliases(self) -> dict[str, str]:
        """Tensors that a checkpoint may repeat: their name -> the name of the one they equal."""
        ...
