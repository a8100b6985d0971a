"""What the engine makes of a sampler's wishes, and what one turn costs; with test-only samplers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlm_decode import memory
from dlm_decode.api import Decoder
from dlm_decode.attention import PackedAttention
from dlm_decode.caches import CACHES
from dlm_decode.engine import Engine
from dlm_decode.errors import CapabilityError, CapacityError
from dlm_decode.models import Attend, DiffusionLM, ModelInfo
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.toy import random_dream, random_llada, shuffle_task
from dlm_decode.rows import make_row
from dlm_decode.samplers import SAMPLERS, Sampler
from dlm_decode.schedules import SCHEDULES
from dlm_decode.types import Canvas, Decision, Draw, Generation, Output, Query, Request
from tests.support import full_attend

LLADA = random_llada(1, hidden=16, heads=2, vocab=32, dtype=torch.float64)
DREAM = random_dream(1, hidden=16, heads=2, kv_heads=1, vocab=32, dtype=torch.float64)
MODELS: dict[str, Backbone] = {"llada": LLADA, "dream": DREAM}
MASK, END = LLADA.info.mask_id, LLADA.info.end_ids[0]
ROW = Request([3, 5, 7], gen_length=8, block_length=8, stop_at_eos=False)
BLOCKS = replace(ROW, block_length=4)

EVERY_MODEL = pytest.mark.parametrize("model", list(MODELS))
EVERY_CACHE = pytest.mark.parametrize("cache", ["none", "prefix", "dual"])


def decode(
    model: str | DiffusionLM,
    sampler: str | Sampler,
    requests: Request | Sequence[Request],
    cache: str = "none",
    **more: Any,
) -> list[Generation]:
    made = MODELS[model] if isinstance(model, str) else model
    return Decoder(made, sampler, cache, debug=True, **more).generate(requests)


Rule = Callable[[Canvas, Output], Decision]


@dataclass(frozen=True)
class Ruled(Sampler):
    """A sampler that does as `rule` says, and notes what it was given."""

    rule: Rule = None  # type: ignore[assignment]
    asked: frozenset[str] = frozenset()
    width: str = "block"
    notes: list[tuple[Canvas, Output]] = field(default_factory=list)
    asking: Callable[[Canvas], Query | None] = lambda canvas: None

    @property
    def needs(self) -> frozenset[str]:
        return self.asked

    @property
    def scope(self) -> str:
        return self.width

    def query(self, canvas: Canvas, state: Any) -> Query | None:
        return self.asking(canvas)

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        self.notes.append((canvas, output))
        return self.rule(canvas, output), state


@dataclass(frozen=True)
class Revoking(Ruled):
    """The same, admitting that it revokes."""

    traits = frozenset({"revokes"})


def first_open(canvas: Canvas) -> Tensor:
    """The first eligible position of each row, `(B, W)`."""
    return canvas.eligible & (canvas.eligible.cumsum(-1) == 1)


def spelled(canvas: Canvas) -> Tensor:
    """A token for each position that no model has a say in."""
    return 5 + canvas.positions % 7


def in_order(canvas: Canvas, output: Output) -> Decision:
    """Commit what is spelled, from left to right."""
    return Decision(spelled(canvas), first_open(canvas))


def no(canvas: Canvas) -> Tensor:
    return torch.zeros_like(canvas.eligible)


# --------------------------------------------------------------------- what a decision may not do


def test_a_row_that_would_do_nothing_commits_its_most_probable_position() -> None:
    """Progress is the engine's promise: no sampler can waste a forward or hang a row."""
    sampler = Ruled(lambda c, o: Decision(torch.full_like(c.tokens, 1), no(c)))
    idle = decode("llada", sampler, ROW)[0]
    best = decode("llada", "llada", ROW)[0]
    assert idle.ids == best.ids, "with its candidate, not with what stands in `tokens`"
    assert idle.forwards == 8


def test_a_row_that_holds_commits_nothing_and_pays_for_the_forward() -> None:
    def rule(canvas: Canvas, output: Output) -> Decision:
        return Decision(output.top1, canvas.eligible, hold=canvas.turn >= 0)

    def waiting(canvas: Canvas, output: Output) -> Decision:
        waits = canvas.turn < 2
        return Decision(output.top1, canvas.eligible & ~waits[:, None], hold=waits)

    result = decode("llada", Ruled(waiting), ROW)[0]
    assert [len(step.positions) for step in result.trace.steps] == [0, 0, 8]
    assert result.forwards == 3
    assert decode("llada", Ruled(rule), ROW)[0].forwards == 1, "hold does not undo commits"


