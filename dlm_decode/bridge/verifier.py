"""An autoregressive model that scores ragged batches of drafts, chains or trees, in one forward.

Letters: B rows, L slots of the cache, q query columns, g drafted tokens, V vocabulary. Rows are
aligned at the right of the query, so that the logits of every draft are the last columns; rejected
tokens stay in the cache as holes (mask 0, explicit positions) until they are worth a gather
(derived; after the ragged tensors of "Batch Speculative Decoding Done Right", arXiv:2510.22876).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlm_decode.bridge.rollback import (
    cache_argument,
    drop_last,
    new_cache,
    select_rows,
    select_slots,
)
from dlm_decode.errors import CapabilityError, RequestError

CHAIN: tuple[int, ...] = ()
"""No parents given: each drafted token follows the one before it."""


@dataclass(frozen=True)
class Feed:
    """What one row asks: its tokens that are not cached yet (at least one), then its draft.

    `parents` gives the parent of each drafted token in a tree, -1 for the root (the last pending
    token); `CHAIN` is a plain sequence.
    """

    pending: Sequence[int]
    draft: Sequence[int] = ()
    parents: Sequence[int] = CHAIN

    @property
    def tokens(self) -> list[int]:
        return [*self.pending, *self.draft]

    def depths(self) -> list[int]:
        """Steps from the last pending token to each drafted one, from 1."""
        if not self.parents:
            return list(range(1, len(self.draft) + 1))
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found


class Verifier:
    """A causal LM of transformers, checked: full attention, one vocabulary, explicit positions.

    `max_holes` rejected slots a row are kept before the cache is compacted by a gather.
    """

    def __init__(self, model: Any, *, max_holes: int = 64) -> None:
        """Raises `CapabilityError` for a model that cannot verify drafts."""
        _check_model(model)
        if max_holes < 0:
            raise CapabilityError(f"max_holes must be at least 0, got {max_holes}")
        self.model, self.max_holes = model, max_holes
        self.cache_argument = cache_argument(model)
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.max_positions: int | None = getattr(model.config, "max_position_embeddings", None)
        new_cache(model)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text, from the model's generation configuration."""
        found = self.model.generation_config.eos_token_id
        found = self.model.config.eos_token_id if found is None else found
        return () if found is None else tuple(found) if isinstance(found, list) else (found,)

    def open(self, rows: int) -> Session:
        """A session for `rows` sequences, nothing cached."""
        return Session(self, rows)

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raise `RequestError` for an empty sequence or ids that the model does not know."""
        if not len(ids):
            raise RequestError(f"{name} is empty: give at least one token")
        worst = max(ids) if min(ids) >= 0 else min(ids)
        if not 0 <= worst < self.vocab_size:
            raise RequestError(
                f"{name} holds id {worst}, but ids of the verifier run from 0 to "
                f"{self.vocab_size - 1}: is this its own tokenizer?"
            )


class Session:
    """The cache of a batch of sequences; the caller owns it.

    After `score` and `commit` every row has cached exactly what was pending and what was kept of
    its draft, so that a sequence that then grows by one token is cached up to its last token.
    """

    def __init__(self, verifier: Verifier, rows: int) -> None:
        self.verifier = verifier
        self.cache = new_cache(verifier.model)
        self.valid = torch.zeros((rows, 0), dtype=torch.bool)
        self.cached = [0] * rows
        self.forwards = 0
        self._feeds: Sequence[Feed] = ()

    @torch.inference_mode()
    def score(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Logits `(g + 1, V)` of each row: after its pending tokens, then after each drafted one.

        fp32 as in `generate`. `commit` must follow before the next call.
        """
        width = max(len(feed.tokens) for feed in feeds)
        keep = max(len(feed.draft) for feed in feeds) + 1
        device = self.verifier.device
        ids = torch.tensor([_left_padded(feed.tokens, width, 0) for feed in feeds], device=device)
        places = [self._places(i, feed) for i, feed in enumerate(feeds)]
        positions = torch.tensor([_left_padded(row, width, 0) for row in places], device=device)
        arguments: dict[str, Any] = {
            "attention_mask": self._mask(feeds, width),
            self.verifier.cache_argument: self.cache,
        }
        if self.verifier.keeps_logits:
            arguments["logits_to_keep"] = keep
        output = self.verifier.model(ids, position_ids=positions, use_cache=True, **arguments)
        self._feeds, self.forwards = feeds, self.forwards + 1
        logits = output.logits[:, -keep:].float()
        return [row[keep - len(f.draft) - 1 :] for row, f in zip(logits, feeds, strict=True)]

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep the pending tokens and, of each row's draft, the tokens at the places `kept`."""
        width = max(len(feed.tokens) for feed in self._feeds)
        columns = [
            _left_padded(_kept_flags(feed, places), width, False)
            for feed, places in zip(self._feeds, kept, strict=True)
        ]
        self.valid = torch.cat([self.valid, torch.tensor(columns)], dim=1)
        for i, feed in enumerate(self._feeds):
            self.cached[i] += len(feed.pending) + len(kept[i])
        self._feeds = ()
        self._roll_back()

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Go on with some rows only, in that order."""
        index = torch.tensor(rows)
        self.valid = self.valid[index]
        self.cached = [self.cached[i] for i in rows]
        select_rows(self.cache, index.to(self.verifier.device))

    def compact(self) -> None:
        """Move every row's valid slots to the right end and drop what nobody uses."""
        size = max(self.cached)
        order = self.valid.to(torch.uint8).argsort(dim=1, stable=True)[:, -size:]
        select_slots(self.cache, order)
        self.valid = self.valid.gather(1, order)

    def _roll_back(self) -> None:
        used = self.valid.any(0)
        unused = len(used) - int(used.nonzero().max()) - 1
        drop_last(self.cache, unused)
        self.valid = self.valid[:, : len(used) - unused]
        if self.valid.shape[1] - max(self.cached) > self.verifier.max_holes:
            self.compact()

    def _places(self, row: int, feed: Feed) -> list[int]:
        start = self.cached[row]
        last = start + len(feed.pending) - 1
        return [*range(start, last + 1), *(last + depth for depth in feed.depths())]

    def _mask(self, feeds: Sequence[Feed], width: int) -> Tensor | None:
        """2D for chains (None if nothing is masked), else a 4D additive float mask.

        A bool 4D mask is silently wrong with eager attention.
        """
        fed = torch.tensor([_left_padded([True] * len(f.tokens), width, False) for f in feeds])
        valid = torch.cat([self.valid, fed], dim=1)
        device = self.verifier.device
        if any(feed.parents for feed in feeds):
            return _tree_mask(feeds, self.valid, width).to(device, self.verifier.model.dtype)
        return None if valid.all() else valid.long().to(device)


