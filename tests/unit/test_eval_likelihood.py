"""Monte-Carlo log-likelihoods agree with the exact expectation of their published definitions."""

from __future__ import annotations

import math

import pytest
import torch

from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.eval.likelihood import MonteCarlo, log_likelihood
from dlm_decode.models import DiffusionLM
from dlm_decode.models.toy import random_dream, random_llada
from tests.support import full_attend

CONTEXT, TARGET = [1, 2, 3], [4, 5]


@torch.inference_mode()
def loss_of(model: DiffusionLM, masked: tuple[int, ...]) -> float:
    """Cross-entropy summed over the masked positions of the target, by a plain forward."""
    row = torch.tensor(CONTEXT + TARGET)
    places = torch.tensor([len(CONTEXT) + i for i in masked])
    ids = row.clone()
    ids[places] = model.info.mask_id
    hidden = model.forward(ids, torch.arange(len(row)), full_attend([len(row)]))
    laws = model.logits(hidden[places - model.info.shift]).float().log_softmax(-1)
    return -float(laws[torch.arange(len(places)), row[places]].sum())


def test_llada_masks_every_number_of_positions_equally_often() -> None:
    """The mean over x of L / x times the mean loss of all masks of x positions."""
    model = random_llada(1)
    single = (loss_of(model, (0,)) + loss_of(model, (1,))) / 2
    expected = -(2 * single + loss_of(model, (0, 1))) / 2
    found = log_likelihood(model, CONTEXT, TARGET, MonteCarlo(2048, 32))
    assert found == pytest.approx(expected, rel=0.02)


def test_a_single_token_has_its_exact_probability() -> None:
    model = random_llada(2)
    row = [*CONTEXT, model.info.mask_id]
    with torch.inference_mode():
        hidden = model.forward(torch.tensor(row), torch.arange(len(row)), full_attend([len(row)]))
        exact = float(model.logits(hidden[-1:]).float().log_softmax(-1)[0, 7])
    assert log_likelihood(model, CONTEXT, [7], MonteCarlo(8, 4)) == pytest.approx(exact, rel=1e-5)


def test_dream_weighs_by_the_masking_probability_and_always_sees_the_end() -> None:
    """With the closing id never masked, one position is left: E[1{masked} / p] loss = loss."""
    model = random_dream(1)
    expected = -loss_of(model, (0,))
    found = log_likelihood(model, CONTEXT, TARGET, MonteCarlo(8192, 64, "dream"))
    assert found == pytest.approx(expected, rel=0.05)


def test_an_estimate_is_the_requests_own() -> None:
    model = random_llada(3)
    alone = log_likelihood(model, CONTEXT, TARGET, MonteCarlo(8, 4))
    torch.manual_seed(99)
    log_likelihood(model, CONTEXT, [6, 7], MonteCarlo(8, 4))
    assert log_likelihood(model, CONTEXT, TARGET, MonteCarlo(8, 4)) == alone
    # Two positions have three masks only, so that one other seed can draw the same ones.
    others = [MonteCarlo(8, 4, seed=seed) for seed in range(1, 6)]
    assert any(log_likelihood(model, CONTEXT, TARGET, other) != alone for other in others)


def test_what_has_no_likelihood_is_refused() -> None:
    with pytest.raises(CapabilityError, match="no tokens"):
        log_likelihood(random_llada(0), CONTEXT, [], MonteCarlo(2, 2))
    with pytest.raises(CapabilityError, match="context"):
        log_likelihood(random_dream(0), [], TARGET, MonteCarlo(2, 2))
    for draws, batch in ((3, 2), (0, 1), (2, 0)):
        with pytest.raises(OptionError, match="mc_num"):
            MonteCarlo(draws, batch)


def test_numbers_of_masks_are_stratified() -> None:
    """A batch of L draws masks each number of positions exactly once."""
    from dlm_decode.eval.likelihood import _draw_llada

    for seed in range(5):
        masked, weight = _draw_llada(6, 6, torch.Generator().manual_seed(seed))
        assert sorted(masked.sum(1).tolist()) == [1, 2, 3, 4, 5, 6]
        assert all(math.isclose(w, 6 / n) for w, n in zip(weight, masked.sum(1), strict=True))
