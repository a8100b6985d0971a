"""SEDD: its network, what its scores say of clean tokens, the noise a row is typical of."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode.api import Decoder
from dlm_decode.attention import Group, PackedAttention
from dlm_decode.caches import CACHES
from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.models.loading import find_family
from dlm_decode.models.sedd import SEDD
from dlm_decode.models.toy import from_table
from dlm_decode.types import Request
from tests.families import made
from tests.reference.sedd import log_scores
from tests.support import full_attend

MASK, HEADS = 47, SEDD.tiny["model"]["n_heads"]


def tiny() -> SEDD:
    model = made("sedd", torch.float64)
    assert isinstance(model, SEDD)
    return model


def noised_rows(shares: list[float], length: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(MASK, (len(shares), length), generator=generator)
    for row, share in zip(ids, shares, strict=True):
        row[torch.randperm(length, generator=generator)[: round(share * length)]] = MASK
    return ids


def logits(model: SEDD, ids: Tensor) -> Tensor:
    """`(B, N, V)` of rows `(B, N)`, packed, as the engine asks for them."""
    rows, length = ids.shape
    attend = PackedAttention((Group(0, rows, length, True),))
    positions = torch.arange(length).repeat(rows)
    return model.logits(model.forward(ids.flatten(), positions, attend)).unflatten(0, ids.shape)


def laws(scores: Tensor) -> Tensor:
    """Log-probabilities of the clean tokens."""
    return scores[..., :MASK].log_softmax(-1)


# ------------------------------------------------------------------------------------- network


def test_the_network_is_the_published_one() -> None:
    """Its log-scores at the noise of each row, as laws of clean tokens at the masked positions."""
    model = tiny()
    ids = noised_rows([0.25, 0.5, 1.0, 0.0], 12)
    sigma = torch.tensor([-math.log(0.75), math.log(2), -math.log(1e-3), 0.0]).double()
    torch.testing.assert_close(model.sigma(ids), sigma, atol=1e-7, rtol=0)
    ours = logits(model, ids)
    masked = ids == MASK
    for scaled in (True, False):
        theirs = log_scores(model.weights(), ids[:3], sigma[:3], heads=HEADS, scaled=scaled)
        torch.testing.assert_close(laws(ours)[:3][masked[:3]], laws(theirs)[masked[:3]])
    other = log_scores(model.weights(), ids[:3], sigma[:3] + 0.5, heads=HEADS, scaled=True)
    assert (laws(ours)[:3][masked[:3]] - laws(other)[masked[:3]]).abs().max() > 1e-2


def test_a_row_has_its_own_noise_in_any_batch() -> None:
    model = tiny()
    ids = noised_rows([0.25, 0.75], 8)
    both = logits(model, ids)
    for row, together in zip(ids, both, strict=True):
        alone = model.logits(model.forward(row, torch.arange(8), full_attend([8])))
        torch.testing.assert_close(alone, together)


def test_without_the_rows_there_is_no_noise() -> None:
    with pytest.raises(CapabilityError, match="computes whole rows"):
        tiny().forward(torch.arange(4), torch.arange(4), lambda layer, q, k, v: q)


# -------------------------------------------------------------------------------------- scores


def noisy_probability(joint: Tensor, x: tuple[int, ...], sigma: float) -> float:
    """p_sigma(x) by summing over all clean sequences; the mask is the id behind the clean ones."""
    mask, total = joint.shape[0], 0.0
    for clean in product(*(range(size) for size in joint.shape)):
        factors = [
            -math.expm1(-sigma) if seen == mask else math.exp(-sigma) * (seen == token)
            for seen, token in zip(x, clean, strict=True)
        ]
        total += float(joint[clean]) * math.prod(factors)
    return total


@pytest.mark.parametrize("sigma", [0.01, 0.7, 6.0])
def test_a_true_score_is_the_conditional_law_times_a_number_of_the_noise(sigma: float) -> None:
    """s_v = p_0(v | unmasked) / (e^sigma - 1), against the exact denoiser of a random law."""
    joint = torch.rand(3, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    joint /= joint.sum()
    exact = from_table(joint)
    mask = exact.info.mask_id
    for x in ((mask, mask, mask), (mask, 1, mask), (2, 0, mask)):
        hidden = exact.forward(torch.tensor(x), torch.arange(3), full_attend([3]))
        conditionals = exact.logits(hidden).exp()
        for i in (i for i, token in enumerate(x) if token == mask):
            revealed = [(*x[:i], v, *x[i + 1 :]) for v in range(mask)]
            below = noisy_probability(joint, x, sigma)
            score = torch.tensor([noisy_probability(joint, y, sigma) / below for y in revealed])
            assert score.sum() == pytest.approx(1 / math.expm1(sigma))
            torch.testing.assert_close((score / score.sum()).double(), conditionals[i, :mask])


def test_a_network_that_ignores_time_gives_one_law_at_every_noise() -> None:
    """And that law is what our logits say; a network that reads the time gives several."""
    model, ids = tiny(), noised_rows([0.5], 8)
    masked, sigmas = ids == MASK, torch.tensor([0.1, 1.0, 5.0]).double()

    def found() -> Tensor:
        each = (
            log_scores(model.weights(), ids, s[None], heads=HEADS, scaled=True)[masked]
            for s in sigmas
        )
        return laws(torch.stack(list(each)))

    assert found().std(0).max() > 1e-2
    for name, view in model.weights().items():
        if name.endswith("adaLN_modulation.weight"):
            view.zero_()
    same = found()
    torch.testing.assert_close(same, same[:1].expand_as(same))
    torch.testing.assert_close(same[0], laws(logits(model, ids))[masked])


# ------------------------------------------------------------------------------------- decoding


def test_decoding_asks_at_the_noise_of_each_turn() -> None:
    """One token a turn, against a loop that computes the published network at its own noise."""
    model, prompt, length = tiny(), [3, 5, 7], 6
    result = Decoder(model, "llada", options={"steps": length}).generate(
        Request(prompt, gen_length=length, block_length=length, stop_at_eos=False)
    )[0]
    row = torch.tensor([*prompt, *[MASK] * length])
    for left in range(length, 0, -1):
        sigma = -torch.tensor([1 - left / len(row)]).double().log()
        scores = log_scores(model.weights(), row[None], sigma, heads=HEADS, scaled=True)[0]
        best, token = laws(scores).max(-1)
        place = best.masked_fill(row != MASK, -torch.inf).argmax()
        row[place] = token[place]
    assert list(result.canvas) == row.tolist()


@pytest.mark.parametrize("cache", [n for n in CACHES.names() if CACHES.get(n).stores])
def test_caches_that_store_are_refused(cache: str) -> None:
    with pytest.raises(CapabilityError, match="does not fit sedd"):
        Decoder(tiny(), cache=cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph": {"type": "uniform"}}, "graph.type is 'uniform'"),
        ({"noise": {"type": "cosine"}}, "noise.type 'cosine' is neither"),
        ({"noise": None}, "noise must be an object"),
        ({"model": SEDD.tiny["model"] | {"n_heads": 5}}, "does not divide"),
        ({"tokens": 0}, "tokens must be a positive integer"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        made("sedd", **changes)


def test_published_ids_are_gpt2s_with_a_mask_behind() -> None:
    model = made("sedd", tokens=50257)
    assert (model.info.mask_id, model.info.end_ids) == (50257, (50256,))
    assert find_family(SEDD.tiny).__name__ == "SEDD"
    geometric = made("sedd", noise={"type": "geometric", "sigma_min": 1e-4, "sigma_max": 20})
    assert isinstance(geometric, SEDD) and geometric.last_sigma == 20
