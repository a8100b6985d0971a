"""The logits of a round are those of a fresh forward, whatever was rejected before."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, MistralConfig, MistralForCausalLM

from dlm_decode.bridge import Tree, Verifier
from dlm_decode.bridge.verifier import Feed
from dlm_decode.errors import CapabilityError, RequestError
from tests.unit.bridge_cases import tiny_llama

PROMPTS = ([1], [3, 4, 5], [7, 8, 9, 10, 11, 12, 13, 14, 15], [2, 2])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def fresh(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("max_holes", [0, 5, 64])
def test_ragged_rounds_score_like_fresh_forwards(model: Any, max_holes: int) -> None:
    """Random drafts, random acceptance, one row leaving: no cache, position or padding mistake."""
    generator = random.Random(max_holes)
    session = Verifier(model, max_holes=max_holes).open(len(PROMPTS))
    rows = [list(p) for p in PROMPTS]
    for turn in range(6):
        drafts = [[generator.randrange(42) for _ in range(generator.randrange(5))] for _ in rows]
        feeds = [
            Feed(ids[cached:], draft)
            for ids, draft, cached in zip(rows, drafts, session.cached, strict=True)
        ]
        found = session.score(feeds)
        accepted = [generator.randrange(len(draft) + 1) for draft in drafts]
        session.commit([range(n) for n in accepted])
        for ids, draft, logits, count in zip(rows, drafts, found, accepted, strict=True):
            expected = fresh(model, [*ids, *draft])[len(ids) - 1 :]
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
            ids += [*draft[:count], generator.randrange(42)]
        assert session.cached == [len(ids) - 1 for ids in rows]
        assert session.valid.sum(1).tolist() == session.cached
        assert session.valid.shape[1] - max(session.cached) <= max_holes
        if turn == 2:
            session.keep_rows([0, 2, 3])
            rows = [rows[i] for i in (0, 2, 3)]
    assert session.forwards == 6


TREE = Tree((5, 6, 7, 8, 9), (-1, -1, 0, 2, 1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_node_of_a_tree_is_scored_as_its_path(attention: str) -> None:
    model = tiny_llama(attention=attention)
    session = Verifier(model).open(2)
    prompts = ([3, 4, 5], [7, 8, 9, 10])
    first, second = session.score([Feed(prompts[0], TREE.tokens, TREE.parents), Feed(prompts[1])])
    for node in range(len(TREE)):
        path = [TREE.tokens[i] for i in TREE.path(node)]
        expected = fresh(model, [*prompts[0], *path])[-1]
        torch.testing.assert_close(first[node + 1], expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(second[0], fresh(model, prompts[1])[-1], atol=2e-4, rtol=1e-4)
    session.commit([[0, 2, 3], []])
    (after, _) = session.score([Feed([11]), Feed([12])])
    expected = fresh(model, [*prompts[0], 5, 7, 8, 11])[-1]
    torch.testing.assert_close(after[0], expected, atol=2e-4, rtol=1e-4)


def test_a_tree_that_is_a_path_scores_like_a_chain(model: Any) -> None:
    (chain,) = Verifier(model).open(1).score([Feed([3, 4], (5, 6, 7))])
    (tree,) = Verifier(model).open(1).score([Feed([3, 4], (5, 6, 7), (-1, 0, 1))])
    torch.testing.assert_close(chain, tree, atol=2e-4, rtol=1e-4)


def test_a_bool_mask_is_wrong_with_eager_attention() -> None:
    """Why trees use an additive float mask: this is the trap, kept as a negative control."""
    model = tiny_llama(attention="eager")
    ids, seen = torch.tensor([[3, 4, 5]]), torch.ones(3, 3).tril().bool()[None, None]
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float16).min)
    with torch.inference_mode():
        right = model(ids, use_cache=False).logits
        by_float = model(ids, attention_mask=additive, use_cache=False).logits
        by_bool = model(ids, attention_mask=seen, use_cache=False).logits
    torch.testing.assert_close(by_float, right, atol=2e-4, rtol=1e-4)
    assert float((by_bool - right).abs().max()) > 1e-2


class TestWrongUse:
    def test_an_encoder_decoder_is_refused(self) -> None:
        config = BartConfig(
            vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=1, decoder_attention_heads=1,
            encoder_ffn_dim=8, decoder_ffn_dim=8,
        )  # fmt: skip
        with pytest.raises(CapabilityError, match="encoder-decoder"):
            Verifier(BartForConditionalGeneration(config))

    def test_a_sliding_window_is_refused(self) -> None:
        config = MistralConfig(
            vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=1, num_key_value_heads=1, sliding_window=4,
        )  # fmt: skip
        with pytest.raises(CapabilityError, match="cannot forget rejected drafts"):
            Verifier(MistralForCausalLM(config))

    def test_what_is_no_causal_model_is_refused(self) -> None:
        with pytest.raises(CapabilityError, match="must be a causal LM of transformers, got"):
            Verifier(torch.nn.Linear(1, 1))
        with pytest.raises(CapabilityError, match="no LM head"):
            Verifier(
                SimpleNamespace(
                    config=SimpleNamespace(), generate=print, get_output_embeddings=lambda: None
                )
            )

    def test_the_number_of_holes_is_checked(self, model: Any) -> None:
        with pytest.raises(CapabilityError, match="max_holes must be at least 0, got -1"):
            Verifier(model, max_holes=-1)

    @pytest.mark.parametrize(
        ("ids", "message"), [([], "is empty"), ([1, 48], "holds id 48"), ([-1], "holds id -1")]
    )
    def test_ids_are_checked(self, model: Any, ids: list[int], message: str) -> None:
        with pytest.raises(RequestError, match=message):
            Verifier(model).check_ids("prompt 0", ids)
