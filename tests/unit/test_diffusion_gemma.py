"""DiffusionGemma: transformers' own logits and `generate` for the same noise, drafts, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma as upstream

from dlm_decode.api import Decoder
from dlm_decode.attention import Group, PackedAttention
from dlm_decode.bridge import DiffusionDrafter
from dlm_decode.cli import main
from dlm_decode.errors import CapabilityError, CheckpointError, RequestError
from dlm_decode.eval.likelihood import MonteCarlo, log_likelihood
from dlm_decode.models.diffusion_gemma import SURE, DiffusionGemma
from dlm_decode.models.loading import load_model, save_model
from dlm_decode.models.toy import random_llada, random_model
from dlm_decode.samplers import SAMPLERS, renoise
from dlm_decode.types import Request
from tests.contract.cases import Counting

PROMPTS = ([2, 5, 6], [2, 5, 6, 7, 9, 3, 4, 11, 12, 17, 30])
"""The second one is longer than the sliding window."""


def random_diffusion_gemma(dtype: torch.dtype = torch.float32, **changes: Any) -> DiffusionGemma:
    """A tiny one that does not blow rounding up from turn to turn through its self-conditioning.

    Rounding differs: `generate` encodes a text canvas by canvas, and here it is encoded at once.
    """
    model = random_model("diffusion_gemma", changes=changes, dtype=dtype)
    assert isinstance(model, DiffusionGemma)
    generator = torch.Generator().manual_seed(6)
    for name, view in model.weights().items():
        noise = torch.randn(view.shape, generator=generator, dtype=torch.float64)
        scale = 0.3 if "embed_tokens" in name else view.shape[-1] ** -0.5
        view.copy_(scale * noise if view.ndim > 1 else 1 + 0.1 * noise)
    return model


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    return random_diffusion_gemma(torch.float64)


def packed(rows: list[list[int]], starts: list[int], length: int) -> tuple[Tensor, Tensor, Any]:
    """Ids, positions and attention of rows of one length."""
    attend = PackedAttention(
        (Group(0, len(rows), length, True),), windows=[(start, start + 8) for start in starts]
    )
    return torch.tensor(rows).flatten(), torch.arange(length).repeat(len(rows)), attend


# --------------------------------------------------------------------------------------- logits


@torch.no_grad()
def test_logits_are_those_of_transformers() -> None:
    """Of two canvases at different places of rows of 20, each told what was predicted before.

    What lies behind a canvas, where ids stand for nothing, changes nothing.
    """
    model = random_diffusion_gemma()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(40, (2, 20), generator=generator)
    before = torch.randn(2, 8, 48, generator=generator)
    starts = [12, 4]
    ids[1, 12:] = model.info.mask_id
    flat, positions, attend = packed(ids.tolist(), starts, 20)
    places = torch.cat([row * 20 + start + torch.arange(8) for row, start in enumerate(starts)])
    for told in (None, (places, before.flatten(0, 1))):
        ours = model.logits(model.forward(flat, positions, attend, beliefs=told))[places]
        expected = torch.cat(
            [
                model.net(
                    input_ids=row[None, :start],
                    decoder_input_ids=row[None, start : start + 8],
                    self_conditioning_logits=None if told is None else logits[None],
                ).logits[0]
                for row, start, logits in zip(ids, starts, before, strict=True)
            ]
        )
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.logits(torch.ones(1, 32), 5, 9).shape, (1, 4))


@torch.no_grad()
def test_rows_that_were_told_nothing_yet_and_given_tokens(model: DiffusionGemma) -> None:
    """-inf stands for nothing told; a token that is given counts as predicted for certain."""
    ids = torch.arange(24).view(2, 12)
    flat, positions, attend = packed(ids.tolist(), [4, 4], 12)
    places = torch.cat([torch.arange(4, 12), 12 + torch.arange(5, 12)])
    logits = torch.randn(15, 48, generator=torch.Generator().manual_seed(0)).double()
    logits[:8] = -torch.inf
    found = model.forward(flat, positions, attend, beliefs=(places, logits)).view(2, 12, -1)
    first = model.decoded(ids[:1, :4], ids[:1, 4:], None)
    torch.testing.assert_close(found[0, 4:], first[0])
    sure = torch.zeros(1, 48).double()
    sure[0, ids[1, 4]] = SURE
    second = model.decoded(ids[1:, :4], ids[1:, 4:], torch.cat([sure, logits[8:]])[None])
    torch.testing.assert_close(found[1, 4:], second[0])


# ------------------------------------------------------------------------------------- generate


class Replayed:
    """Noise of our sampler in the order it was made, handed to transformers' `generate`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.canvases, self.gumbels = monkeypatch, [], []
        self._record("random_tokens", self.canvases)
        self._record("token_gumbel", self.gumbels)

    def _record(self, name: str, into: list[Tensor]) -> None:
        plain = getattr(renoise, name)

        def noted(*args: Any) -> Tensor:
            into.append(plain(*args))
            return into[-1]

        self.patch.setattr(renoise, name, noted)

    def generate(self, model: DiffusionGemma, prompt: list[int], **settings: Any) -> list[int]:
        canvases, gumbels = iter(list(self.canvases)), iter(list(self.gumbels))
        self.patch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
        self.patch.setattr(
            upstream.EntropyBoundSampler, "initialize_canvas", lambda *_, **__: next(canvases)
        )
        self.patch.setattr(
            torch,
            "multinomial",
            lambda p, num_samples: (p.log() + next(gumbels)).argmax(-1, keepdim=True),
        )
        found = model.net.generate(torch.tensor([prompt]), **settings).sequences
        assert next(canvases, None) is None and next(gumbels, None) is None, "noise is left over"
        return found[0, len(prompt) :].tolist()


