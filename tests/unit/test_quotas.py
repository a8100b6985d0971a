"""How many tokens a step decides: published tables, walked on remaining masks."""

from __future__ import annotations

import pytest
import torch

from dlm_decode.quotas import (
    block_steps,
    dream_quotas,
    dream_times,
    llada_quota,
    next_step,
    rounded_quota,
)
from tests.golden import golden_json, requires_golden
from tests.unit.sampler_cases import make_canvas


def llada_table(masks: int, steps: int) -> list[int]:
    s = torch.arange(steps)
    return llada_quota(torch.full_like(s, masks), torch.full_like(s, steps), s).tolist()


def dream_table(masks: int, steps: int, eps: float = 1e-3) -> list[int]:
    """The quotas of all steps when each one decides its quota."""
    table = []
    for j in range(steps):
        quotas = dream_quotas(torch.tensor([masks]), torch.tensor([steps]), eps, steps)
        table.append(int(quotas[0, j]))
        masks -= table[-1]
    return table


@pytest.mark.parametrize(
    ("masks", "steps", "table"),
    [
        (10, 4, [3, 3, 2, 2]),
        (3, 5, [1, 1, 1, 0, 0]),
        (32, 32, [1] * 32),
        (7, 1, [7]),
        (0, 3, [0, 0, 0]),
    ],
)
def test_llada_spreads_masks_with_the_rest_first(masks: int, steps: int, table: list[int]) -> None:
    assert llada_table(masks, steps) == table


@pytest.mark.parametrize(
    ("masks", "steps", "table"),
    [
        (8, 8, [0, 1, 1, 1, 1, 1, 1, 2]),
        (8, 4, [1, 2, 2, 3]),
        (16, 4, [3, 4, 4, 5]),
        (256, 128, [1, *[2] * 126, 3]),
        (5, 1, [5]),
    ],
)
def test_dream_rounds_down_and_dumps_the_rest(masks: int, steps: int, table: list[int]) -> None:
    assert dream_table(masks, steps) == table


@requires_golden
def test_published_tables() -> None:
    tables = golden_json("unit", "schedules")
    for case in tables["llada.get_num_transfer_tokens"]:
        assert llada_table(case["masks"], case["steps"]) == case["out"]
    for case in tables["sdar.get_num_transfer_tokens"]:
        assert llada_table(case["block_length"], case["steps"]) == case["out"]
    for case in tables["dream.quota"]:
        assert dream_table(case["masks"], case["steps"], case["eps"]) == case["out"]


@pytest.mark.parametrize("eps", [1e-3, 0.1, 1e-5])
def test_dream_times_are_linspace_bit_for_bit(eps: float) -> None:
    """Shares such as .999 / 333 of whole numbers lie on the edge that int() cuts at."""
    for steps in [*range(1, 70), 100, 111, 128, 333, 500, 512]:
        times = dream_times(torch.tensor([steps]), eps, steps + 3)[0]
        expected = torch.linspace(1, eps, steps + 1)
        assert torch.equal(times[: steps + 1], expected)
        assert torch.equal(times[steps + 1 :], torch.full((3,), eps))


def test_dream_quotas_of_a_row_do_not_depend_on_other_rows() -> None:
    masks, steps = torch.tensor([8, 5, 0, 30]), torch.tensor([8, 2, 4, 1])
    together = dream_quotas(masks, steps, 1e-3, 8)
    for row in range(4):
        width = int(steps[row])
        alone = dream_quotas(masks[row, None], steps[row, None], 1e-3, width)
        assert torch.equal(together[row, :width], alone[0])
        assert not together[row, width:].any()


def test_next_step_skips_steps_without_tokens() -> None:
    quotas = torch.tensor([[0, 0, 1, 4], [2, 0, 0, 4], [0, 0, 0, 0], [5, 0, 0, 0]])
    step, quota = next_step(quotas, torch.tensor([0, 1, 0, 1]))
    assert step.tolist() == [2, 3, 0, 0]
    assert quota.tolist() == [1, 4, 0, 0]


def test_block_steps_share_the_request_and_are_never_none() -> None:
    canvas = make_canvas(rows=3, blocks=[1, 4, 40])
    masks = torch.tensor([6, 0, 3])
    assert block_steps(canvas, masks, 16).tolist() == [16, 4, 1]
    assert block_steps(canvas, masks, None).tolist() == [6, 1, 3]


def rounded_table(masks: int, steps: int) -> list[int]:
    """The quotas of all steps that decide something."""
    n, left, table = torch.tensor([masks]), torch.tensor([steps]), []
    while n > 0:
        quota, left = rounded_quota(n, left)
        table.append(int(quota))
        n = n - quota
    return table


@requires_golden
def test_rounded_quotas_are_those_of_dllm() -> None:
    """Halves go down, which is what the published arithmetic comes to in every fixture."""
    tables = golden_json("unit", "schedules")["dllm.get_num_transfer_tokens(linear)"]
    for case in tables:
        assert rounded_table(case["masks"], case["steps"]) == case["out"]
    assert rounded_table(2, 3) == [1, 1], "a step that would round to nothing is skipped"
