"""Samplers, one file each, and the protocol they share.

A sampler chooses which positions are decided this turn, and with which tokens. It is a frozen
dataclass of options; its state is returned. Imported as `dlm_decode.samplers` only, so that no
package called `samplers` lands among a user's packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.options import Options
from dlm_decode.registry import Registry
from dlm_decode.types import Canvas, Decision, Output, Query

if not __name__.startswith("dlm_decode."):
    raise ImportError("import dlm_decode.samplers, not samplers")


@dataclass(frozen=True)
class Sampler(Options):
    """Base of all samplers: options, declared needs, and three pure functions.

    `paper` names the source. `needs` lists the statistics asked of `Output`. `scope` is the window
    a sampler works on: "block" (the schedule's window; state starts afresh with each block) or
    "canvas" (all editable positions of the row; state lives as long as the request; only the
    block's are eligible). `traits` declares "history" (decisions depend on earlier turns) and
    "revokes" (decided positions can be masked or changed again).
    """

    paper: ClassVar[str] = ""
    traits: ClassVar[frozenset[str]] = frozenset()

    @property
    def needs(self) -> frozenset[str]:
        """Names of the optional statistics that `decide` reads, see `Output`."""
        return frozenset()

    @property
    def scope(self) -> str:
        """ "block" or "canvas", see the class."""
        return "block"

    @property
    def attention_layers(self) -> tuple[float, float]:
        """Depths, as shares of the model, that "attention" is averaged over; the last layer is in.

        (0.0, 1.0) takes every layer, (0.7, 1.0) the last 30%.
        """
        return (0.0, 1.0)

    def init(self, canvas: Canvas) -> Any:
        """State of fresh rows: tensors with leading B in nested tuples or dicts; `()` if none."""
        return ()

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        """What to forward; None is the canvas as it stands."""
        return None

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        """Choose tokens and positions. Pure tensor code: no host sync, nothing mutated."""
        raise NotImplementedError


SAMPLERS: Registry[Sampler] = Registry("sampler", "dlm_decode.samplers", "dlm_decode.samplers")