class Drafts:
    """A streamer of transformers that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def put(self, value: Tensor) -> None: ...

    def put_draft(self, value: Tensor) -> None:
        self.seen.append(value[0].tolist())

    def end(self) -> None: ...


SETTINGS: dict[str, dict[str, Any]] = {
    "all steps": {"steps": 6, "entropy_bound": 2.0},
    "one accepted": {"steps": 8, "entropy_bound": 1e-9},
    "other temperatures": {"steps": 5, "t_max": 1.0, "t_min": 0.05, "entropy_bound": 1.0},
    "settled": {"steps": 8, "t_max": 0.2, "t_min": 0.01, "entropy_bound": 3.0, "confident": 1.5},
    "settled for 2": {
        "steps": 8,
        "t_max": 0.02,
        "t_min": 0.01,
        "stable_turns": 2,
        "confident": 5.0,
    },
    "stability does not count": {"steps": 8, "stable_turns": 0, "confident": 2.5},
}


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long"])
@pytest.mark.parametrize("case", SETTINGS)
def test_ids_and_drafts_are_those_of_generate(
    case: str, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two canvases, for the same noise, draft for draft."""
    model, options = random_diffusion_gemma(), SETTINGS[case]
    noise = Replayed(monkeypatch)
    decoder = Decoder(model, "renoise", options=options, debug=True)
    frames = list(decoder.stream(Request(prompt, gen_length=16, stop_at_eos=False)))
    given = SAMPLERS.create("renoise", options)
    assert isinstance(given, renoise.Renoise)
    drafts = Drafts()
    theirs = noise.generate(
        model,
        prompt,
        streamer=drafts,
        max_new_tokens=16,
        max_denoising_steps=given.steps,
        sampler_config=upstream.EntropyBoundSamplerConfig(given.entropy_bound),
        t_min=given.t_min,
        t_max=given.t_max,
        stability_threshold=given.stable_turns,
        confidence_threshold=given.confident,
    )
    result = frames[-1].result
    assert result is not None and list(result.ids) == theirs
    shown = [list(f.ids[:8] if any(f.masked[:8]) else f.ids[8:]) for f in frames[:-1]]
    first = sum(any(f.masked[:8]) for f in frames)
    ours = [*shown[:first], theirs[:8], *shown[first + 1 :], theirs[8:]]
    assert ours == drafts.seen
    assert result.forwards == len(drafts.seen)
    if "settle" in case or "stability" in case:
        assert result.forwards < 2 * given.steps
    else:
        assert result.forwards == 2 * given.steps


