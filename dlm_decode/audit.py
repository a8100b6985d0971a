"""What a cache costs in accuracy: every turn of a cached run beside a full recompute of its canvas.

Both see the same tokens: the cached run goes on with its own decisions, and the recompute says what
the logits, and the sampler's decision, would have been without a cache. Letters: N row length,
V vocabulary, n scored positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dlm_decode.attention import Group, PackedAttention
from dlm_decode.caches import CACHES
from dlm_decode.errors import CapabilityError
from dlm_decode.head import output_from_logits
from dlm_decode.models import DiffusionLM
from dlm_decode.outcome import settle
from dlm_decode.rows import Row, make_row
from dlm_decode.samplers import Sampler
from dlm_decode.types import Canvas, Decision, Output
from dlm_decode.watching import Watching

if TYPE_CHECKING:
    from dlm_decode.api import Decoder
    from dlm_decode.types import Request

FROM_LOGITS = frozenset({"p2", "top2", "entropy", "filtered", "logits", "decided"})
"""Needs that the logits alone can meet."""


@dataclass(frozen=True)
class TurnAudit:
    """One turn: what was computed, how far it was off, and how old what it saw was.

    `logit_error` and `probability_error` are the largest over the positions that could be decided;
    `top1_changed` counts those whose best token differs. `commits_differ` counts positions that one
    of the two decisions sets and the other does not, or to another token; None where the sampler
    needs more than logits. `changed` counts the positions seen whose stored K/V come from another
    token.
    """

    row: str
    turn: int
    computed: int
    seen: int
    changed: int
    logit_error: float
    probability_error: float
    top1_changed: int
    scored: int
    commits: int
    commits_differ: int | None


@dataclass(frozen=True)
class CacheReport:
    """All turns of all rows. `staleness` counts the positions seen by their K/V's age in turns."""

    cache: str
    turns: tuple[TurnAudit, ...]
    staleness: dict[int, int]
    forwards_by_kind: dict[str, int]
    computed: int
    uncached: int
    length: float

    @property
    def logit_error(self) -> float:
        return max(turn.logit_error for turn in self.turns)

    @property
    def commits_differ(self) -> int | None:
        """Over all turns; None where it can't be told."""
        counts = [t.commits_differ for t in self.turns if t.commits_differ is not None]
        return sum(counts) if len(counts) == len(self.turns) else None

    @property
    def forwards_saved(self) -> float:
        """Positions that were not computed, in forwards over a whole row."""
        return (self.uncached - self.computed) / self.length

    def as_dict(self) -> dict[str, Any]:
        summary = {
            "cache": self.cache,
            "forwards": sum(self.forwards_by_kind.values()),
            "forwards_by_kind": self.forwards_by_kind,
            "positions_computed": self.computed,
            "positions_uncached": self.uncached,
            "forwards_saved": self.forwards_saved,
            "logit_error": self.logit_error,
            "mean_logit_error": float(np.mean([t.logit_error for t in self.turns])),
            "probability_error": max(t.probability_error for t in self.turns),
            "top1_changed": sum(t.top1_changed for t in self.turns),
            "scored": sum(t.scored for t in self.turns),
            "commits": sum(t.commits for t in self.turns),
            "commits_differ": self.commits_differ,
            "staleness": {str(age): n for age, n in sorted(self.staleness.items())},
        }
        return summary | {"turns": [asdict(turn) for turn in self.turns]}


@dataclass(frozen=True)
class _Note:
    canvas: Canvas
    output: Output
    state: Any
    decision: Decision


@dataclass(frozen=True)
class _Noting(Watching):
    """Notes what it decided from."""

    extra_needs: ClassVar[frozenset[str]] = frozenset({"logits"})

    notes: list[_Note]

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        decision, after = super().decide(canvas, output, state)
        self.notes.append(_Note(canvas, output, state, decision))
        return decision, after


