"""The families, their backbone and the toy models."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import log, log2
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.models import FAMILIES, DiffusionLM
from dlm_decode.models.backbone import Backbone, Block, rms_norm, rotate
from dlm_decode.models.dream import Dream
from dlm_decode.models.llada import LLaDA
from dlm_decode.models.published import Published
from dlm_decode.models.toy import (
    Tabular,
    copy_task,
    from_table,
    independent_task,
    random_dream,
    random_llada,
    replace_random_task,
    shuffle_task,
    xor_task,
)
from tests.support import attention, full_attend, row_positions

Maker = Callable[..., Backbone]
MAKERS = pytest.mark.parametrize("make", [random_llada, random_dream])


def forward(model: DiffusionLM, rows: list[Tensor]) -> Tensor:
    """Logits of packed rows, each counted from position 0."""
    lengths = [len(row) for row in rows]
    hidden = model.forward(torch.cat(rows), row_positions(lengths), full_attend(lengths))
    return model.logits(hidden)


def random_rows(model: DiffusionLM, lengths: tuple[int, ...], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(model.info.vocab_size, (n,), generator=generator) for n in lengths]


# --- the backbone


@MAKERS
def test_packed_rows_equal_rows_alone(make: Maker) -> None:
    model = make(dtype=torch.float64)
    rows = random_rows(model, (5, 17, 1, 9))
    alone = torch.cat([forward(model, [row]) for row in rows])
    torch.testing.assert_close(forward(model, rows), alone, atol=1e-12, rtol=0)


def plain_forward(model: Backbone, ids: Tensor) -> Tensor:
    """Logits of one row, from the published equations and the published tensors, in fp64."""
    c, w = model.config, {name: view.double() for name, view in model.weights().items()}

    def weight(part: str, layer: int = 0) -> Tensor:
        return w[model.names[part].format(layer)]

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.rms_eps).sqrt() * gain

    def heads(x: Tensor, part: str, layer: int) -> Tensor:
        bias = weight(f"{part}_bias", layer) if c.qkv_bias else 0.0
        return (x @ weight(part, layer).T + bias).view(len(ids), -1, c.head_size).transpose(0, 1)

    half = torch.arange(0, c.head_size, 2, dtype=torch.float64)
    angle = torch.arange(len(ids), dtype=torch.float64)[:, None] * c.rope_theta ** (
        -half / c.head_size
    )
    turn = torch.polar(torch.ones_like(angle), angle)

    def rope(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    x = weight("embed")[ids]
    for layer in range(c.layers):
        h = norm(x, weight("attn_norm", layer))
        q, k, v = (heads(h, part, layer) for part in "qkv")
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, 0) for t in (rope(k), v))
        scores = rope(q) @ k.transpose(1, 2) / c.head_size**0.5
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + mixed @ weight("out", layer).T
        h = norm(x, weight("ff_norm", layer))
        gate, up = h @ weight("gate", layer).T, h @ weight("up", layer).T
        x = x + (gate / (1 + (-gate).exp()) * up) @ weight("down", layer).T
    return norm(x, weight("norm")) @ weight("head").T


@MAKERS
def test_the_fp64_path_is_fp64_throughout(make: Maker) -> None:
    model = make(dtype=torch.float64)
    (ids,) = random_rows(model, (40,))
    expected = plain_forward(model, ids)
    torch.testing.assert_close(forward(model, [ids]), expected, atol=1e-11, rtol=0)
    rounded = make(dtype=torch.float32)
    assert (forward(rounded, [ids]) - plain_forward(rounded, ids)).abs().max() > 1e-7


@MAKERS
def test_a_cast_does_not_keep_rounded_angles(make: Maker) -> None:
    cast, made = make().double(), make(dtype=torch.float64)
    positions = torch.arange(300)
    for ours, theirs in zip(cast.rotation(positions), made.rotation(positions), strict=True):
        assert torch.equal(ours, theirs)
    assert cast.dtype == torch.float64


def test_rms_norm_rounds_before_it_scales() -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.rand(64, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), normed.bfloat16() * weight)


@pytest.mark.parametrize(("make", "kind"), [(random_llada, "float32"), (random_dream, "bfloat16")])
def test_rotation_is_rounded_as_published(make: Maker, kind: str) -> None:
    """LLaDA rotates bf16 activations in fp32; Dream rounds cosines and sines to bf16 first."""
    model = make(dtype=torch.bfloat16)
    size, theta = model.config.head_size, model.config.rope_theta
    positions = torch.tensor([0, 3, 250])
    x = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)[:, None]
    cos, sin = (t.to(getattr(torch, kind)) for t in (angles.cos(), angles.sin()))
    low, high = x.to(cos.dtype).chunk(2, -1)
    expected = (x.to(cos.dtype) * cos + torch.cat((-high, low), -1) * sin).bfloat16()
    assert model.rotation(positions)[0].dtype == cos.dtype
    assert torch.equal(rotate(x, *model.rotation(positions)), expected)


@MAKERS
def test_logits_of_a_slice_are_columns_of_all_logits(make: Maker) -> None:
    model = make(dtype=torch.float64)
    hidden = torch.randn(4, 32, dtype=torch.float64)
    tiles = [model.logits(hidden, start, start + 20) for start in (0, 20, 40)]
    assert [tile.shape[1] for tile in tiles] == [20, 20, 8]
    torch.testing.assert_close(torch.cat(tiles, 1), model.logits(hidden), atol=1e-12, rtol=0)


@MAKERS
def test_embeddings_can_stand_in_for_ids(make: Maker) -> None:
    model = make()
    (ids,) = random_rows(model, (6,))
    soft = model.forward(
        torch.zeros_like(ids), torch.arange(6), full_attend([6]), embeds=model.embed[ids]
    )
    assert torch.equal(model.logits(soft), forward(model, [ids]))


@MAKERS
def test_gradients_flow_once_asked_for(make: Maker) -> None:
    model = make()
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_(True)
    forward(model, random_rows(model, (8,))).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_parts_are_views_of_the_fused_parameters() -> None:
    block = random_dream().blocks[0]
    assert isinstance(block, Block)
    for view in block.parts().values():
        view.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in block.parameters())


@MAKERS
def test_random_models_are_unsure_in_varying_degrees_and_never_prefer_the_mask(make: Maker) -> None:
    model = make()
    mask = model.info.mask_id
    rows = random_rows(model, (24,) * 8)
    for row in rows:
        row[8:] = mask
    logits = forward(model, rows)
    top = logits.softmax(-1).amax(-1)
    assert top.min() < 0.4 and top.max() > 0.9
    assert 3.0 < logits.std() < 7.0
    assert not bool((logits.argmax(-1) == mask).any())


def test_random_weights_depend_on_the_seed_and_not_on_the_dtype() -> None:
    single, double = random_llada(3), random_llada(3, dtype=torch.float64)
    for name, view in single.weights().items():
        assert torch.equal(view, double.weights()[name].float())
    assert not torch.equal(single.embed, random_llada(4).embed)


# --- the families


def llada_config(**changes: Any) -> dict[str, Any]:
    return random_llada().published | changes


def dream_config(**changes: Any) -> dict[str, Any]:
    return random_dream().published | changes


def read_llada(**changes: Any) -> LLaDA:
    files = Published(llada_config(**changes))
    return LLaDA.from_published(files, device="meta", dtype=torch.float32)


def read_dream(**changes: Any) -> Dream:
    files = Published(dream_config(**changes))
    return Dream.from_published(files, device="meta", dtype=torch.float32)


def test_families_are_registered_and_described() -> None:
    entries = {entry.name: entry for entry in FAMILIES.entries()}
    for name in ("llada", "dream"):
        assert "arXiv:" in entries[name].paper
        assert entries[name].summary.endswith(".")


def test_configs_match_their_own_family_only() -> None:
    assert LLaDA.matches(llada_config()) and not LLaDA.matches(dream_config())
    assert Dream.matches(dream_config()) and not Dream.matches(llada_config())
    mixture = {"model_type": "llada", "architectures": ["LLaDAMoEModelLM"], "hidden_size": 64}
    assert not LLaDA.matches(mixture)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_type", "sequential"),
        ("block_group_size", 2),
        ("activation_type", "swiglu"),
        ("layer_norm_type", "default"),
        ("layer_norm_with_affine", False),
        ("attention_layer_norm", True),
        ("bias_for_layer_norm", True),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("input_emb_norm", True),
        ("scale_logits", True),
        ("alibi", True),
        ("rope", False),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("quantization_config", {"quant_method": "gptq"}),
        ("n_heads", 5),
        ("n_kv_heads", 3),
        ("n_layers", 0),
        ("d_model", "64"),
        ("vocab_size", None),
        ("embedding_size", 40),
        ("rms_norm_eps", -1.0),
        ("mask_token_id", 48),
        ("mask_token_id", None),
        ("eos_token_id", -1),
        ("pad_token_id", "pad"),
    ],
)
def test_llada_refuses_what_it_does_not_implement(field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json|token id"):
        read_llada(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 3),
        ("intermediate_size", None),
        ("mask_token_id", [1, 2]),
    ],
)
def test_dream_refuses_what_it_does_not_implement(field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_dream(**{field: value})


def test_sizes_that_config_json_leaves_open() -> None:
    assert read_llada(n_kv_heads=None).config.kv_heads == 4
    assert read_llada(n_kv_heads=None, multi_query_attention=True).config.kv_heads == 1
    assert read_llada(mlp_hidden_size=None, mlp_ratio=3).config.ffn_size == 96
    assert read_llada(embedding_size=None).config.embedding_rows == 48
    assert read_dream(num_key_value_heads=None).config.kv_heads == 4


def test_padding_rows_of_the_embedding_are_stored_but_never_predicted() -> None:
    model = read_llada(embedding_size=64)
    assert model.head.shape == (64, 32)
    assert model.info.vocab_size == 48
    assert model.logits(torch.empty(2, 32, device="meta")).shape == (2, 48)
    assert model.logits(torch.empty(2, 32, device="meta"), 40, 60).shape == (2, 8)


def test_a_tied_head_is_the_embedding() -> None:
    model = read_llada(weight_tying=True)
    assert model.head is model.embed
    assert model.names["head"] not in model.weights()


def test_shift_and_precision_are_the_familys() -> None:
    llada, dream = random_llada(), random_dream()
    assert (llada.info.shift, dream.info.shift) == (0, 1)
    assert (llada.config.qkv_bias, dream.config.qkv_bias) == (False, True)
    assert (llada.config.rope_full_precision, dream.config.rope_full_precision) == (True, False)


def word_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0])


def test_ids_come_from_config_then_tokenizer_then_generation_config() -> None:
    tokenizer = word_tokenizer("?", "<|endoftext|>", "<|mdm_mask|>", "<|eot_id|>")

    def ids(config: dict[str, Any], **files: Any) -> tuple[int, tuple[int, ...], int | None]:
        published = Published(config, **files)
        info = LLaDA.from_published(published, device="meta", dtype=torch.float32).info
        return info.mask_id, info.end_ids, info.pad_id

    bare = llada_config(mask_token_id=None, eos_token_id=None, pad_token_id=None)
    generation = {"mask_token_id": 9, "eos_token_id": [7, 8], "pad_token_id": 7}
    assert ids(llada_config()) == (44, (42,), 42)
    assert ids(llada_config(eos_token_id=[5, 6])) == (44, (5, 6), 42)
    assert ids(llada_config(), tokenizer=tokenizer) == (44, (42, 3), 42)
    assert ids(bare, tokenizer=tokenizer, generation=generation) == (2, (1, 3), 1)
    assert ids(bare, generation=generation) == (9, (7, 8), 7)
    assert ids(llada_config(), tokenizer=word_tokenizer("?")) == (44, (42,), 42)


def test_known_ids_fill_in_for_the_published_vocabularies_only() -> None:
    none = {"mask_token_id": None, "eos_token_id": None, "pad_token_id": None}
    llada = read_llada(vocab_size=126464, embedding_size=126464, **none).info
    assert (llada.mask_id, llada.end_ids, llada.pad_id) == (126336, (126081, 126348), 126081)
    dream = read_dream(vocab_size=152064, **none).info
    assert (dream.mask_id, dream.end_ids, dream.pad_id) == (151666, (151643, 151645), 151643)
    assert read_llada(eos_token_id=None).info.end_ids == ()


# --- the exact denoiser


def random_joint(n: int, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    joint = torch.rand((tokens,) * n, generator=generator, dtype=torch.float64)
    return joint * (torch.rand(joint.shape, generator=generator) < 0.6)


def brute_force(joint: Tensor, canvas: tuple[int, ...], mask: int) -> Tensor | None:
    """Conditionals `(n, V)` by slicing the table; None if the revealed tokens are impossible."""
    allowed = torch.ones_like(joint)
    for axis, token in enumerate(canvas):
        if token != mask:
            kept = F.one_hot(torch.tensor(token), joint.shape[axis]).double()
            allowed = allowed * kept.view([-1 if a == axis else 1 for a in range(joint.ndim)])
    law = joint * allowed
    if law.sum() == 0:
        return None
    others = [tuple(a for a in range(joint.ndim) if a != axis) for axis in range(joint.ndim)]
    return torch.stack([law.sum(axes) / law.sum() for axes in others])


def test_tabular_gives_the_conditionals_of_every_canvas() -> None:
    joint = random_joint(3, 3)
    model = from_table(joint)
    mask = model.info.mask_id
    possible = 0
    for canvas in product(range(4), repeat=3):
        law = forward(model, [torch.tensor(canvas)]).exp()
        expected = brute_force(joint, canvas, mask)
        if expected is None:
            expected = torch.full((3, 3), 1 / 3, dtype=torch.float64)
        else:
            possible += 1
        torch.testing.assert_close(law[:, :mask], expected, atol=1e-12, rtol=0)
        assert bool((law[:, mask] == 0).all())
    assert 20 < possible < 64


def test_tabular_rows_do_not_see_each_other() -> None:
    model = from_table(random_joint(4, 3))
    rows = [torch.tensor(row) for row in ([3, 3, 3, 3], [0, 3, 3, 1], [3, 2, 3, 3])]
    alone = torch.cat([forward(model, [row]) for row in rows])
    assert torch.equal(forward(model, rows), alone)
    assert not torch.equal(alone[:4], alone[8:])


def test_tabular_ignores_the_prompt_and_shifts() -> None:
    joint = random_joint(3, 3)
    canvas = torch.tensor([3, 1, 3])
    plain = forward(from_table(joint), [canvas])
    prompted = torch.cat((torch.tensor([0, 3, 2, 2]), canvas))
    assert torch.equal(forward(from_table(joint, offset=4), [prompted])[4:], plain)
    assert torch.equal(forward(from_table(joint, offset=4, shift=1), [prompted])[3:6], plain)


def test_tabular_reads_stored_values_and_takes_the_unseen_for_masked() -> None:
    joint = random_joint(3, 3)
    model = from_table(joint)
    full = forward(model, [torch.tensor([1, 3, 3])])

    def seen(*cells: int, canvas: tuple[int, ...]) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k[list(cells)], v[list(cells)])

        hidden = model.forward(torch.tensor(canvas), torch.arange(3), attend)
        return model.logits(hidden)

    assert torch.equal(seen(0, 1, canvas=(1, 3, 2)), full)
    assert torch.equal(seen(0, canvas=(1, 0, 2)), full)


@pytest.mark.parametrize("again", [0, 1, 3])
def test_tabular_cells_seen_twice_are_impossible(again: int) -> None:
    """A stale value visible beside the fresh one must not pass unnoticed."""
    model = shuffle_task(3)
    ids, positions = torch.tensor([0, 3, 3, again]), torch.tensor([0, 1, 2, 0])
    law = model.logits(model.forward(ids, positions, full_attend([4]))).exp()
    uniform = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0], dtype=torch.float64).expand(4, 4)
    torch.testing.assert_close(law, uniform)
    assert forward(model, [ids[:3]]).exp()[1, 0] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tabular_works_in_narrow_dtypes(dtype: torch.dtype) -> None:
    law: dict[tuple[int, ...], float] = {(0, 1, 2): 1.0, (1, 2, 0): 3.0}
    rows = [torch.tensor([3, 3, 3])]
    narrow = forward(Tabular(law, dtype=dtype), rows)
    assert narrow.dtype == dtype
    torch.testing.assert_close(narrow.double(), forward(Tabular(law), rows), atol=1e-2, rtol=1e-2)


def test_tabular_logits_are_finite_and_refuse_embeddings() -> None:
    model = copy_task([2, 0, 1])
    ids = torch.full((3,), model.info.mask_id)
    logits = forward(model, [ids])
    assert bool(logits.isfinite().all())
    assert logits.argmax(-1).tolist() == [2, 0, 1]
    with pytest.raises(CapabilityError, match="embeddings"):
        model.forward(ids, ids, full_attend([3]), embeds=logits)


def dependence(model: Tabular) -> float:
    """C(Y) in bits: the sum of the entropies of the positions less the joint entropy."""
    mask = torch.full((model.length,), model.info.mask_id)
    marginals = forward(model, [mask]).exp()
    joint = model.weights / model.weights.sum()
    return float(torch.special.entr(marginals).sum() - torch.special.entr(joint).sum()) / log(2)


def test_tasks_have_the_published_dependence() -> None:
    n = 5
    factorial = log2(120)
    assert dependence(shuffle_task(n)) == pytest.approx(n * log2(n) - factorial)
    expected = (n - 1) * (log2(n) - log2(n - 1))
    assert dependence(replace_random_task(n)) == pytest.approx(expected)
    assert dependence(copy_task([3, 1, 2])) == pytest.approx(0.0)
    assert dependence(independent_task([[0.2, 0.8], [0.5, 0.3, 0.2]])) == pytest.approx(0.0)
    assert dependence(xor_task()) == pytest.approx(1.0)


def test_xor_is_decided_by_two_bits_and_by_no_fewer() -> None:
    model = xor_task()
    one = forward(model, [torch.tensor([1, 2, 2])]).exp()
    assert one[1:, :2].flatten().tolist() == pytest.approx([0.5] * 4)
    two = forward(model, [torch.tensor([1, 0, 2])]).exp()
    assert two[2].tolist() == pytest.approx([0.0, 1.0, 0.0])
