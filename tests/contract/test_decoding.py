"""What decoding guarantees, for every registered sampler x cache x schedule over the toy models."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dlm_decode.caches import CACHES
from dlm_decode.errors import CapabilityError
from dlm_decode.samplers import SAMPLERS
from dlm_decode.schedules import SCHEDULES, Window
from tests.contract.cases import (
    EVERY_COMBINATION,
    EVERY_MODEL,
    EVERY_SAMPLER,
    MODELS,
    Combination,
    Observed,
    alone,
    combinations,
    decoder_of,
    fit,
    model_of,
    observe,
    outcome,
    requests_of,
    text_of,
    together,
)


@EVERY_COMBINATION
def test_ends_within_its_bound_for_a_stated_reason(case: Combination) -> None:
    """A row takes at most its turn limit and the turns in which it is made to finish.

    A sampler that cannot revoke never gets that far; "eos" is said where there is an end id.
    """
    end_ids = model_of(case.model).info.end_ids
    for seen in together(case).rows:
        row, result = seen.row, seen.generation
        assert len(seen.turns) <= row.turn_limit + 2 * row.blocks
        assert not row.masked.any()
        places = [i for i, token in enumerate(result.ids) if token in end_ids]
        if result.finish_reason != "step_cap":
            assert result.finish_reason == ("eos" if places else "length")
        if not case.revokes:
            assert result.finish_reason != "step_cap"
            assert sum(bool(step.positions) for step in result.trace.steps) <= row.editable.sum()
        assert result.tokens == (places[0] if places else len(result.ids))


@EVERY_COMBINATION
def test_commits_only_eligible_positions_and_each_once(case: Combination) -> None:
    """A turn decides masked positions of its window only; nothing decided changes again.

    A sampler that says it revokes may change decided ones, inside the window too. One whose scope
    is the canvas may fill every mask of the row at once.
    """
    for seen in together(case).rows:
        times: Counter[int] = Counter()
        for turn in seen.turns:
            committed = turn.touched
            assert seen.row.editable[committed].all()
            assert inside(turn.window, committed).all() or fills_the_row(case, seen, committed)
            if not case.revokes:
                assert not any(step.remasked for step in turn.steps)
                assert turn.masked[committed].all()
            times.update(p for step in turn.steps for p in step.positions)
        if not case.revokes:
            assert set(times.values()) <= {1}


@EVERY_COMBINATION
def test_nothing_but_the_window_changes(case: Combination) -> None:
    """Prompt, frozen spans, suffix, earlier and later blocks stay what they were in every turn.

    What is open behind an end id when the row is finished takes that id, and nothing else does.
    """
    for seen in together(case).rows:
        fixed = ~seen.row.editable
        for turn in seen.turns:
            assert np.array_equal(turn.tokens_after[fixed], seen.tokens[fixed])
            changed = (turn.tokens != turn.tokens_after) | (turn.masked != turn.masked_after)
            changed[turn.touched] = False
            assert not changed.any() or turn is seen.turns[-1]
            assert turn.masked[changed].all()
            ends = model_of(case.model).info.end_ids[:1]
            assert np.isin(turn.tokens_after[changed], ends).all()


@EVERY_COMBINATION
def test_never_emits_the_mask_id(case: Combination) -> None:
    """The mask stands only where the row is undecided, and nowhere in the end."""
    mask_id = model_of(case.model).info.mask_id
    for seen in together(case).rows:
        assert mask_id not in seen.generation.canvas
        for turn in seen.turns:
            assert all(mask_id not in step.tokens for step in turn.steps)
            assert (turn.tokens_after[~turn.masked_after] != mask_id).all()


@EVERY_COMBINATION
def test_a_row_is_the_same_alone_and_in_any_batch(case: Combination) -> None:
    """Tokens, forwards, costs and every step: ragged rows side by side, entering and leaving."""
    for seen, run in zip(together(case).rows, alone(case), strict=True):
        assert outcome(seen.generation) == outcome(run.rows[0].generation)


@EVERY_COMBINATION
def test_the_accounts_add_up(case: Combination) -> None:
    """Forwards, positions computed and commits are those that the model and the rows have seen.

    A turn is one forward and one step, or several of a sampler that looks ahead.
    """
    for run in alone(case):
        seen = run.rows[0]
        trace = seen.generation.trace
        assert trace.forwards == len(seen.turns) == len(run.calls)
        assert all(turn.steps for turn in seen.turns)
        assert sum(len(turn.steps) for turn in seen.turns) == len(trace.steps)
        assert trace.forwards == len(trace.steps) - (trace.accepted or 0)
        assert (trace.drafted or 0) >= (trace.accepted or 0) >= 0
        assert trace.computed_positions == sum(run.calls)
        decided = {p for step in trace.steps for p in step.positions}
        left = [p for p in np.flatnonzero(seen.row.editable) if p not in decided]
        ends = model_of(case.model).info.end_ids
        assert all(seen.row.tokens[p] in ends for p in left)
        assert not left or seen.row.request.stop_at_eos
    batch = together(case)
    costs = [seen.generation.trace.computed_positions for seen in batch.rows]
    assert sum(costs) == sum(batch.calls)


def test_every_part_takes_part() -> None:
    """None is refused by all the others, and with it left out of every test above."""
    cases = combinations()
    for axis, names in enumerate((SAMPLERS.names(), CACHES.names(), SCHEDULES.names(), MODELS)):
        assert {case[axis] for case in cases} == set(names)


def inside(window: Window, positions: np.ndarray) -> np.ndarray:
    return (positions >= window.start) & (positions < window.stop)


def fills_the_row(case: Combination, seen: Observed, committed: np.ndarray) -> bool:
    scope = SAMPLERS.create(case.sampler).scope
    return scope == "canvas" and not seen.turns[-1].masked_after[committed].any()


# ------------------------------------------------------------------------------ batches and seeds

PLAIN_CACHES = [name for name in ("none", "dual") if name in CACHES.names()]


@pytest.mark.parametrize("cache_name", PLAIN_CACHES)
@EVERY_SAMPLER
def test_the_order_and_size_of_the_batch_do_not_matter(sampler: str, cache_name: str) -> None:
    case = Combination(sampler, cache_name, "fixed", "dream", 1.0)
    expected = [outcome(run.rows[0].generation) for run in alone(case)]
    for order, batch in (([4, 2, 0, 1, 3], 5), ([3, 1, 4, 0, 2], 2)):
        requests = [requests_of(case.model)[i] for i in order]
        rows = observe(decoder_of(case, batch=batch), requests).rows
        assert [outcome(seen.generation) for seen in rows] == [expected[i] for i in order]


@EVERY_MODEL
@EVERY_SAMPLER
def test_the_same_seed_gives_the_same_tokens(sampler: str, model: str) -> None:
    """Nothing is drawn from a stream that an earlier run could have moved."""
    if not fit(sampler, "none", "fixed", model):
        pytest.skip("these refuse each other")
    case = Combination(sampler, "none", "fixed", model, 1.0)
    first = together(case)
    again = observe(decoder_of(case), requests_of(model))
    for one, other in zip(first.rows, again.rows, strict=True):
        assert outcome(one.generation) == outcome(other.generation)


@EVERY_MODEL
@EVERY_SAMPLER
def test_at_temperature_0_the_seed_does_not_matter(sampler: str, model: str) -> None:
    """A sampler that is random in itself says so among its traits, and does depend on it."""
    if not fit(sampler, "none", "fixed", model):
        pytest.skip("these refuse each other")
    case = Combination(sampler, "none", "fixed", model)
    try:
        other = observe(decoder_of(case, seed=1), requests_of(model))
    except CapabilityError as error:
        assert model == "tabular" and "not embeddings" in str(error)
        pytest.skip("a tabular model has no embeddings")
    same = [outcome(a.generation) for a in together(case).rows] == [
        outcome(b.generation) for b in other.rows
    ]
    assert same != ("random" in SAMPLERS.create(sampler).traits)


@EVERY_SAMPLER
def test_at_temperature_1_another_seed_gives_other_tokens(sampler: str) -> None:
    case = Combination(sampler, "none", "fixed", "llada", 1.0)
    other = observe(decoder_of(case, seed=1), requests_of("llada"))
    assert text_of(together(case)) != text_of(other)
