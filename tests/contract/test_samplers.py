"""What every sampler's functions guarantee, on the inputs that the engine really gives them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dlm_decode
from dlm_decode.caches import CACHES, CachePolicy
from dlm_decode.engine import Engine
from dlm_decode.errors import CapabilityError
from dlm_decode.rows import make_row
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.schedules import SCHEDULES, Schedule
from dlm_decode.types import Canvas, Decision, Draw, Output, Query
from tests.contract.cases import EVERY_SAMPLER, model_of, requests_of
from tests.tape import Refusing

PACKAGE = Path(dlm_decode.__file__).parent
PURE = ["scores.py", "noise.py", "quotas.py"]
"""Modules whose functions samplers call, and which promise as much."""

EVERY_TEMPERATURE = pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])


@dataclass(frozen=True)
class Inputs:
    """What one turn gave a sampler."""

    canvas: Canvas
    output: Output
    state: Any


@dataclass(frozen=True)
class Tapped(Sampler):
    """A sampler that does what `inner` does, and notes what it was given."""

    inner: Sampler = None  # type: ignore[assignment]
    notes: list[Inputs] = None  # type: ignore[assignment]

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs

    @property
    def scope(self) -> str:
        return self.inner.scope

    @property
    def attention_layers(self) -> tuple[float, float]:
        return self.inner.attention_layers

    def init(self, canvas: Canvas) -> Any:
        return self.inner.init(canvas)

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        return self.inner.query(canvas, state)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        self.notes.append(Inputs(canvas, output, state))
        return self.inner.decide(canvas, output, state)


@cache
def inputs_of(sampler: str, temperature: float, made: Sampler | None = None) -> list[Inputs]:
    """The first few turns of a ragged batch, rows leaving and entering."""
    model = model_of("dream")
    notes: list[Inputs] = []
    parts: tuple[CachePolicy, Schedule] = CACHES.create("none"), SCHEDULES.create("fixed")
    tapped = Tapped(inner=made or SAMPLERS.create(sampler), notes=notes)
    engine = Engine(model, tapped, *parts, Draw(temperature), max_batch_size=3)
    rows = [make_row(r, model.info, parts[1], seed=0) for r in requests_of("dream")]
    for _ in engine.run(rows):
        if len(notes) == 6:
            break
    return notes


@EVERY_TEMPERATURE
@EVERY_SAMPLER
def test_decide_is_pure(sampler: str, temperature: float) -> None:
    """Called twice it gives the same, and its inputs are as they were."""
    made = SAMPLERS.create(sampler)
    for given in inputs_of(sampler, temperature):
        assert_pure(made, given)


def assert_pure(sampler: Sampler, given: Inputs) -> None:
    before = [t.clone() for t in tensors_of(given)]
    first, second = (sampler.decide(given.canvas, given.output, given.state) for _ in range(2))
    assert_same(tensors_of(first), tensors_of(second))
    queries = [sampler.query(given.canvas, given.state) for _ in range(2)]
    assert_same(tensors_of(queries[0]), tensors_of(queries[1]))
    assert_same(before, tensors_of(given))


@EVERY_SAMPLER
def test_what_is_stored_of_a_decided_position_comes_from_its_token(sampler: str) -> None:
    """Branch 0 of a query, whose K/V the engine stores as the row's own, differs at masks only.

    A slot notes the row's ids: a mask's K/V may come from a draft or a mixture, but they are noted
    as a mask's, and so are stale once it is decided.
    """
    made = SAMPLERS.create(sampler)
    for given in inputs_of(sampler, 0.0):
        query = made.query(given.canvas, given.state)
        decided = ~given.canvas.masked
        if query is not None and query.tokens is not None:
            assert torch.equal(query.tokens[:, 0][decided], given.canvas.tokens[decided])
        if query is not None and query.mix_weights is not None:
            assert not query.mix_weights[:, 0][decided].any()


@EVERY_SAMPLER
def test_fresh_state_is_a_tree_of_tensors_with_one_entry_a_row(sampler: str) -> None:
    """So that the engine can select, fork and begin anew each row by itself."""
    made = SAMPLERS.create(sampler)
    for given in inputs_of(sampler, 0.0):
        begun = tensors_of(made.init(given.canvas))
        _, after = made.decide(given.canvas, given.output, given.state)
        assert all(t.shape[0] == len(given.canvas.tokens) for t in begun)
        shapes = [(t.shape, t.dtype) for t in begun]
        assert [(t.shape, t.dtype) for t in tensors_of(given.state)] == shapes
        assert [(t.shape, t.dtype) for t in tensors_of(after)] == shapes


@EVERY_TEMPERATURE
@EVERY_SAMPLER
def test_a_turn_needs_no_host_sync(sampler: str, temperature: float) -> None:
    """Tensors without values: reading one, as `.item()` or `bool()` do, raises.

    So do `nonzero` and reads by a boolean mask, whose sizes depend on values, and tensors made of
    numbers of the host, which would have to be sent: a turn captured as a graph may do neither.
    """
    for given in inputs_of(sampler, temperature)[:2]:
        assert_no_sync(SAMPLERS.create(sampler), given)


def assert_no_sync(sampler: Sampler, given: Inputs) -> None:
    def turn(inputs: Inputs) -> Decision:
        sampler.init(inputs.canvas)
        sampler.query(inputs.canvas, inputs.state)
        return sampler.decide(inputs.canvas, inputs.output, inputs.state)[0]

    turn(given)  # what is sent to a device once has been sent
    with Refusing():
        turn(given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        decision = turn(faked(given, mode))
    assert decision.commit.shape == decision.tokens.shape == given.canvas.tokens.shape


def test_impure_and_syncing_samplers_are_caught() -> None:
    """Negative control: one sampler for each thing that must not be done."""
    given = inputs_of("llada", 0.0)[0]

    class Base(Sampler):
        def init(self, canvas: Canvas) -> Any:
            return ()

    class Mutating(Base):
        def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
            canvas.tokens.add_(1)
            return Decision(output.top1, canvas.eligible), state

    class Drawing(Base):
        def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
            return Decision(output.top1, canvas.eligible, scores=torch.rand_like(output.p1)), state

    class Reading(Base):
        def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
            tokens = output.top1 if canvas.eligible.any() else canvas.tokens
            return Decision(tokens, canvas.eligible), state

    class Gathering(Base):
        def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
            return Decision(output.top1, canvas.eligible & output.p1[canvas.eligible].any()), state

    class Sending(Base):
        def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
            least = torch.tensor([0.5], device=output.p1.device)
            return Decision(output.top1, canvas.eligible & (output.p1 > least)), state

    copied = replace(given, canvas=replace(given.canvas, tokens=given.canvas.tokens.clone()))
    for impure in (Mutating(), Drawing()):
        with pytest.raises(AssertionError):
            assert_pure(impure, copied)
    for syncing in (Reading(), Gathering(), Sending()):
        with pytest.raises(RuntimeError, match=r"on the host|follows from values|are sent"):
            assert_no_sync(syncing, given)


OPTIONS = {
    "dus": {"base": 3},
    "self_speculative": {"drafter": "graph"},
    "pc": {"frequencies": "frequencies.json"},
}
"""Options with which a sampler has tables of its own."""


@pytest.mark.parametrize("sampler", OPTIONS)
def test_tables_are_not_sent_every_turn(
    sampler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "frequencies.json").write_text('{"3": 5, "4": 1}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    made = SAMPLERS.create(sampler, OPTIONS[sampler])
    for given in inputs_of(sampler, 0.0, made)[:2]:
        assert_no_sync(made, given)


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor of nested containers and dataclasses, dictionaries by key."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for key in sorted(tree) for t in tensors_of(tree[key])]
    if isinstance(tree, (tuple, list)):
        return [t for value in tree for t in tensors_of(value)]
    if isinstance(tree, (Inputs, Canvas, Output, Decision, Query)):
        return [t for f in fields(tree) for t in tensors_of(getattr(tree, f.name))]
    return []


def faked(tree: Any, mode: FakeTensorMode) -> Any:
    """The same tree over tensors without values."""
    if isinstance(tree, Tensor):
        return mode.from_tensor(tree)
    if isinstance(tree, dict):
        return {key: faked(value, mode) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [faked(value, mode) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, (Inputs, Canvas, Output)):
        return replace(tree, **{f.name: faked(getattr(tree, f.name), mode) for f in fields(tree)})
    return tree


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


# ---------------------------------------------------------------------------------- source text


def writes_by_mask(source: str) -> Iterator[int]:
    """Lines that assign to `x[i]` with an index that is not plainly a constant or a slice of such.

    `x[mask] = y` reads the mask on the host; fake tensors let it pass. Dictionary keys that are
    constants are fine.
    """
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in (t for root in targets for t in ast.walk(root)):
            if isinstance(target, ast.Subscript) and not is_constant(target.slice):
                yield target.lineno


def is_constant(index: ast.expr) -> bool:
    if isinstance(index, ast.Tuple):
        return all(is_constant(part) for part in index.elts)
    if isinstance(index, ast.Slice):
        ends = (index.lower, index.upper, index.step)
        return all(end is None or is_constant(end) for end in ends)
    if isinstance(index, ast.UnaryOp):
        return is_constant(index.operand)
    return isinstance(index, ast.Constant)


SOURCES = sorted(p for p in (PACKAGE / "samplers").glob("*.py") if p.name != "__init__.py")


@pytest.mark.parametrize(
    "path", [*SOURCES, *(PACKAGE / name for name in PURE)], ids=lambda path: path.name
)
def test_no_write_by_a_boolean_mask(path: Path) -> None:
    """`x[mask] = y` hides a sync and a mutation; `torch.where` and `masked_fill` are neither."""
    assert list(writes_by_mask(path.read_text(encoding="utf-8"))) == []


def test_the_lint_sees_such_writes() -> None:
    assert list(writes_by_mask("x[mask] = 0\nx[:, m] += y\na, x[i] = 1, 2")) == [1, 2, 3]
    assert list(writes_by_mask("x[:, 0] = 1\nstate['masks'] = y\ny = x[mask]\nx[-1:] = 0")) == []


@EVERY_SAMPLER
def test_a_sampler_has_a_file_of_its_name(sampler: str) -> None:
    """The file name is the registry name, so that a decoder is found without a search."""
    cls = SAMPLERS.get(sampler)
    if cls.__module__.startswith("dlm_decode."):
        assert cls.__module__ == f"dlm_decode.samplers.{sampler}"


@EVERY_SAMPLER
def test_unmet_needs_are_refused_not_ignored(sampler: str) -> None:
    """A sampler that wants what no engine offers is refused by name when the engine is made."""

    @dataclass(frozen=True)
    class Wanting(Tapped):
        @property
        def needs(self) -> frozenset[str]:
            return self.inner.needs | {"telepathy"}

    wanting = Wanting(inner=SAMPLERS.create(sampler), notes=[])
    with pytest.raises(CapabilityError, match="telepathy"):
        Engine(model_of("llada"), wanting, CACHES.create("none"), SCHEDULES.create("fixed"), Draw())