@EVERY_CACHE
@EVERY_MODEL
def test_a_row_that_holds_for_ever_is_made_to_finish(model: str, cache: str) -> None:
    sampler = Ruled(lambda c, o: Decision(o.top1, no(c), hold=c.turn >= 0))
    result = decode(model, sampler, BLOCKS, cache)[0]
    assert result.finish_reason == "step_cap"
    assert MASK not in result.ids
    assert result.forwards == 8 * 8 + 8 + 2


def test_commits_outside_the_eligible_are_dropped() -> None:
    """Given tokens, earlier blocks, later blocks and padding are out of reach."""

    def everywhere(canvas: Canvas, output: Output) -> Decision:
        every = torch.ones_like(canvas.eligible)
        return Decision(torch.full_like(canvas.tokens, 9), every, overwrite=~canvas.editable)

    requests = [replace(BLOCKS, suffix_ids=[1, 2], frozen={1: 4}), replace(BLOCKS, gen_length=5)]
    for width in ("block", "canvas"):
        results = decode("llada", Ruled(everywhere, width=width), requests)
        assert results[0].canvas == (3, 5, 7, 9, 4, 9, 9, 9, 9, 9, 9, 1, 2)
        assert [s.positions for s in results[0].trace.steps] == [(3, 5, 6), (7, 8, 9, 10)]
        assert results[1].canvas == (3, 5, 7, 9, 9, 9, 9, 9)


def test_the_mask_id_is_never_committed() -> None:
    """A commit of it takes the candidate, an overwrite with it does nothing."""

    def masks(canvas: Canvas, output: Output) -> Decision:
        decided = canvas.editable & ~canvas.masked
        return Decision(torch.full_like(canvas.tokens, MASK), first_open(canvas), overwrite=decided)

    result = decode("llada", Revoking(masks), ROW)[0]
    assert MASK not in result.ids
    plain = Ruled(lambda c, o: Decision(o.top1, first_open(c)))
    assert result.ids == decode("llada", plain, ROW)[0].ids


# ------------------------------------------------------------------------- fill, done, revocation


@EVERY_CACHE
def test_fill_decides_every_mask_of_the_window(cache: str) -> None:
    def rule(canvas: Canvas, output: Output) -> Decision:
        return Decision(output.top1, first_open(canvas), fill=canvas.step >= 1)

    result = decode("dream", Ruled(rule), BLOCKS, cache)[0]
    assert [s.positions for s in result.trace.steps] == [(3,), (4, 5, 6), (7,), (8, 9, 10)]


def test_fill_of_a_sampler_that_sees_the_canvas_decides_the_row() -> None:
    def rule(canvas: Canvas, output: Output) -> Decision:
        return Decision(output.top1, first_open(canvas), fill=canvas.turn >= 1)

    result = decode("dream", Ruled(rule, width="canvas"), BLOCKS)[0]
    assert [s.positions for s in result.trace.steps] == [(3,), (4, 5, 6, 7, 8, 9, 10)]


def test_done_ends_a_row_and_its_neighbours_go_on() -> None:
    """What is open takes the end id and is not counted."""

    def rule(canvas: Canvas, output: Output) -> Decision:
        return Decision(
            spelled(canvas), first_open(canvas), done=(canvas.turn >= 1) & (canvas.total == 8)
        )

    ended, other = decode("llada", Ruled(rule), [ROW, replace(ROW, gen_length=4)])
    assert ended.ids == (8, 9, *[END] * 6)
    assert (ended.tokens, ended.finish_reason, ended.forwards) == (2, "eos", 2)
    assert other.forwards == 4 and other.finish_reason == "length"


def test_done_without_an_end_id_goes_on() -> None:
    """There is nothing that could stand for what is open, and the mask may not."""
    sampler = Ruled(lambda c, o: Decision(o.top1, first_open(c), done=c.turn >= 0))
    result = decode(shuffle_task(3, offset=1), sampler, Request([0], gen_length=3))[0]
    assert sorted(result.ids) == [0, 1, 2] and result.finish_reason == "length"


