"""Any masked diffusion LM as a drafter: masks after the verified prefix, filled chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_decode.api import build_parts
from dlm_decode.bridge.draft import FACTORISED, ONE_HOT, Draft
from dlm_decode.bridge.drafters import Context
from dlm_decode.bridge.fillers import Chunk, EngineFiller, Filler, Job, PassFiller
from dlm_decode.bridge.marginals import Reuse
from dlm_decode.bridge.tree import best_prefixes
from dlm_decode.caches import CachePolicy
from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.models import DiffusionLM
from dlm_decode.models.loading import LoadedModel
from dlm_decode.samplers import Sampler

LEAST_CANVAS = 32
"""Masks after the prefix: models that read the canvas as the answer's length need some room."""


class DiffusionDrafter:
    """Drafts with a masked diffusion LM, as far as the controller likes, in chunks.

    With `sampler` None each chunk takes `passes` forwards over K/V kept across rounds, refreshed
    as `reuse` says; the law of a draw is then certified. With a registry sampler (a name, chain or
    an object) and a cache policy the engine decodes each chunk; that is always one-hot. `canvas` is
    the least number of masks after the prefix. `tree_budget` drafts a tree of that many nodes from
    the first chunk's marginals instead of a chain.
    """

    def __init__(
        self,
        model: LoadedModel | DiffusionLM,
        sampler: str | Sampler | None = None,
        cache: str | CachePolicy = "none",
        *,
        options: dict[str, Any] | None = None,
        passes: int = 1,
        reuse: Reuse | None = None,
        canvas: int = LEAST_CANVAS,
        tree_budget: int | None = None,
    ) -> None:
        """Raises `CapabilityError` for a model that cannot draft, `OptionError` for bad options."""
        self.model: DiffusionLM = model.model if isinstance(model, LoadedModel) else model
        self.tokenizer = model.tokenizer if isinstance(model, LoadedModel) else None
        check_drafter(self.model)
        for name, value in (("passes", passes), ("canvas", canvas), ("tree_budget", tree_budget)):
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, got {value}")
        if tree_budget is not None and (sampler is not None or passes > 1):
            raise OptionError(
                "tree_budget needs the marginals of one pass: leave sampler and passes"
            )
        self.canvas, self.tree_budget = canvas, tree_budget
        self.vocab_size: int | None = self.model.info.vocab_size
        self.filler: Filler = PassFiller(self.model, reuse or Reuse(), passes)
        if sampler is not None:
            parts = build_parts(sampler, cache, "fixed", options or {})
            self.filler = EngineFiller(self.model, parts.sampler, parts.cache)

    def propose(self, contexts: Sequence[Context]) -> list[Draft]:
        """Drafts of all rows; their chunks share forwards."""
        growing = [_Growing(context) for context in contexts]
        while active := [g for g in growing if self._wanted(g)]:
            jobs = [self._job(g) for g in active]
            for grown, chunk in zip(active, self.filler.fill(jobs), strict=True):
                grown.add(chunk)
            if self.tree_budget is not None:
                return [self._tree(g) for g in growing]
        return [g.draft() for g in growing]

    def _wanted(self, grown: _Growing) -> int:
        """Length of the row's next chunk; 0 if it is done or the canvas would not fit.

        A verifier may emit the id that is the drafter's mask: then there is nothing to draft from.
        """
        ids, info = grown.context.ids, self.model.info
        if info.mask_id in ids:
            return 0
        return max(min(grown.wanted, info.max_positions - len(ids) - len(grown.tokens)), 0)

    def _job(self, grown: _Growing) -> Job:
        prefix = (*grown.context.ids, *grown.tokens)
        room = self.model.info.max_positions - len(prefix)
        return Job(grown.context, prefix, self._wanted(grown), min(self.canvas, room))

    def _tree(self, grown: _Growing) -> Draft:
        if grown.log_m is None or self.tree_budget is None:
            return Draft()
        tree = best_prefixes(grown.log_m, self.tree_budget)
        return Draft(tokens=tree.tokens, forwards=grown.forwards, tree=tree)


@dataclass
class _Growing:
    """A draft under way."""

    context: Context
    tokens: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()
    log_q: torch.Tensor | None = None
    log_m: torch.Tensor | None = None
    forwards: int = 0
    wanted: int = 0

    def __post_init__(self) -> None:
        self.wanted = self.context.first_chunk

    def add(self, chunk: Chunk) -> None:
        """Append a chunk, up to its first end id, and ask the controller how to go on.

        Cutting behind a token, or behind a whole chunk, never looks at what is cut; each chunk
        counts as later than the one before it, so the law stays certified.
        """
        keep, context = self.context.cut_at_end(chunk.tokens), self.context
        later = max(self.steps, default=-1) + 1
        self.tokens += chunk.tokens[:keep]
        self.steps += tuple(step + later for step in chunk.steps[:keep])
        self.confidence += chunk.confidence[:keep]
        self.forwards += chunk.forwards
        self.log_m = chunk.log_m
        if chunk.log_q is not None:
            rows = chunk.log_q[:keep]
            self.log_q = rows if self.log_q is None else torch.cat([self.log_q, rows])
        self.wanted = 0
        if keep == len(chunk.tokens) and len(self.tokens) < context.room:
            more = context.controller.more(context.control, self.confidence, keep)
            self.wanted = min(more, context.room - len(self.tokens))

    def draft(self) -> Draft:
        law = ONE_HOT if self.log_q is None else FACTORISED
        return Draft(self.tokens, law, self.log_q, self.steps, self.confidence, self.forwards)


def check_drafter(model: Any) -> None:
    """Raise `CapabilityError` unless `model` is a masked diffusion LM that can draft."""
    info = getattr(model, "info", None)
    if info is None or not hasattr(info, "mask_id"):
        raise CapabilityError(
            f"a diffusion drafter must be a masked diffusion LM, got {type(model).__name__}, which "
            "has no mask id: load one with dlm_decode.api.load"
        )
    if info.mask_id is None or not 0 <= info.mask_id < info.vocab_size:
        raise CapabilityError(
            f"the drafter's mask id must be one of its ids 0 .. {info.vocab_size - 1}, got "
            f"{info.mask_id}: set mask_token_id in its configuration"
        )
    if info.regime != "full":
        raise CapabilityError(f"{info.family} attends block-causally, which drafting can't do yet")
