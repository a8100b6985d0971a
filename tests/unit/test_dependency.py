"""Influences between positions, and the selections that go by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from dlm_decode.dependency import (
    AttentionSource,
    CosineSource,
    OracleSource,
    PredictorSource,
    attention_paid,
    bounded_greedy,
    independent_set,
    mean_received,
    pairwise,
)
from dlm_decode.errors import CapabilityError, OptionError
from tests.unit.dependency_cases import HIDDEN, make, ragged, with_states
from tests.unit.sampler_cases import make_canvas, random_logits


def random_case(seed: int, rows: int = 6, width: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Sparse influences, ranks and which positions are allowed."""
    generator = torch.Generator().manual_seed(seed)
    influence = torch.rand(rows, width, width, generator=generator, dtype=torch.float64)
    influence = influence * (influence > 0.5)
    influence.diagonal(dim1=1, dim2=2).zero_()
    rank = torch.stack([torch.randperm(width, generator=generator) for _ in range(rows)])
    return influence, rank, torch.rand(rows, width, generator=generator) > 0.2


def plain_greedy(
    influence: Tensor, rank: Tensor, allowed: Tensor, bound: float, cumulative: bool
) -> tuple[set[int], float]:
    """One row, as the rule is written down."""
    taken: list[int] = []
    total = 0.0
    for j in sorted(range(len(rank)), key=lambda p: int(rank[p])):
        d = sum(float(influence[i, j]) for i in taken)
        if allowed[j] and (total + d if cumulative else d) <= bound:
            taken.append(j)
            total += d
    return set(taken), total


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("bound", [0.0, 0.6, 1.5, 1e9])
def test_bounded_greedy_is_the_written_rule(bound: float, cumulative: bool) -> None:
    influence, rank, allowed = random_case(0)
    chosen, total = bounded_greedy(influence, rank, allowed, bound, cumulative=cumulative)
    for row in range(len(rank)):
        expected = plain_greedy(influence[row], rank[row], allowed[row], bound, cumulative)
        assert set(chosen[row].nonzero().flatten().tolist()) == expected[0]
        assert total[row] == pytest.approx(expected[1])
        if cumulative:
            assert total[row] <= bound
    if bound == 1e9:
        assert torch.equal(chosen, allowed)


def test_an_independent_set_is_independent_maximal_and_in_order() -> None:
    influence, rank, allowed = random_case(1)
    conflict = (influence > 0.8) | (influence > 0.8).transpose(-1, -2)
    chosen = independent_set(conflict, rank, allowed)
    both = chosen[:, :, None] & chosen[:, None, :]
    assert not (both & conflict).any()
    blocked = (conflict & chosen[:, :, None]).any(1)
    assert torch.equal(chosen | (blocked & allowed), allowed), "nothing more fits in"
    first = torch.where(allowed, rank, 99).argmin(-1)
    assert chosen.gather(-1, first[:, None]).all(), "the best allowed one is taken"


def test_the_selection_depends_on_the_order() -> None:
    """Only influence of earlier on later tokens counts, so D need not be symmetric."""
    influence = torch.zeros(1, 2, 2, dtype=torch.float64)
    influence[0, 0, 1] = 1.0
    both = torch.ones(1, 2).bool()
    forward, _ = bounded_greedy(influence, torch.tensor([[0, 1]]), both, 0.5, cumulative=True)
    backward, _ = bounded_greedy(influence, torch.tensor([[1, 0]]), both, 0.5, cumulative=True)
    assert forward.tolist() == [[True, False]]
    assert backward.tolist() == [[True, True]]


def test_attention_is_read_from_the_attended_to_the_attending() -> None:
    """Influence [i, j] is what the prediction of j pays to i; columns are absolute positions."""
    canvas = make_canvas(width=3)
    attention = torch.rand(1, 3, 14)
    paid = attention_paid(attention, canvas.positions)
    for i in range(3):
        for j in range(3):
            assert paid[0, i, j] == attention[0, j, 10 + i]
    influence = AttentionSource().scores(
        canvas, with_states(make("dapd"), canvas, random_logits(canvas), attention=attention), ()
    )
    assert torch.equal(influence[0], paid[0].double() * (1 - torch.eye(3)))