def _left_padded(values: Sequence[Any], width: int, filler: Any) -> list[Any]:
    return [filler] * (width - len(values)) + list(values)


def _kept_flags(feed: Feed, places: Sequence[int]) -> list[bool]:
    kept = set(places)
    return [True] * len(feed.pending) + [i in kept for i in range(len(feed.draft))]


def _tree_mask(feeds: Sequence[Feed], valid: Tensor, width: int) -> Tensor:
    """Additive mask `(B, 1, q, L + q)`: 0 where a query sees a key, the least number elsewhere."""
    inner = torch.stack([_visible(feed, width) for feed in feeds])
    past = valid[:, None, :].expand(-1, width, -1)
    seen = torch.cat([past, inner], dim=2)
    mask = torch.zeros(seen.shape)
    return mask.masked_fill(~seen, torch.finfo(torch.float16).min)[:, None]


def _visible(feed: Feed, width: int) -> Tensor:
    """Which query columns each query column sees, `(q, q)`; padding sees itself only."""
    pending, offset = len(feed.pending), width - len(feed.tokens)
    seen = torch.eye(width, dtype=torch.bool)
    root = offset + pending
    seen[offset:root, offset:root] = torch.ones(pending, pending).tril().bool()
    seen[root:, offset:root] = True
    parents = feed.parents or range(-1, len(feed.draft) - 1)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[root + node, root:] |= seen[root + parent, root:]
    return seen


def _check_model(model: Any) -> None:
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, "generate", None)):
        raise CapabilityError(
            f"the verifier must be a causal LM of transformers, got {type(model).__name__}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise CapabilityError(
            f"{type(model).__name__} is an encoder-decoder; the verifier must be decoder-only"
        )
    if model.get_output_embeddings() is None:
        raise CapabilityError(f"{type(model).__name__} has no LM head: load it as a causal LM")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise CapabilityError(
            f"{type(model).__name__} takes no position_ids, which rows of different lengths need"
        )
