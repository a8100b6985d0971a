"""D2F: several blocks in flight, when they open, what they may commit, and the published traces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dlm_decode.api import Decoder, load
from dlm_decode.cli import main
from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.models import forced
from dlm_decode.models.published import Family
from dlm_decode.models.toy import random_dream, random_sdar
from dlm_decode.rows import make_row
from dlm_decode.samplers import SAMPLERS
from dlm_decode.schedules import SCHEDULES, Span, Window
from dlm_decode.types import Output, Request
from tests.golden import Case, golden_cases, golden_path, requires_golden
from tests.unit.sampler_cases import chosen, decide, logits_with_top, make_canvas, output_of
from tests.unit.test_golden_decode import rows_of

DREAM = "dream-tiny-a"


def model_of(block: int) -> Family:
    """Dream's weights under D2F's attention."""
    return load(golden_path(DREAM), dtype="float32", forcing=block).model


def cases() -> list[Any]:
    found = golden_cases(DREAM, "decode_lopa_d2f")
    return [pytest.param(c, id=c["name"]) for c in found if c["decoder"] == "lopa.d2f_single"]


@requires_golden
@pytest.mark.parametrize("cache", ["none", "block_causal"])
@pytest.mark.parametrize("case", cases())
def test_the_published_pipeline(case: Case, cache: str) -> None:
    s, (prompt,) = case["settings"], rows_of(case)
    options = {
        "d2f.threshold": s["skip_threshold"],
        "d2f.activation": s["decoded_token_threshold"],
        "schedule.add": s["block_add_threshold"],
    }
    model = model_of(s["block_size"])
    decoder = Decoder(model, "d2f", cache, "pipeline", options=options, debug=True)
    request = Request(prompt, gen_length=s["max_new_tokens"], stop_at_eos=False)
    (result,) = decoder.generate(request)
    (final,) = case["final_ids"]
    assert list(result.ids[: len(final)]) == final
    if len(final) < s["max_new_tokens"]:
        assert case["name"] == "d2f_b8", "the published loop opens no block behind an end of text"
        return
    assert result.forwards == case["nfe"]
    if cache == "block_causal":
        rows = sum(query for _, _, query in case["forwards"])
        leads = result.trace.computed_positions - rows
        assert 0 <= leads < result.forwards, "but for the row that predicts the first open token"


def test_a_prompt_can_be_one_block() -> None:
    info = forced(random_dream().info, 2)
    row = make_row(Request([3] * 5, gen_length=5, block_length=2), info, PIPELINE, seed=0)
    assert row.block_ids is not None
    assert row.block_ids.tolist() == [-1] * 5 + [0, 0, 1, 1, 2]


def test_forcing_is_refused_with_the_reason() -> None:
    with pytest.raises(CapabilityError, match="which sdar does not have"):
        forced(random_sdar().info, 8)
    with pytest.raises(OptionError, match="at least 1, got 0"):
        forced(random_dream().info, 0)


def test_the_command_line_decodes_with_blocks_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", "--prompt", "1+1=", "--gen-length", "16", "--forcing", "4"]
    assert (
        main([*given, "--sampler", "d2f", "--schedule", "pipeline", "--cache", "block_causal"]) == 0
    )
    assert capsys.readouterr().out
    assert main([*given, "--cache", "dual"]) == 2
    assert "block_causal" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- schedule

PIPELINE = SCHEDULES.create("pipeline", {"add": 0.5})


def test_a_block_opens_once_the_last_one_is_decided_in_part() -> None:
    span = Span(4, 14, 4)
    masked = np.ones(16, dtype=bool)
    window = PIPELINE.first(span)
    assert window == Window(4, 8) and PIPELINE.widest(span) == 10 and PIPELINE.blocks(span) == 3
    masked[5] = False
    assert PIPELINE.advance(span, window, masked) == window
    masked[6] = False
    window = PIPELINE.advance(span, window, masked)
    assert window == Window(4, 12), "two of four"
    assert PIPELINE.advance(span, window, masked) == window, "the last one counts"
    masked[[8, 9, 10, 11]] = False
    window = PIPELINE.advance(span, window, masked)
    assert window == Window(4, 14), "the first one is not finished"
    masked[[4, 7]] = False
    assert PIPELINE.advance(span, window, masked) == Window(12, 14, 2), "two were"


@pytest.mark.parametrize("stops", [True, False])
def test_no_block_opens_behind_the_end_of_the_row(stops: bool) -> None:
    info = forced(random_dream().info, 4)
    end = info.end_ids[0]
    row = make_row(Request([3] * 4, gen_length=12, stop_at_eos=stops), info, PIPELINE, seed=0)
    row.tokens[6:8], row.masked[6:8] = (5, end), False
    row.advance(PIPELINE, end_ids=info.end_ids)
    assert row.window.stop == (8 if stops else 12)
    row.tokens[7] = 5
    row.advance(PIPELINE, end_ids=info.end_ids)
    assert row.window.stop == 12, "the end was taken back"


def test_a_window_always_has_a_mask() -> None:
    span, masked = Span(0, 12, 4), np.zeros(12, dtype=bool)
    masked[10] = True
    assert PIPELINE.advance(span, Window(0, 4), masked) == Window(8, 12, 2)


# -------------------------------------------------------------------------------------- sampler


def committed(confidences: list[float], masked: list[int], **options: float) -> list[int]:
    """What is committed in a window of three blocks of 3."""
    open_ = torch.tensor([[i in masked for i in range(9)]])
    canvas = replace(make_canvas(masked=open_), block_length=torch.tensor([3]))
    return chosen(decide(SAMPLERS.create("d2f", options), canvas, logits_with_top(confidences)))


def test_a_block_is_forced_only_once_the_one_before_it_is_nearly_done() -> None:
    unsure = [0.3, 0.5, 0.4, 0.35, 0.6, 0.25, 0.7, 0.3, 0.2]
    every = list(range(9))
    assert committed(unsure, every) == [1]
    assert committed(unsure, every, activation=0.0) == [1, 4, 6]
    assert committed(unsure, [2, *every[3:]], activation=0.6) == [2, 4]
    assert committed(unsure, [2, *every[3:]], activation=0.7) == [2]
    assert committed([*unsure[:6], 0.95, 0.3, 0.97], every) == [1, 6, 8], "sure ones need no leave"
    assert committed([0.95, *unsure[1:]], every) == [0], "nothing is forced beside a sure one"


def test_equally_sure_positions_go_left_to_right() -> None:
    sampler = SAMPLERS.create("d2f", {"activation": 0.0})
    canvas = replace(make_canvas(width=6), block_length=torch.tensor([3]))
    p1 = torch.tensor([[0.3, 0.5, 0.5, 0.4, 0.4, 0.4]])
    stats = output_of(sampler, canvas, logits_with_top([0.5] * 6)).stats
    assert chosen(sampler.decide(canvas, Output({**stats, "p1": p1}), ())[0]) == [1, 3]


TOY = random_sdar(2, hidden=16, heads=2, kv_heads=1, vocab=32, dtype=torch.float64)


def toy_steps(sampler: str, cache: str, schedule: str, **options: Any) -> list[Any]:
    request = Request([3, 5, 7], gen_length=24, block_length=4, stop_at_eos=False)
    decoder = Decoder(TOY, sampler, cache, schedule, options=options, debug=True)
    return [(s.positions, s.tokens) for s in decoder.generate(request)[0].trace.steps]


@pytest.mark.parametrize("cache", ["none", "block_causal"])
def test_with_one_block_at_a_time_it_is_the_threshold_decoder(cache: str) -> None:
    ours = toy_steps("d2f", cache, "absolute_aligned", threshold=0.3)
    assert ours == toy_steps("threshold", cache, "absolute_aligned", threshold=0.3, strict=True)


def test_blocks_in_flight_take_fewer_forwards_and_lose_nothing_to_the_cache() -> None:
    ahead = toy_steps("d2f", "block_causal", "pipeline", threshold=0.7)
    assert ahead == toy_steps("d2f", "none", "pipeline", threshold=0.7)
    assert len(ahead) < len(toy_steps("d2f", "none", "fixed", threshold=0.7))
