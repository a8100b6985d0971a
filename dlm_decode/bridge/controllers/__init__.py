"""Draft-length controllers, one file each: how far to draft, chunk by chunk.

A controller is a frozen dataclass of options; what it learned about a row is returned as state.
It sees only chunks that are already fixed: it may add one, never trim one, so that the length does
not depend on tokens that are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.options import Options
from dlm_decode.registry import Registry


@dataclass(frozen=True)
class Controller(Options):
    """Base of all controllers; `paper` names the source."""

    paper: ClassVar[str] = ""

    def init(self) -> Any:
        """State of a fresh row."""
        return ()

    def first(self, state: Any) -> int:
        """Length of the first chunk."""
        raise NotImplementedError

    def more(self, state: Any, confidence: Sequence[float], chunk: int) -> int:
        """Length of the next chunk, 0 to stop.

        `confidence` is that of all tokens drafted in this round, the last `chunk` of which are new.
        """
        return 0

    def observe(self, state: Any, drafted: int, accepted: int) -> Any:
        """State after a round."""
        return state


CONTROLLERS: Registry[Controller] = Registry(
    "controller", "dlm_decode.bridge.controllers", "dlm_decode.bridge.controllers"
)