def audit_cache(decoder: Decoder, requests: Sequence[Request]) -> CacheReport:
    """Decode `requests` one by one, recomputing the whole row beside every turn.

    Raises `CapabilityError` for guidance and for samplers that forward something else than the
    canvas: their logits belong to no single full forward.
    """
    engine = decoder.engine
    if engine.cfg_scale > 0 or engine.sampler.asks:
        raise CapabilityError(
            "the cache audit compares forwards of the canvas as it stands: leave out guidance and "
            "samplers that forward branches or embeddings"
        )
    made = [_audit_row(decoder, request) for request in requests]
    kinds: Counter[str] = Counter()
    ages: Counter[int] = Counter()
    for row, _, staleness in made:
        kinds.update(row.forwards)
        ages.update(staleness)
    turns = [turn for _, found, _ in made for turn in found]
    return CacheReport(
        CACHES.name_of(engine.cache),
        tuple(turns),
        dict(ages),
        dict(kinds),
        sum(row.computed for row, _, _ in made),
        sum(row.length * len(found) for row, found, _ in made),
        float(np.mean([row.length for row, _, _ in made])),
    )


def _audit_row(decoder: Decoder, request: Request) -> tuple[Row, list[TurnAudit], Counter[int]]:
    inner = decoder.engine.sampler
    notes: list[_Note] = []
    noting = _Noting(inner, notes)
    object.__setattr__(noting, "traits", inner.traits)
    engine = replace(decoder.engine, sampler=noting)
    model = decoder.model
    row = make_row(request, model.info, decoder.parts.schedule, decoder.seed)
    turns: list[TurnAudit] = []
    ages: Counter[int] = Counter()
    tokens, (seen, changed) = row.tokens.copy(), (0, 0)
    for _ in engine.run([row]):
        note = notes.pop()
        computed = row.computed - sum(turn.computed for turn in turns)
        cost = (row.request.id, len(turns), computed, seen, changed)
        turns.append(_compared(cost, note, _full_logits(model, row, tokens, note.canvas), inner))
        tokens, (seen, changed) = row.tokens.copy(), _staleness(decoder, row, ages)
    return row, turns, ages


def _staleness(decoder: Decoder, row: Row, ages: Counter[int]) -> tuple[int, int]:
    """How many stored positions the next turn sees, and of how many the token has changed."""
    if not row.slots or not row.masked.any():
        return 0, 0
    plan = decoder.engine.cache.plan(row.view(decoder.model.info.shift))
    if plan.kind in ("full", "refresh"):
        return 0, 0
    slot, seen = row.slots[0], np.arange(row.length if plan.stop is None else plan.stop)
    seen = np.setdiff1d(seen, plan.query)
    ages.update((row.turn - slot.turns[seen]).tolist())
    return len(seen), int((slot.tokens[seen] != row.tokens[seen]).sum())


@torch.inference_mode()
def _full_logits(model: DiffusionLM, row: Row, tokens: np.ndarray, canvas: Canvas) -> Tensor:
    """Logits `(1, W, V)` of the window, from a forward over all of `tokens (N,)`."""
    ids = torch.from_numpy(tokens).to(model.device)
    mask = None
    if row.block_ids is not None:
        blocks = torch.from_numpy(row.block_ids).to(model.device)
        mask = (blocks[None, :] <= blocks[:, None])[None, None]
    attend = PackedAttention((Group(0, 1, len(tokens), own=True, mask=mask),))
    hidden = model.forward(ids, torch.arange(len(tokens), device=model.device), attend)
    places = (canvas.positions[0] - model.info.shift).clamp(0, len(tokens) - 1)
    return model.logits(hidden[places])[None].float()