@EVERY_MODEL
def test_remasked_positions_are_masks_for_the_model_and_open_again(model: str) -> None:
    """The forward after a revocation is the one before the commit, to the last bit."""

    def rule(canvas: Canvas, output: Output) -> Decision:
        back = canvas.editable & ~canvas.masked & (canvas.turn == 1)[:, None]
        chosen = first_open(canvas) & (canvas.turn != 1)[:, None]
        return Decision(spelled(canvas), chosen, remask=back)

    sampler = Revoking(rule, asked=frozenset({"logits"}))
    result = decode(model, sampler, ROW)[0]
    steps = result.trace.steps
    assert (steps[0].positions, steps[1].remasked, steps[2].positions) == ((3,), (3,), (3,))
    assert len(steps) == 10
    logits = [output.logits[canvas.eligible] for canvas, output in sampler.notes]
    assert torch.equal(logits[2], logits[0])
    assert sampler.notes[2][0].tokens[0, 0] == MASK and sampler.notes[2][0].eligible[0, 0]
    assert not torch.equal(logits[1], logits[0][1:]), "the commit in between did matter"


@EVERY_CACHE
def test_overwritten_tokens_replace_decided_ones(cache: str) -> None:
    def rule(canvas: Canvas, output: Output) -> Decision:
        late = (canvas.turn == 3)[:, None]
        decided = canvas.editable & ~canvas.masked & late
        return Decision(spelled(canvas) + late * 9, first_open(canvas), overwrite=decided)

    result = decode("llada", Revoking(rule), ROW, cache)[0]
    assert result.trace.steps[3].positions == (3, 4, 5, 6)
    assert result.ids == (17, 18, 19, 20, 5, 6, 7, 8)


@pytest.mark.parametrize("width", ["block", "canvas"])
@EVERY_CACHE
@EVERY_MODEL
def test_a_sampler_that_revokes_for_ever_is_made_to_finish(
    model: str, cache: str, width: str
) -> None:
    """With the reason "step_cap" and without masks, though it takes back all it can reach."""

    def rule(canvas: Canvas, output: Output) -> Decision:
        every = torch.ones_like(canvas.eligible)
        return Decision(output.top1, first_open(canvas), remask=every)

    sampler = Revoking(rule, width=width)
    requests = [BLOCKS, replace(BLOCKS, gen_length=3), replace(BLOCKS, frozen={0: 4})]
    for request, result in zip(requests, decode(model, sampler, requests, cache), strict=True):
        assert result.finish_reason == "step_cap"
        assert MASK not in result.canvas
        open_count = request.gen_length - len(request.frozen)
        assert 8 * open_count < result.forwards <= 8 * open_count + 8 + 4


@pytest.mark.parametrize("compat", [None, "fast-dllm"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_first_position_that_is_put_off_is_still_predicted(
    cache: str, compat: str | None
) -> None:
    """The published caches of shifted models read it from the refresh alone, and never again."""

    def rule(canvas: Canvas, output: Output) -> Decision:
        last = canvas.eligible & (canvas.eligible.flip(-1).cumsum(-1).flip(-1) == 1)
        waits = canvas.step == 0
        return Decision(output.top1, last & ~waits[:, None], hold=waits)

    result = decode("dream", Ruled(rule), BLOCKS, cache, options={"compat": compat})[0]
    assert result.finish_reason == "length" and result.forwards == 10


@pytest.mark.parametrize("width", ["block", "canvas"])
def test_blocks_left_behind_cannot_be_reopened(width: str) -> None:
    """No window comes back to them: a mask there would stay for ever."""

    def rule(canvas: Canvas, output: Output) -> Decision:
        back = canvas.editable & ~canvas.masked & (canvas.block == 1)[:, None]
        return Decision(spelled(canvas), canvas.eligible, remask=back, overwrite=back)

    result = decode("llada", Revoking(rule, width=width), BLOCKS, "dual")[0]
    assert [s.positions for s in result.trace.steps] == [(3, 4, 5, 6), (7, 8, 9, 10)]
    assert not any(s.remasked for s in result.trace.steps)


# ------------------------------------------------------------------------------- ends of a text


def fond_of_ending() -> Backbone:
    """A model whose end id is often the best one."""
    model = random_llada(2, hidden=16, heads=2, vocab=32, dtype=torch.float64)
    model.head[END] = 0.9 * model.head[[3, 6, 9, 12]].sum(0)
    return model


ENDING = fond_of_ending()
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 2], [3, 3], [10, 11]]


