"""What the tests of self-speculation run: inners, rows, and models that force ties."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.caches import CachePolicy
from dlm_decode.compose import create_chain
from dlm_decode.models import Attend, DiffusionLM
from dlm_decode.models.toy import random_dream, random_llada
from dlm_decode.samplers import Sampler
from dlm_decode.samplers.self_speculative import SelfSpeculative
from dlm_decode.scores import best, top
from dlm_decode.types import Canvas, Decision, Generation, Output, Request

CACHES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("prefix", {}),
    ("dual", {}),
    ("dual", {"refresh_every": 3}),
]
INNERS: list[tuple[str, dict[str, Any]]] = [
    ("llada", {}),
    ("llada", {"llada": {"steps": 4}}),
    ("threshold", {"threshold": {"threshold": 0.6}}),
    ("threshold", {"threshold": {"steps": 4, "threshold": 0.4}}),
    ("factor", {}),
    ("entropy_bound", {"entropy_bound": {"gamma": 1.0}}),
    ("dream", {"dream": {"steps": 5}}),
    ("random", {}),
    ("left_to_right", {}),
    ("margin", {}),
    ("hierarchy", {}),
    ("klass", {"klass": {"kl_threshold": 0.5, "conf_threshold": 0.3}}),
    ("klass", {"klass": {"history": "canvas", "kl_threshold": 0.5, "conf_threshold": 0.3}}),
    ("credit+threshold", {"credit": {"dense": True}, "threshold": {"threshold": 0.7}}),
    ("credit+entropy", {"credit": {"tuning_free": True, "dense": True}}),
    ("prophet+llada", {"prophet": {"early": 4.0, "mid": 3.0, "late": 1.5}}),
    ("sched+threshold", {"sched": {"average": "all"}}),
    ("early_stop+threshold", {"threshold": {"threshold": 0.5}}),
    ("remdm", {}),
    ("rcr", {}),
    ("edit", {}),
    ("r2+threshold", {}),
    ("ccd", {}),
    ("dcd", {}),
]


@dataclass(frozen=True)
class Revoking(Sampler):
    """Commits its two best tokens and takes back, in every other turn, the least sure one decided.

    What it takes back depends on how often the row has turned, so its state matters too.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"history", "revokes"})

    overwrites: bool = False
    endless: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"decided"})

    def init(self, canvas: Canvas) -> Any:
        return {"seen": torch.zeros_like(canvas.commits)}

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        decided = canvas.editable & ~canvas.masked & output.valid
        changes = best(-output.p1, decided) & (state["seen"] % 2 == 1)[:, None]
        if not self.endless:
            changes = changes & (state["seen"] < 7)[:, None]
        commit = top(output.p1, canvas.eligible, 2)
        nothing = torch.zeros_like(changes)
        decision = Decision(
            output.candidate,
            commit,
            remask=nothing if self.overwrites else changes,
            overwrite=changes if self.overwrites else nothing,
        )
        return decision, {"seen": state["seen"] + 1}


class Rounded:
    """A model whose logits are rounded to eighths, so that many tokens and positions tie."""

    def __init__(self, inner: DiffusionLM) -> None:
        self.inner, self.info = inner, inner.info

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        return self.inner.forward(ids, positions, attend, embeds=embeds)

    def embedding(self, ids: Tensor) -> Tensor:
        return self.inner.embedding(ids)

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        return (self.inner.logits(hidden, start, stop) * 2).round() / 8


@cache
def model_of(name: str) -> DiffusionLM:
    """Tiny fp64 models; "tied" has logits so coarse that confidences tie, and are small."""
    if name == "dream":
        return random_dream(
            3, layers=2, hidden=16, heads=2, kv_heads=1, vocab=32, dtype=torch.float64
        )
    model = random_llada(2, layers=2, hidden=16, heads=2, vocab=32, dtype=torch.float64)
    return Rounded(model) if name == "tied" else model


def rows_of(name: str, block: int | None, *, stop_at_eos: bool) -> list[Request]:
    """Three ragged rows: a plain one, one with frozen tokens and a suffix, one with holes only."""
    mask, length = model_of(name).info.mask_id, block or 32
    rows = [
        Request([3, 5, 7, 2], gen_length=9),
        Request([4, 8, 15, 16, 23, 1], gen_length=7, frozen={2: 5}, suffix_ids=[6, 11]),
        Request([7, mask, 12, mask, mask, mask, 3], gen_length=0, infill=True),
    ]
    return [replace(row, block_length=length, stop_at_eos=stop_at_eos) for row in rows]


@dataclass(frozen=True)
class Run:
    """One point of the cross product."""

    inner: int
    cache: int
    model: str
    block: int | None
    states: int
    temperature: float
    cfg_scale: float = 0.0
    stop_at_eos: bool = True
    drafter: str = "chain"
    batch: int = 2
    revoking: Revoking | None = None

    @property
    def label(self) -> str:
        name = "revoking" if self.revoking else INNERS[self.inner][0]
        parts = (name, *CACHES[self.cache][0], self.model, self.block, self.states)
        return "-".join(str(part) for part in (*parts, self.temperature, self.drafter))

    def base(self) -> Sampler:
        name, options = INNERS[self.inner]
        return self.revoking or create_chain(name, options)

    def decode(self, sampler: Sampler, cache: CachePolicy | None = None) -> list[Generation]:
        name, options = CACHES[self.cache]
        decoder = Decoder(
            model_of(self.model),
            sampler,
            cache or name,
            options=None if cache else options,
            temperature=self.temperature,
            cfg_scale=self.cfg_scale,
            max_batch_size=self.batch,
            debug=True,
        )
        return decoder.generate(rows_of(self.model, self.block, stop_at_eos=self.stop_at_eos))

    def plain(self) -> list[Generation]:
        return self.decode(self.base())

    def ahead(self, kind: type[SelfSpeculative] = SelfSpeculative) -> list[Generation]:
        return self.decode(kind(self.base(), max_states=self.states, drafter=self.drafter))


def sampled_runs(count: int, seed: int = 0) -> list[Run]:
    """`count` points; each inner, cache, block length, K and temperature comes up many times."""
    draw = random.Random(seed)
    return [
        Run(
            inner=i % len(INNERS),
            cache=draw.randrange(len(CACHES)),
            model=draw.choice(["llada", "dream", "tied"]),
            block=draw.choice([1, 4, 8, 8, None]),
            states=draw.choice([1, 2, 3, 4, 5, 6, 7, 8]),
            temperature=draw.choice([0.0, 1.0]),
            cfg_scale=draw.choice([0.0, 0.0, 0.0, 0.0, 1.5]),
            stop_at_eos=draw.choice([True, False]),
            drafter=draw.choice(["chain", "chain", "graph"]),
        )
        for i in range(count)
    ]


def decided(results: Sequence[Generation]) -> list[Any]:
    """All that must be the same: canvases, reasons, and every step with tokens and confidence."""
    return [
        (
            r.canvas,
            r.finish_reason,
            r.tokens,
            [
                (
                    sorted(zip(s.positions, s.tokens, s.confidence, strict=True)),
                    sorted(s.remasked),
                )
                for s in r.trace.steps
            ],
        )
        for r in results
    ]
