"""A sampler that decides as another one does, for tools that note what it decided from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.samplers import Sampler
from dlm_decode.types import Canvas, Decision, Output, Query


@dataclass(frozen=True)
class Watching(Sampler):
    """Everything is `inner`'s; `decide` may be extended to take notes. `extra_needs` are read too.

    No `Wrapper`: it is never named in a chain, and sees just what the inner sees.
    """

    extra_needs: ClassVar[frozenset[str]] = frozenset()

    inner: Sampler

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs | self.extra_needs

    @property
    def scope(self) -> str:
        return self.inner.scope

    @property
    def attention_layers(self) -> tuple[float, float]:
        return self.inner.attention_layers

    @property
    def asks(self) -> bool:
        return self.inner.asks

    def init(self, canvas: Canvas) -> Any:
        return self.inner.init(canvas)

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        return self.inner.query(canvas, state)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        return self.inner.decide(canvas, output, state)
