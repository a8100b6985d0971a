"""Follow the running means of the lengths drafted and accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dlm_decode.bridge.controllers import CONTROLLERS, Controller
from dlm_decode.options import option


@CONTROLLERS.register("adl")
@dataclass(frozen=True)
class AdaptiveDraftLength(Controller):
    """k = clip(floor(mean drafted) + delta [mean accepted >= mean drafted], k_min, k_max).

    The means are exponential, with weight rho for the latest round; they begin with the first one,
    before which k is k_min. A draft cut at an end id counts as far as it went (DiffuSpec,
    arXiv:2510.02358).
    """

    paper: ClassVar[str] = "DiffuSpec, arXiv:2510.02358"

    k_min: int = option(20, "least tokens a draft", low=1)
    k_max: int = option(30, "most tokens a draft", low=1)
    delta: int = option(10, "growth after full acceptance", low=0)
    rho: float = option(0.5, "weight of the latest round", above=0.0)

    def init(self) -> Any:
        return None

    def first(self, state: Any) -> int:
        if state is None:
            return self.k_min
        drafted, accepted = state
        wanted = int(drafted) + self.delta * (accepted >= drafted)
        return max(self.k_min, min(wanted, self.k_max))

    def observe(self, state: Any, drafted: int, accepted: int) -> Any:
        new = (float(drafted), float(accepted))
        if state is None:
            return new
        return tuple(self.rho * b + (1 - self.rho) * a for a, b in zip(state, new, strict=True))