def ends_in(result: Generation) -> list[int]:
    return [i for i, token in enumerate(result.ids) if token == END]


def with_policy(policy: str, sampler: str = "llada", **more: Any) -> list[Generation]:
    requests = [
        Request(p, gen_length=8, block_length=8, eos=policy, stop_at_eos=False, **more)
        for p in PROMPTS
    ]
    return decode(ENDING, sampler, requests)


def test_each_policy_for_ends_matters_and_does_what_it_says() -> None:
    plain, last, banned, late = (
        with_policy(policy, eos_ban_length=5)
        for policy in ("none", "no_confidence", "banned", "ban_start")
    )
    assert any(ends_in(r) for r in plain) and any(r.ids[:5].count(END) for r in plain)
    assert not any(ends_in(r) for r in banned)
    assert all(min(ends_in(r), default=9) >= 5 for r in late) and any(ends_in(r) for r in late)
    assert any(ends_in(r) for r in last), "it may still be chosen, once nothing else is left"
    texts = [[r.ids for r in results] for results in (plain, last, banned, late)]
    assert all(texts[i] != texts[j] for i in range(4) for j in range(i))


def test_without_confidence_an_end_id_comes_after_all_else() -> None:
    """A step commits one only when every open position would be one."""
    requests = [Request(p, gen_length=8, eos="no_confidence", stop_at_eos=False) for p in PROMPTS]
    llada = SAMPLERS.create("llada")
    sampler = Ruled(lambda c, o: llada.decide(c, o, llada.init(c))[0])
    Decoder(ENDING, sampler, max_batch_size=1).generate(requests)
    ended = 0
    for canvas, output in sampler.notes:
        best = output.p1.masked_fill(~canvas.eligible, -1).argmax()
        if output.top1[0, best] == END:
            ended += 1
            assert (output.top1[canvas.eligible] == END).all()
    assert ended


@EVERY_CACHE
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stopping_at_an_end_keeps_all_before_it(temperature: float, cache: str) -> None:
    """The row stops early; what it has before its first end id is what it would have had."""
    runs = []
    for stop in (False, True):
        requests = [Request(p, gen_length=12, block_length=4, stop_at_eos=stop) for p in PROMPTS]
        runs.append(decode(ENDING, "llada", requests, cache, temperature=temperature))
    saved = 0
    for whole, stopped in zip(*runs, strict=True):
        assert stopped.tokens == whole.tokens
        assert stopped.ids[: whole.tokens] == whole.ids[: whole.tokens]
        assert stopped.finish_reason == whole.finish_reason
        assert set(stopped.ids[whole.tokens :]) <= {END} | set(whole.ids)
        saved += whole.forwards - stopped.forwards
    assert saved > 0


# ---------------------------------------------------------------------------- plain computations


def plain_logits(model: Backbone, ids: Sequence[int]) -> Tensor:
    """Logits `(N, V)` of a whole row by itself, aligned to its positions."""
    tokens = torch.tensor(ids)
    hidden = model.forward(tokens, torch.arange(len(ids)), full_attend([len(ids)]))
    logits = model.logits(hidden)
    if model.info.shift:
        logits = torch.cat([logits[:1], logits[:-1]])
    return logits


def whole(request: Request, canvas: Canvas) -> list[int]:
    """The row as it stands, from a canvas of scope "canvas" whose window starts at its span."""
    row = make_row(request, LLADA.info, SCHEDULES.create("fixed"), 0)
    ids = row.tokens.copy()
    inside = canvas.positions[0].numpy()
    keep = canvas.editable[0].numpy()
    ids[inside[keep]] = canvas.tokens[0].numpy()[keep]
    return [int(token) for token in ids]


GIVEN = Request(
    [3, MASK, 7, 4],
    gen_length=6,
    block_length=6,
    suffix_ids=[9, 2],
    frozen={1: 5},
    infill=True,
    stop_at_eos=False,
)


def expected_logits(model: Backbone, request: Request, ids: list[int], scale: float) -> Tensor:
    conditional = plain_logits(model, ids)
    if not scale:
        return conditional
    row = make_row(request, model.info, SCHEDULES.create("fixed"), 0)
    free = [t if e else MASK for t, e in zip(ids, row.editable, strict=True)]
    unconditional = plain_logits(model, free)
    return unconditional + (1 + scale) * (conditional - unconditional)


