"""Samplers, one file each, and the protocol they share.

A sampler chooses which positions are decided this turn, and with which tokens. It is a frozen
dataclass of options; its state is returned. Imported as `dlm_decode.samplers` only, so that no
package called `samplers` lands among a user's packages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from dlm_decode.errors import OptionError
from dlm_decode.options import Options
from dlm_decode.registry import Registry
from dlm_decode.tree import where_rows
from dlm_decode.types import Canvas, Decision, Output, Query

if not __name__.startswith("dlm_decode."):
    raise ImportError("import dlm_decode.samplers, not samplers")


@dataclass(frozen=True)
class Sampler(Options):
    """Base of all samplers: options, declared needs, and three pure functions.

    `paper` names the source. `needs` lists the statistics asked of `Output`. `scope` is the window
    a sampler works on: "block" (the schedule's window; state starts afresh with each block), "row"
    (the same window, but state lives as long as the request) or "canvas" (all editable positions of
    the row; state lives as long as the request; only the block's are eligible).

    `traits` declares "history" (decisions depend on earlier turns), "revokes" (decided positions
    can be masked or changed again), "random" (the order is drawn even at temperature 0, with
    default options) and "branches" (decisions depend on branches that the query asks for, and
    differ where a turn has none), "renoises" (it keeps a canvas of random tokens of its own, as
    models without a mask need), "eager" (its functions do what can't be captured as a graph, such
    as reading a value on the host).
    """

    paper: ClassVar[str] = ""
    traits: ClassVar[frozenset[str]] = frozenset()

    @property
    def needs(self) -> frozenset[str]:
        """Names of the optional statistics that `decide` reads, see `Output`."""
        return frozenset()

    @property
    def scope(self) -> str:
        """ "block", "row" or "canvas", see the class."""
        return "block"

    @property
    def attention_layers(self) -> tuple[float, float]:
        """Depths, as shares of the model, that "attention" is averaged over; the last layer is in.

        (0.0, 1.0) takes every layer, (0.7, 1.0) the last 30%.
        """
        return (0.0, 1.0)

    @property
    def asks(self) -> bool:
        """Whether `query` may want something else than the canvas as it stands."""
        return type(self).query is not Sampler.query

    def init(self, canvas: Canvas) -> Any:
        """State of fresh rows: tensors with leading B in nested tuples or dicts; `()` if none."""
        return ()

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        """What to forward; None is the canvas as it stands."""
        return None

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        """Choose tokens and positions. Pure tensor code: no host sync, nothing mutated."""
        raise NotImplementedError


SCOPES = ("block", "row", "canvas")
"""What a sampler works on, from the narrowest to the widest."""

SAMPLERS: Registry[Sampler] = Registry("sampler", "dlm_decode.samplers", "dlm_decode.samplers")


@dataclass(frozen=True)
class Wrapper(Sampler):
    """Base of samplers that work on another one, `inner` (`threshold` unless given).

    "credit+threshold" is `Credit(inner=Threshold())`. A wrapper asks for what it and the inner
    need, keeps the inner's state in its own, and lets the inner decide in between. `own_scope` is
    the wrapper's: where one of the two works on the canvas and the other on the block, both see
    what they would see alone. `alters` wrappers hand the inner other statistics than the model's;
    `measures` ones rely on the model's own, so they go outside; `outermost` ones can't be wrapped.
    `preserves_text` promises the inner's ids before the first end id, if the inner revokes nothing.
    """

    is_wrapper: ClassVar[bool] = True
    own_scope: ClassVar[str] = "block"
    alters: ClassVar[bool] = False
    measures: ClassVar[bool] = False
    outermost: ClassVar[bool] = False
    preserves_text: ClassVar[bool] = False

    inner: Sampler = field(default_factory=lambda: SAMPLERS.create("threshold"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, Sampler):
            raise OptionError(f"{type(self).__name__}.inner must be a sampler, got {self.inner!r}")
        object.__setattr__(self, "traits", type(self).traits | self.inner.traits)
        for layer in layers(self.inner):
            if isinstance(layer, Wrapper):
                self._check_nesting(layer)

    def _check_nesting(self, layer: Wrapper) -> None:
        mine, its = SAMPLERS.name_of(self), SAMPLERS.name_of(layer)
        if layer.outermost:
            reason = f"{its} decides several of its steps at once"
        elif self.alters and layer.measures:
            reason = f"it changes the logits whose margins {its} measures"
        else:
            return
        raise OptionError(
            f"{mine} cannot wrap {its}: {reason}; put {its} outside, as in {its}+{mine}"
        )

    @property
    def own_needs(self) -> frozenset[str]:
        """Statistics that the wrapper itself reads."""
        return frozenset()

    @property
    def needs(self) -> frozenset[str]:
        return self.own_needs | self.inner.needs

    @property
    def scope(self) -> str:
        return max(self.own_scope, self.inner.scope, key=SCOPES.index)

    @property
    def asks(self) -> bool:
        return self.inner.asks or type(self).query is not Wrapper.query

    @property
    def attention_layers(self) -> tuple[float, float]:
        return self.inner.attention_layers

    def begin(self, canvas: Canvas) -> Any:
        """The wrapper's own state of fresh rows."""
        return ()

    def init(self, canvas: Canvas) -> Any:
        return {"own": self.begin(canvas), "inner": self.inner.init(self._view(canvas))}

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        view = self._view(canvas)
        return self.inner.query(view, self._inner_state(view, state))

    def inner_decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        """What the inner decides on this output, and its next state."""
        view = self._view(canvas)
        return self.inner.decide(view, self._shown(view, output), self._inner_state(view, state))

    def own_state(self, canvas: Canvas, state: Any) -> Any:
        """The wrapper's own state, begun anew with each block if its scope is the block."""
        if self.own_scope == self.scope:
            return state["own"]
        return where_rows(canvas.step == 0, self.begin(canvas), state["own"])

    def _inner_state(self, view: Canvas, state: Any) -> Any:
        if self.inner.scope in ("row", self.scope):
            return state["inner"]
        return where_rows(view.step == 0, self.inner.init(view), state["inner"])

    def _view(self, canvas: Canvas) -> Canvas:
        """The canvas that the inner would see alone; tensors keep their width."""
        narrower = self.scope == "canvas" != self.inner.scope
        return block_view(canvas) if narrower else canvas

    def _shown(self, view: Canvas, output: Output) -> Output:
        """The output with `valid` only where it would be for the inner alone."""
        meant = view.masked if self.inner.scope == "canvas" else view.eligible
        meant = view.editable if "decided" in self.inner.needs else meant
        meant = meant.view(meant.shape[0], *[1] * (output.valid.ndim - 2), meant.shape[1])
        return Output({**output.stats, "valid": output.valid & meant})


def layers(sampler: Sampler) -> tuple[Sampler, ...]:
    """A sampler and what it wraps, outermost first."""
    return (sampler, *layers(sampler.inner)) if isinstance(sampler, Wrapper) else (sampler,)


def block_view(canvas: Canvas) -> Canvas:
    """The canvas with nothing marked outside the block's window."""
    inside = in_window(canvas)
    return replace(
        canvas,
        masked=canvas.masked & inside,
        editable=canvas.editable & inside,
        eligible=canvas.eligible & inside,
    )


def in_window(canvas: Canvas) -> Tensor:
    """Positions of the block's window, `(B, W)` bool."""
    at = canvas.positions
    return (at >= canvas.start[:, None]) & (at < canvas.stop[:, None])