def _compared(
    cost: tuple[str, int, int, int, int], note: _Note, full: Tensor, inner: Sampler
) -> TurnAudit:
    """The turn's logits and decision beside those of the full forward."""
    where = note.canvas.eligible & note.output.valid
    ours = note.output.logits[where].float()
    banned = ours == -torch.inf
    theirs = full[where].masked_fill(banned, -torch.inf)
    gap = (ours - theirs).masked_fill(banned, 0.0).abs()
    probabilities = (ours.softmax(-1) - theirs.softmax(-1)).abs()
    commits = note.decision.commit & note.canvas.eligible
    differ = None
    if inner.needs <= FROM_LOGITS:
        differ = _differing(note, _with_full(note, full, where, inner), inner)
    return TurnAudit(
        *cost,
        float(gap.max()),
        float(probabilities.max()),
        int((ours.argmax(-1) != theirs.argmax(-1)).sum()),
        int(where.sum()),
        int(commits.sum()),
        differ,
    )


def _with_full(note: _Note, full: Tensor, where: Tensor, inner: Sampler) -> Output:
    """The output that a full forward would have given, where the turn gave one."""
    logits = torch.where(where[..., None], full, note.output.logits)
    logits = logits.masked_fill(note.output.logits == -torch.inf, -torch.inf)
    made = output_from_logits(
        logits, needs=inner.needs | {"logits"}, draw=note.canvas.draw, canvas=note.canvas
    )
    return Output({**made.stats, "valid": note.output.valid})


def _differing(note: _Note, full: Output, inner: Sampler) -> int:
    """Positions that one of the decisions changes and the other does not, or to another token."""
    decision, _ = inner.decide(note.canvas, full, note.state)
    ours = settle(note.canvas, note.output, note.decision)
    theirs = settle(note.canvas, full, decision)
    touched = (ours.codes > 0) | (theirs.codes > 0)
    same = (ours.codes == theirs.codes) & (ours.tokens == theirs.tokens)
    return int((touched & ~same).sum())


def report_text(report: CacheReport) -> str:
    """A table of the whole run."""
    content = report.as_dict()
    differ = "unknown" if report.commits_differ is None else str(report.commits_differ)
    kinds = ", ".join(f"{n} {kind}" for kind, n in report.forwards_by_kind.items())
    lines = [
        ("cache", report.cache),
        ("forwards", f"{content['forwards']} ({kinds})"),
        ("positions computed", f"{report.computed} of {report.uncached}"),
        ("full forwards saved", f"{report.forwards_saved:.1f}"),
        ("largest logit error", f"{report.logit_error:.3g}"),
        ("mean of the turns' largest", f"{content['mean_logit_error']:.3g}"),
        ("largest probability error", f"{content['probability_error']:.3g}"),
        ("best token changed", f"{content['top1_changed']} of {content['scored']}"),
        ("commits that would differ", f"{differ} of {content['commits']}"),
        ("age of K/V seen, turns", _histogram(report.staleness)),
    ]
    return "\n".join(f"{name:<28}{value}" for name, value in lines)


def _histogram(ages: dict[int, int]) -> str:
    """Shares by doubling ages: 1, 2-3, 4-7 ..."""
    total = sum(ages.values())
    if not total:
        return "none seen"
    bins: Counter[int] = Counter()
    for age, count in ages.items():
        bins[max(age, 1).bit_length() - 1] += count
    return ", ".join(
        f"{2**b}{'' if b == 0 else f'-{2 ** (b + 1) - 1}'}: {n / total:.0%}"
        for b, n in sorted(bins.items())
    )


def save_plot(report: CacheReport, path: str | Path) -> None:
    """Error over turns and the staleness histogram; needs matplotlib (the extra `plot`)."""
    try:
        import matplotlib
    except ImportError:
        raise CapabilityError("--plot needs matplotlib: pip install 'dlm-decode[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (errors, ages) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for row in dict.fromkeys(turn.row for turn in report.turns):
        turns = [turn for turn in report.turns if turn.row == row]
        errors.plot([t.turn for t in turns], [t.logit_error for t in turns], label=row)
    errors.set(xlabel="turn", ylabel="largest logit error", title=f"cache {report.cache}")
    errors.set_yscale("symlog", linthresh=1e-6)
    ages.bar(list(report.staleness), list(report.staleness.values()))
    ages.set(xlabel="age of the K/V seen, turns", ylabel="positions seen")
    figure.savefig(path)
    pyplot.close(figure)