@pytest.mark.parametrize("scale", [0.0, 1.5])
@EVERY_MODEL
def test_every_turn_is_a_plain_forward_of_the_row(model: str, scale: float) -> None:
    """Holes, suffix and frozen tokens in place; with guidance a second one without the given text.

    The unconditional row has masks for all that was given, suffix included.
    """
    sampler = Ruled(in_order, asked=frozenset({"logits"}), width="canvas")
    decode(model, sampler, GIVEN, cfg_scale=scale)
    assert len(sampler.notes) == 6
    for canvas, output in sampler.notes:
        expected = expected_logits(MODELS[model], GIVEN, whole(GIVEN, canvas), scale)
        positions = canvas.positions[output.valid]
        found = output.logits[output.valid]
        banned = expected[positions].index_fill(1, torch.tensor([MASK]), -torch.inf)
        torch.testing.assert_close(found, banned, rtol=0, atol=1e-9)
        other = expected_logits(MODELS[model], GIVEN, whole(GIVEN, canvas), scale + 1)
        finite = torch.ones(32, dtype=torch.bool).index_fill(0, torch.tensor([MASK]), False)
        assert not torch.allclose(found[:, finite], other[positions][:, finite])


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@EVERY_MODEL
def test_guided_rows_have_stored_keys_of_their_own_in_each_lane(model: str, cache: str) -> None:
    """Refreshing always equals no cache; right after a refresh a window step is exact."""
    plain = decode(model, "llada", GIVEN, cfg_scale=1.5)[0]
    cached = decode(model, "llada", GIVEN, cache, cfg_scale=1.5, options={"refresh_every": 1})[0]
    assert cached.canvas == plain.canvas
    assert cached.trace.computed_positions == plain.trace.computed_positions == 2 * 12 * 6
    assert plain.canvas != decode(model, "llada", GIVEN)[0].canvas

    def patient(canvas: Canvas, output: Output) -> Decision:
        waits = canvas.step < 2
        return Decision(spelled(canvas), canvas.eligible & ~waits[:, None], hold=waits)

    sampler = Ruled(patient, asked=frozenset({"logits"}))
    decode(model, sampler, replace(ROW, suffix_ids=[4, 4]), cache, cfg_scale=1.5)
    first, second = (output.logits[canvas.eligible] for canvas, output in sampler.notes[:2])
    torch.testing.assert_close(first, second, rtol=0, atol=1e-9)


def test_frozen_offsets_and_holes_are_two_ways_to_say_the_same() -> None:
    """The same canvas gives the same text at any temperature, however it was written down."""
    frozen = Request([3], gen_length=6, block_length=6, frozen={1: 12, 4: 9}, stop_at_eos=False)
    holes = Request([3, MASK, 12, MASK, MASK, 9, MASK], gen_length=0, block_length=6, infill=True)
    suffix = Request(
        [3], gen_length=1, block_length=6, suffix_ids=[12, MASK, MASK, 9, MASK], infill=True
    )
    for temperature in (0.0, 1.0):
        results = [
            decode("dream", "llada", replace(r, stop_at_eos=False), temperature=temperature)[0]
            for r in (frozen, holes, suffix)
        ]
        assert len({r.canvas for r in results}) == 1
        assert len({r.trace.steps for r in results}) == 1


@EVERY_CACHE
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_caches_are_exact_where_nothing_outside_the_window_becomes_stale(
    temperature: float, cache: str
) -> None:
    """One layer of keys that depend on their own token only: the tabular model."""
    task = shuffle_task(5, offset=2)
    request = Request([0, 0], gen_length=5, block_length=2)
    results = [
        decode(task, "llada", request, name, temperature=temperature)[0] for name in ("none", cache)
    ]
    assert results[0].trace.steps == results[1].trace.steps
    assert sorted(results[1].ids) == [0, 1, 2, 3, 4]


# ----------------------------------------------------------------------- branches, probes, embeds


def two_more(canvas: Canvas) -> Query:
    """The row as it stands, with the token that comes next, and with another one there."""
    place = first_open(canvas)
    right = torch.where(place, spelled(canvas), canvas.tokens)
    wrong = torch.where(place, 20, canvas.tokens)
    return Query(torch.stack([canvas.tokens, right, wrong], dim=1))