def test_mean_received_is_over_the_rows_that_count() -> None:
    attention = torch.tensor([[[0.2, 0.8], [0.6, 0.4], [torch.nan, torch.nan]]])
    received = mean_received(attention, torch.tensor([[True, True, False]]))
    assert received[0].tolist() == pytest.approx([0.4, 0.6])


def predictor_arrays(heads: int = 2, rank: int = 4, reach: int = 3, size: int = HIDDEN) -> dict:
    rng = np.random.default_rng(0)
    return {
        "query": rng.normal(size=(heads, rank, size)).astype(np.float32),
        "key": rng.normal(size=(heads, rank, size)).astype(np.float32),
        "bias": rng.normal(size=(heads, 2 * reach + 1)).astype(np.float32),
        "levels": np.array([0.5, 0.9], np.float32),
        "errors": np.array([0.0, 0.2], np.float32),
    }


def written(folder: Path, **arrays: np.ndarray) -> str:
    path = folder / "predictor.safetensors"
    save_file(predictor_arrays() | arrays, path)
    return str(path)


def test_pairwise_is_the_formula() -> None:
    arrays = {name: torch.tensor(a) for name, a in predictor_arrays().items()}
    hidden = torch.randn(1, 6, HIDDEN)
    found = pairwise(hidden, arrays["query"][None], arrays["key"][None], arrays["bias"][None])
    h = (hidden[0] - hidden[0].mean(-1, keepdim=True)) / (
        hidden[0].var(-1, keepdim=True, unbiased=False) + 1e-5
    ).sqrt()
    for i in range(6):
        for j in range(6):
            terms = [
                torch.sigmoid(
                    (arrays["query"][n] @ h[i]) @ (arrays["key"][n] @ h[j]) / 2
                    + arrays["bias"][n, min(max(j - i, -3), 3) + 3]
                )
                for n in range(2)
            ]
            assert float(found[0, i, j]) == pytest.approx(float(sum(terms)) / 2, abs=1e-5)


def test_a_quantile_of_the_error_is_added(tmp_path: Path) -> None:
    path, canvas = written(tmp_path), ragged()
    output = with_states(make("demask", predictor=path), canvas, random_logits(canvas))
    plain, careful = (PredictorSource(path, q) for q in (None, 0.7))
    low = plain.scores(canvas, output, plain.init(canvas))
    high = careful.scores(canvas, output, careful.init(canvas))
    off = (low > 0) & (low < 0.85)
    assert off.any()
    torch.testing.assert_close(high[off], low[off] + 0.1)
    assert high.max() <= 1


@pytest.mark.parametrize("kind", ["attention", "cosine", "predictor", "oracle"])
def test_influences_are_zero_outside_eligible_pairs(kind: str, tmp_path: Path) -> None:
    canvas = ragged()
    source = {
        "attention": AttentionSource(),
        "cosine": CosineSource(),
        "predictor": PredictorSource(written(tmp_path)),
        "oracle": OracleSource(lambda canvas, output: torch.ones(5, 7, 7)),
    }[kind]
    output = with_states(make("demask"), canvas, random_logits(canvas))
    influence = source.scores(canvas, output, source.init(canvas))
    pairs = canvas.eligible[:, :, None] & canvas.eligible[:, None, :] & ~torch.eye(7).bool()
    assert influence.dtype == torch.float64
    assert not influence[~pairs].any()
    assert influence[pairs].ge(0).all() and influence[pairs].any()


def test_a_predictor_of_another_model_is_refused(tmp_path: Path) -> None:
    path = written(
        tmp_path, query=np.zeros((1, 2, 24), np.float32), key=np.zeros((1, 2, 24), np.float32)
    )
    canvas = ragged()
    source = PredictorSource(path)
    output = with_states(make("demask"), canvas, random_logits(canvas))
    with pytest.raises(CapabilityError, match="of size 24, but this model's have 16"):
        source.scores(canvas, output, source.init(canvas))


def test_files_that_are_no_predictor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"readable safetensors file, .*nowhere"):
        make("demask", predictor=str(tmp_path / "nowhere.safetensors"))
    other = tmp_path / "other.safetensors"
    save_file({"query": np.zeros((1, 2, 3), np.float32)}, other)
    with pytest.raises(OptionError, match=r"train_demask.py, .*other.* has no 'key'"):
        make("demask", predictor=str(other))