def test_a_text_ends_where_generate_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an end id in the first canvas no second one is begun; what follows is not the text."""
    free = Decoder(random_diffusion_gemma(), "renoise").generate(PROMPTS[0], gen_length=8)[0]
    end = free.ids[3]
    text = DiffusionGemma.tiny["text_config"] | {"eos_token_id": end}
    model, noise = random_diffusion_gemma(text_config=text), Replayed(monkeypatch)
    result = Decoder(model, "renoise").generate(PROMPTS[0], gen_length=8)[0]
    theirs = noise.generate(
        model,
        list(PROMPTS[0]),
        max_new_tokens=8,
        max_denoising_steps=8,
        eos_token_id=end,
        pad_token_id=0,
    )
    assert result.ids[: result.tokens + 1] == tuple(theirs[: theirs.index(end) + 1])
    assert (result.finish_reason, set(theirs[theirs.index(end) + 1 :])) == ("eos", {0})
    longer = Decoder(model, "renoise").generate(Request(PROMPTS[0], gen_length=24))[0]
    assert longer.finish_reason in ("eos", "length")
    assert longer.forwards == 8 * (1 + longer.tokens // 8)


# ------------------------------------------------------------------------------- as a decoder


def test_rows_decode_the_same_alone_and_together(model: DiffusionGemma) -> None:
    requests = [
        Request(PROMPTS[0], gen_length=16, id="a"),
        Request(PROMPTS[1], gen_length=11, stop_at_eos=False, id="b"),
        Request(PROMPTS[0], gen_length=8, frozen={2: 7}, suffix_ids=[9, 9], id="c"),
        Request([2], gen_length=24, stop_at_eos=False, id="d"),
    ]
    decoder = Decoder(model, "renoise", options={"entropy_bound": 2.0}, max_batch_size=3, seed=4)
    together = decoder.generate(requests)
    for request, result in zip(requests, together, strict=True):
        alone = decoder.generate(request)[0]
        assert (alone.ids, alone.forwards) == (result.ids, result.forwards)
        assert model.info.mask_id not in result.canvas
    assert together[2].ids[2] == 7 and together[2].canvas[-2:] == (9, 9)
    other = Decoder(model, "renoise", options={"entropy_bound": 2.0}, seed=5)
    assert other.generate(requests[0])[0].ids != together[0].ids


def test_frames_show_drafts_where_nothing_is_decided(model: DiffusionGemma) -> None:
    """Of the canvas at work; what comes later has no tokens yet."""
    frames = list(Decoder(model, "renoise").stream(PROMPTS[0], gen_length=16, stop_at_eos=False))
    none = model.info.mask_id
    assert all(f.ids[8:] == (none,) * 8 for f in frames if f.masked[0])
    assert all(none not in f.ids[:8] for f in frames)
    assert len({f.ids[:8] for f in frames if f.masked[0]}) > 1
    assert frames[-1].result is not None and frames[-1].ids == frames[-1].result.ids


@pytest.mark.parametrize("sampler", ["threshold", "lrd", "credit+threshold"])
def test_samplers_that_decide_masks_are_refused(model: DiffusionGemma, sampler: str) -> None:
    with pytest.raises(CapabilityError, match="has no mask token"):
        Decoder(model, sampler)


def test_caches_guidance_and_likelihoods_are_refused(model: DiffusionGemma) -> None:
    with pytest.raises(CapabilityError, match=r"transformers' own class; take cache none"):
        Decoder(model, "renoise", "dual")
    with pytest.raises(CapabilityError, match="masks the prompt"):
        Decoder(model, "renoise", cfg_scale=1.0)
    with pytest.raises(CapabilityError, match="need masks"):
        log_likelihood(model, [2, 3], [4], MonteCarlo(2, 2))
    with pytest.raises(CapabilityError, match="mask id must be one of its ids"):
        DiffusionDrafter(model)
    with pytest.raises(RequestError, match="ids of this model run from 0 to 47"):
        Decoder(model, "renoise").generate([2, 48], gen_length=8)
    ids = torch.arange(4)
    with pytest.raises(CapabilityError, match="the rows' windows"):
        model.forward(ids, ids, PackedAttention((Group(0, 1, 4, True),)))
    with pytest.raises(CapabilityError, match="not embeddings"):
        model.forward(ids, ids, PackedAttention(()), embeds=model.embedding(ids))


def test_with_a_mask_noise_is_the_mask() -> None:
    """Every turn masks again what was not accepted, and the canvas ends with the best ids."""
    seen = []

    class Watching(Counting):
        def forward(self, ids: Tensor, *rest: Any, **more: Any) -> Tensor:
            seen.append(int((ids == self.info.mask_id).sum()))
            return super().forward(ids, *rest, **more)

    options = {"entropy_bound": 1.0, "steps": 6}
    decoder = Decoder(Watching(random_llada()), "renoise", options=options, debug=True)
    result = decoder.generate([3, 5], gen_length=8, block_length=8, stop_at_eos=False)[0]
    assert result.forwards == 6 and seen[0] == 8 and all(0 < n < 8 for n in seen[1:])
    assert random_llada().info.mask_id not in result.ids


# ---------------------------------------------------------------------------------- checkpoints


def test_saved_models_load_bit_for_bit_and_as_transformers_loads_them(tmp_path: Path) -> None:
    model = random_diffusion_gemma()
    save_model(model, tmp_path, max_shard_bytes=50_000)
    loaded = load_model(tmp_path).model
    assert isinstance(loaded, DiffusionGemma) and loaded.info == model.info
    ours, theirs = model.weights(), loaded.weights()
    assert list(ours) == list(theirs) and all(torch.equal(ours[n], theirs[n]) for n in ours)
    net, found = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(3, 13)[None]
    canvas = torch.arange(20, 28)[None]
    with torch.no_grad():
        plain, same = (
            m(input_ids=ids, decoder_input_ids=canvas).logits for m in (net.eval(), loaded.net)
        )
    torch.testing.assert_close(plain, same)


def test_inspect_says_what_is_supported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(random_diffusion_gemma(), tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["supports"]["samplers"] == ["renoise"]
    assert found["supports"]["caches"] == ["none"]
    assert found["ids"]["mask"] == [] and found["attention"]["block_length"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": 99}, "eos_token_id must be token ids, got 99"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vision_config": {"model_type": "no such"}}, "config.json: "),
    ],
)
def test_what_cannot_be_hosted_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        random_diffusion_gemma(**changes)