@pytest.mark.parametrize("scale", [0.0, 0.7])
@EVERY_CACHE
@EVERY_MODEL
def test_a_branch_is_the_row_in_the_state_it_stands_for(
    model: str, cache: str, scale: float
) -> None:
    """Everything known of the branch with the next token is what the next turn finds.

    Draws too, for noise goes by the commits of the state. From a refresh on the next turn sees the
    same stored keys; the branch with another token is the negative control.
    """
    asked = frozenset({"p2", "entropy", "hidden"})

    def first_branch(canvas: Canvas, output: Output) -> Decision:
        return Decision(spelled(canvas), first_open(canvas))

    def run(asking: Callable[[Canvas], Query | None]) -> tuple[Ruled, list[Generation]]:
        sampler = Ruled(first_branch, asked=asked, asking=asking)
        requests = [BLOCKS, replace(ROW, gen_length=5), replace(BLOCKS, suffix_ids=[4])]
        results = decode(model, sampler, requests, cache, temperature=1.0, cfg_scale=scale)
        return sampler, results

    branched, results = run(two_more)
    single, plain = run(lambda canvas: None)
    assert [r.canvas for r in results] == [r.canvas for r in plain]
    lanes = 3
    assert [r.trace.computed_positions for r in results] == [
        lanes * r.trace.computed_positions for r in plain
    ]
    for (canvas, output), (_, alone) in zip(branched.notes, single.notes, strict=True):
        assert output.p1.shape[1] == 3
        for name, value in alone.stats.items():
            same = output.stats[name][:, 0][canvas.eligible], value[canvas.eligible]
            torch.testing.assert_close(*same, rtol=0, atol=1e-9, msg=name)
    matched = wrong = 0
    for (before, output), (after, later) in zip(branched.notes, branched.notes[1:], strict=False):
        for row, key in enumerate(before.keys.tolist()):
            if key not in after.keys.tolist():
                continue
            then = after.keys.tolist().index(key)
            stale = cache != "none" and before.step[row] == 0
            if stale or after.block[then] != before.block[row]:
                continue
            where = after.eligible[then] & before.eligible[row]
            for name in ("top1", "p1", "p2", "entropy", "sampled", "p_sampled", "hidden"):
                ours, theirs = output.stats[name][row, 1][where], later.stats[name][then, 0][where]
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8, msg=name)
            matched += 1
            other = output.stats["hidden"][row, 2][where]
            wrong += bool(len(other)) and not torch.allclose(
                other, later.stats["hidden"][then, 0][where]
            )
    assert matched > 4 and wrong > 4


@EVERY_CACHE
@EVERY_MODEL
def test_probed_logits_are_those_of_the_ids_asked_for(model: str, cache: str) -> None:
    def asking(canvas: Canvas) -> Query:
        return Query(probe=torch.stack([canvas.positions % 30, canvas.positions % 7], dim=-1))

    sampler = Ruled(in_order, asked=frozenset({"logits"}), asking=asking)
    decode(model, sampler, [BLOCKS, replace(ROW, gen_length=5)], cache)
    for canvas, output in sampler.notes:
        probe = asking(canvas).probe
        assert probe is not None
        found, expected = output.probed, output.logits.gather(-1, probe)
        assert torch.equal(found[canvas.eligible], expected[canvas.eligible])


@EVERY_CACHE
@EVERY_MODEL
def test_the_embeddings_of_the_tokens_change_nothing(model: str, cache: str) -> None:
    """In place of ids, everywhere or where weights say so; mixtures do change the outcome."""

    def embedded(own: float, where: Callable[[Canvas], Tensor]) -> Any:
        """The token's own embedding and id 9's, with weights that add up to 1 (or to 0)."""

        def asking(canvas: Canvas) -> Query:
            ids = torch.stack([canvas.tokens, torch.full_like(canvas.tokens, 9)], dim=-1)
            weights = torch.tensor([own, 1 - own], dtype=torch.float64) * where(canvas)[..., None]
            return Query(mix_ids=ids[:, None], mix_weights=weights[:, None])

        return asking

    def all_of(canvas: Canvas) -> Tensor:
        return torch.ones_like(canvas.eligible)

    asked = frozenset({"logits"})
    requests = [BLOCKS, replace(ROW, gen_length=5)]

    def logits(asking: Callable[[Canvas], Query | None]) -> list[Tensor]:
        sampler = Ruled(in_order, asked=asked, asking=asking)
        decode(model, sampler, requests, cache)
        return [output.logits[canvas.eligible] for canvas, output in sampler.notes]

    plain = logits(lambda canvas: None)
    for asking in (
        embedded(1.0, all_of),
        embedded(1.0, lambda canvas: canvas.masked),
        embedded(0.5, no),
    ):
        for ours, theirs in zip(logits(asking), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    for asking in (embedded(0.5, all_of), embedded(0.5, lambda canvas: canvas.masked)):
        assert not torch.allclose(logits(asking)[0], plain[0])


def test_a_model_without_embeddings_refuses_them() -> None:
    task = shuffle_task(3, offset=1)

    def asking(canvas: Canvas) -> Query:
        ids = canvas.tokens[:, None, :, None]
        return Query(mix_ids=ids, mix_weights=torch.ones_like(ids))

    with pytest.raises(CapabilityError, match="not embeddings"):
        decode(task, Ruled(in_order, asking=asking), Request([0], gen_length=3))


# ------------------------------------------------------------------------------------- attention


def softmax_attend(record: dict[int, Tensor]) -> Attend:
    """Full attention of one row by the formula, keeping each layer's mean over heads."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        weights = (torch.einsum("qhk,nhk->hqn", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        record[layer] = weights.mean(0)
        return torch.einsum("hqn,nhk->qhk", weights, v)

    return attend


@EVERY_CACHE
@EVERY_MODEL
def test_attention_is_the_softmax_of_the_predicting_outputs(model: str, cache: str) -> None:
    """Over absolute positions, of the outputs that predict the window; rows sum to 1.

    While nothing is committed, stored keys are those of a forward over the whole row.
    """

    def patient(canvas: Canvas, output: Output) -> Decision:
        waits = canvas.step < 2
        return Decision(spelled(canvas), canvas.eligible & ~waits[:, None], hold=waits)

    sampler = Ruled(patient, asked=frozenset({"attention"}))
    decode(model, sampler, ROW, cache)
    made = MODELS[model]
    ids = torch.tensor([*ROW.prompt_ids, *[MASK] * 8])
    record: dict[int, Tensor] = {}
    made.forward(ids, torch.arange(11), softmax_attend(record))
    mean = torch.stack(list(record.values())).mean(0)
    for canvas, output in sampler.notes[:2]:
        sources = canvas.positions[canvas.eligible] - made.info.shift
        found = output.attention[canvas.eligible]
        torch.testing.assert_close(found, mean[sources], rtol=0, atol=1e-9)
        torch.testing.assert_close(found.sum(-1), torch.ones(8, dtype=found.dtype))
        assert not torch.allclose(found, mean[sources - 1 + 2 * made.info.shift])


def test_attention_with_branches_is_refused() -> None:
    sampler = Ruled(in_order, asked=frozenset({"attention"}), asking=two_more)
    with pytest.raises(CapabilityError, match="branches"):
        decode("llada", sampler, ROW)


# ------------------------------------------------------------------------------ what a turn costs


@dataclass
class Weighing:
    """A model that notes how many tokens each forward has."""

    inner: Backbone
    info: ModelInfo = LLADA.info
    calls: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, ids: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.calls.append(len(ids))
        return self.inner.forward(ids, *rest, **named)


def test_one_transfer_to_the_host_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """`.cpu()` once, and no other read of a device value: each would stall the device."""
    copies = []
    plain = Tensor.cpu

    def counting(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copies.append(tuple(self.shape))
        return plain(self, *args, **kwargs)

    def forbidden(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a value was read on the host")

    model = Weighing(LLADA)
    decoder = Decoder(model, "threshold", "dual", temperature=1.0, max_batch_size=2)
    engine, schedule = decoder.engine, decoder.parts.schedule
    rows = [make_row(r, LLADA.info, schedule, 0) for r in (ROW, BLOCKS, replace(ROW, eos="banned"))]
    monkeypatch.setattr(Tensor, "cpu", counting)
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(Tensor, name, forbidden)
    assert all(row is not None for row, _ in engine.run(rows))
    assert len(copies) == len(model.calls) >= max(row.turn for row in rows) > 1
    with pytest.raises(AssertionError, match="on the host"):
        bool(torch.ones(1))


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor made outside of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []
        self.paused = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.paused:
            parts = result if isinstance(result, (tuple, list)) else [result]
            self.seen += [tuple(part.shape) for part in parts if isinstance(part, Tensor)]
        return result


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    noted = Shapes()
    plain = PackedAttention.__call__

    def attending(self: PackedAttention, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        noted.paused = True
        try:
            return plain(self, layer, q, k, v)
        finally:
            noted.paused = False

    monkeypatch.setattr(PackedAttention, "__call__", attending)
    return noted


def window_steps(cache: str, shapes: Shapes) -> Iterator[list[tuple[int, ...]]]:
    """Shapes made in each turn of a block that is not its first; N = 97 and W = 6."""
    decoder = Decoder(LLADA, "entropy_bound", cache, temperature=1.0, options={"gamma": 0.0})
    request = Request([3] * 73, gen_length=24, block_length=6, stop_at_eos=False)
    rows = [make_row(request, LLADA.info, decoder.parts.schedule, seed) for seed in (0, 1)]
    with shapes:
        for row, _ in decoder.engine.run(rows):
            if row is rows[-1]:
                if row.step != 1 and row.turn % 6 != 1:
                    yield shapes.seen
                shapes.seen = []


def test_a_window_step_makes_nothing_of_the_rows_length_outside_attention(shapes: Shapes) -> None:
    """Its cost goes by the window; only the keys that attention sees are as many as the row's.

    Negative control: without a cache every turn has tensors of the row's length.
    """
    steps = list(window_steps("dual", shapes))
    assert len(steps) == 20
    for seen in steps:
        assert max(max(shape, default=0) for shape in seen) < 97
    assert all(any(194 in s for s in seen) for seen in window_steps("none", shapes))


def test_finished_rows_stop_costing_and_waiting_rows_enter() -> None:
    """Two places, one long row and many short ones: the long one never waits for a batch to end."""
    model = Weighing(LLADA)
    long = Request([3], gen_length=12, stop_at_eos=False)
    short = [Request([4, i], gen_length=2, stop_at_eos=False) for i in range(6)]
    decoder = Decoder(model, "llada", max_batch_size=2)
    order = [
        g.id for g in decoder.run([replace(r, id=str(i)) for i, r in enumerate([long, *short])])
    ]
    assert order == ["1", "2", "3", "4", "5", "0", "6"]
    assert model.calls == [13 + 4] * 12
    alone = Weighing(LLADA)
    Decoder(alone, "llada", max_batch_size=1).generate([long, *short])
    assert sum(alone.calls) == sum(model.calls) and len(alone.calls) == 24


def test_a_run_that_is_left_gives_its_pages_back() -> None:
    decoder = Decoder(LLADA, "llada", "dual")
    rows = [make_row(r, LLADA.info, decoder.parts.schedule, 0) for r in (ROW, BLOCKS)]
    run = decoder.engine.run(rows)
    assert isinstance(run, Generator)
    next(run)
    assert all(row.slots for row in rows)
    run.close()
    assert not any(row.slots for row in rows)


def test_a_store_that_does_not_fit_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is computed; without a cache nothing is stored and nothing refused."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**14)
    with pytest.raises(CapacityError, match=r"K/V of 1 rows take .* bytes .*lower the batch size"):
        decode("llada", "llada", replace(ROW, gen_length=400), "dual")
    assert decode("llada", "llada", ROW)[0].finish_reason in ("length", "eos")


def test_time_is_counted_from_admission() -> None:
    """A row that waits for a place is not charged for the rows before it."""
    results = decode("llada", "llada", [ROW] * 8, max_batch_size=1)
    times = [result.trace.elapsed_s for result in results]
    assert max(times) < sum(times) / 2


def test_a_cache_for_another_kind_of_attention_is_refused_by_name() -> None:
    model = Weighing(LLADA, replace(LLADA.info, regime="block_causal"))
    parts = (SAMPLERS.create("llada"), CACHES.create("dual"), SCHEDULES.create("fixed"), Draw())
    with pytest.raises(CapabilityError, match="cache 'dual' does not fit llada"):
        Engine(model, *parts)


def test_a_huge_block_length_costs_no_more_than_the_row() -> None:
    long = decode("llada", "llada", replace(ROW, block_length=10**12))[0]
    assert long.trace.steps == decode("llada", "llada", ROW)[0].trace.steps
    assert np.shape(long.canvas) == (11,)
