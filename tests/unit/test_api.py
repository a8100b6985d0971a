"""The Python interface: prompts of every form, options to the right part, draws, text, order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from dlm_decode import api
from dlm_decode.api import Decoder, build_parts
from dlm_decode.caches import CACHES
from dlm_decode.caches.dual import Dual
from dlm_decode.errors import (
    CapabilityError,
    CheckpointError,
    DlmDecodeError,
    OptionError,
    RequestError,
    UnknownNameError,
)
from dlm_decode.models.loading import LoadedModel
from dlm_decode.models.toy import random_llada
from dlm_decode.samplers import SAMPLERS
from dlm_decode.schedules import SCHEDULES
from dlm_decode.types import Draw, Frame, Generation, Request

MODEL = random_llada(2, hidden=16, heads=2, vocab=32, max_positions=160, dtype=torch.float64)
MASK, END = MODEL.info.mask_id, MODEL.info.end_ids[0]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'nobody' %}{{ raise_exception('who?') }}{% endif %}"
    "w20 {{ m['content'] }} w21 {% endfor %}{% if add_generation_prompt %}w22{% endif %}"
)


def words(chat: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are w0 ... w31; w26 ends a text, w28 is the mask."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="w26",
        mask_token="w28",
        chat_template=TEMPLATE if chat else None,
    )


TOKENIZER = words()


def decoder_of(sampler: str = "llada", *, chat: bool = True, **more: Any) -> Decoder:
    return Decoder(MODEL, sampler, tokenizer=words(chat), **more)


def ids_of(results: list[Generation]) -> list[tuple[int, ...]]:
    return [result.ids for result in results]


# ----------------------------------------------------------------------------------------- prompts


def test_every_form_of_a_prompt_says_the_same() -> None:
    """Text, messages, ids and a request; alone and in lists, tuples and generators."""
    decoder = decoder_of()
    ids = [20, 3, 4, 21, 22]
    text, messages = "w3 w4", [{"role": "user", "content": "w3 w4"}]
    request = Request(ids, gen_length=4)
    expected = decoder.generate(request)[0].ids
    for prompt in (text, messages, tuple(messages), ids, tuple(ids), request):
        assert ids_of(decoder.generate(prompt, gen_length=4)) == [expected], prompt
    mixed: list[Any] = [text, messages, ids, request]
    for prompts in (mixed, tuple(mixed), (p for p in mixed), mixed[::-1], [tuple(ids), *mixed]):
        results = decoder.generate(prompts, gen_length=4)
        assert set(ids_of(results)) == {expected}
    assert len(decoder.generate([ids, ids], gen_length=2)) == 2
    assert len(decoder.generate([messages, messages], gen_length=2)) == 2
    assert decoder.generate([]) == [] and list(decoder.stream([])) == []


def test_text_is_a_chat_turn_unless_told_otherwise() -> None:
    assert decoder_of().encode("w3 w4") == [20, 3, 4, 21, 22]
    assert decoder_of().encode("w3 w4", chat=False) == [3, 4]
    assert decoder_of(chat=False).encode("w3 w4") == [3, 4]
    conversation = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    assert decoder_of().encode(conversation) == [20, 5, 21, 20, 6, 21, 22]
    assert decoder_of().request("w3", chat=False, gen_length=2).prompt_ids == [3]


def test_settings_are_fields_of_the_request() -> None:
    decoder = decoder_of()
    made = decoder.request(
        [1, 2], gen_length=5, block_length=2, frozen={1: 4}, eos="banned", id="x"
    )
    assert made == Request([1, 2], 5, 2, frozen={1: 4}, eos="banned", id="x")
    assert decoder.request(made, gen_length=7) == replace(made, gen_length=7)
    with pytest.raises(RequestError, match="did you mean 'gen_length'"):
        decoder.generate([1, 2], gen_lenght=5)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", RequestError, "the prompt is empty"),
        ("  \n", RequestError, "the prompt is empty"),
        ([[]], RequestError, "the prompt is empty"),
        ([[1], []], RequestError, "the prompt is empty"),
        ([[1], [99]], RequestError, r"prompt_ids\[0\] is 99"),
        (5, RequestError, "prompts must be texts, chats, lists of ids or one, got 5"),
        (None, RequestError, "prompts must be texts, chats, lists of ids or one, got None"),
        ({"prompt": "w1"}, RequestError, "prompts must be texts, chats, lists of ids or one"),
        (b"w1", RequestError, "prompts must be texts, chats, lists of ids or one"),
        ("w1 \ud800", RequestError, "half of a surrogate pair"),
        ([{"role": "nobody", "content": "w1"}], RequestError, "the chat template refuses.*who"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(
    prompt: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        decoder_of().generate(prompt)


def test_what_needs_a_tokenizer_says_so() -> None:
    bare = Decoder(MODEL, "llada")
    for prompt in ("w1", [{"role": "user", "content": "w1"}]):
        with pytest.raises(CapabilityError, match="needs a tokenizer, and this model has none"):
            bare.generate(prompt)
    with pytest.raises(CapabilityError, match="a stop string needs a tokenizer"):
        bare.generate([1, 2], stop=["w3"])
    with pytest.raises(CapabilityError, match="has no chat template: give plain text"):
        decoder_of(chat=False).generate([{"role": "user", "content": "w1"}])
    assert bare.generate([1, 2], gen_length=2)[0].text is None


def test_one_bad_request_is_told_before_any_is_decoded() -> None:
    decoder = decoder_of()
    run = decoder.run([Request([1], gen_length=2), Request([1], gen_length=0)])
    with pytest.raises(RequestError, match="gen_length"):
        next(run)


# -------------------------------------------------------------------------------------------- text


def written(gen: list[int | None], **settings: Any) -> Generation:
    """A row whose generated tokens are given, but for one that the model decides."""
    frozen = {i: token for i, token in enumerate(gen) if token is not None}
    return decoder_of().generate([1, 2], gen_length=len(gen), frozen=frozen, **settings)[0]


def test_text_ends_before_the_first_end_id() -> None:
    result = written([3, 5, END, 7, None])
    assert (result.text, result.tokens, result.finish_reason) == ("w3 w5", 2, "eos")
    assert len(result.ids) == 5
    whole = written([3, 5, 7, None], eos="banned")
    assert whole.text == f"w3 w5 w7 w{whole.ids[3]}"
    assert (whole.tokens, whole.finish_reason) == (4, "length")


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["w7"], "w3 w5 "),
        (["w9", "w5", "w7"], "w3 "),
        (["w7", "w5"], "w3 "),
        (["w5 w7"], "w3 "),
        (["absent"], "w3 w5 w7"),
        ([], "w3 w5 w7"),
    ],
)
def test_text_is_cut_at_the_earliest_stop_string(stop: list[str], text: str) -> None:
    """The ids stay whole."""
    result = written([3, 5, 7, END, None], stop=stop)
    assert result.text == text
    assert result.ids[:4] == (3, 5, 7, END) and result.tokens == 3


def test_a_stop_string_alone_is_refused() -> None:
    """Taken as a sequence it would be cut at each of its letters."""
    with pytest.raises(RequestError, match="stop must be a list of strings, got 'w7'"):
        decoder_of().generate([1, 2], gen_length=2, stop="w7")


def test_the_tokenizer_of_a_loaded_model_is_used(tmp_path: Any) -> None:
    loaded = LoadedModel(MODEL, TOKENIZER, tmp_path)
    assert Decoder(loaded).tokenizer is TOKENIZER
    other = words()
    assert Decoder(loaded, tokenizer=other).tokenizer is other


# ----------------------------------------------------------------------------- order and streaming


def test_results_are_in_the_order_of_the_prompts_and_run_in_that_of_completion() -> None:
    decoder = decoder_of(max_batch_size=2)
    lengths = [6, 1, 4, 2, 3]
    requests = [Request([1, n], gen_length=n, stop_at_eos=False, id=f"r{n}") for n in lengths]
    results = decoder.generate(requests)
    assert [len(r.ids) for r in results] == lengths
    assert [r.id for r in results] == [r.id for r in requests]
    finished = [r.id for r in decoder.run(requests)]
    assert finished == ["r1", "r4", "r6", "r2", "r3"]
    by_id = {r.id: r for r in decoder.run(requests)}
    assert [by_id[r.id].ids for r in requests] == ids_of(results)


def test_results_without_names_are_numbered() -> None:
    requests = [Request([1], gen_length=1, id="own"), Request([2], gen_length=1)]
    assert [r.id for r in decoder_of().generate(requests)] == ["own", "1"]


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_frames_show_every_turn_and_the_last_one_the_result(cache: str) -> None:
    """Masks stand where nothing is decided, and there are ever fewer of them."""
    decoder = decoder_of("threshold", cache=cache, max_batch_size=2, options={"threshold": 0.5})
    requests = [Request([1, n], gen_length=n, block_length=4, id=str(n)) for n in (9, 5, 7)]
    frames: dict[str, list[Frame]] = {r.id: [] for r in requests}
    for frame in decoder.stream(requests):
        frames[frame.id].append(frame)
    for request, result in zip(requests, decoder.generate(requests), strict=True):
        seen = frames[request.id]
        assert [f.turn for f in seen] == list(range(1, result.forwards + 1))
        assert all(f.result is None for f in seen[:-1]) and seen[-1].result is not None
        assert seen[-1].result.ids == seen[-1].ids == result.ids
        assert not any(seen[-1].masked)
        for before, after in pairwise(seen):
            assert sum(after.masked) < sum(before.masked)
            assert all((t == MASK) == m for t, m in zip(before.ids, before.masked, strict=True))


def test_a_stream_can_be_left() -> None:
    decoder = decoder_of(cache="dual")
    stream = decoder.stream([[1, 2]] * 3, gen_length=8)
    next(stream)
    del stream
    assert len(decoder.generate([1, 2], gen_length=4)) == 1


# ------------------------------------------------------------------------------------ seeds, draws


def draws(
    requests: list[Request], seed: int = 0, temperature: float = 1.0
) -> list[tuple[int, ...]]:
    return ids_of(decoder_of(temperature=temperature, seed=seed).generate(requests))


PLAIN = Request([3, 4], gen_length=8, stop_at_eos=False)


def test_equal_prompts_of_one_call_get_different_draws() -> None:
    """At temperature 0 there is nothing to draw and they are the same."""
    drawn = draws([PLAIN] * 6)
    assert len(set(drawn)) == 6
    assert drawn[0] == draws([PLAIN])[0], "the first is what it is alone"
    assert drawn == draws([PLAIN] * 6)
    assert len(set(draws([PLAIN] * 6, temperature=0.0))) == 1


def test_samples_name_the_draws() -> None:
    """`sample` i is the i-th of equal requests, whatever else is asked for beside it."""
    drawn = draws([PLAIN] * 4)
    named = [replace(PLAIN, sample=i) for i in range(4)]
    assert draws(named) == drawn
    assert [draws([request])[0] for request in named] == drawn
    assert draws([named[2], named[0]]) == [drawn[2], drawn[0]]


@pytest.mark.parametrize("samples", [(0, 0, 1), (1, 0, 0), (0, 1, 0, 1), (2, 2, 0, 0, 1)])
def test_named_and_counted_draws_never_meet(samples: tuple[int, ...]) -> None:
    """Who names a draw gets that one; the others get what is left."""
    drawn = draws([replace(PLAIN, sample=i) for i in samples])
    assert len(set(drawn)) == len(samples)
    for sample in set(samples):
        alone = draws([replace(PLAIN, sample=sample)])[0]
        assert drawn[samples.index(sample)] == alone


@pytest.mark.parametrize(
    "change", [{"block_length": 4}, {"eos": "banned"}, {"stop_at_eos": True}, {"gen_length": 9}]
)
def test_other_requests_for_the_same_prompt_keep_their_draws(change: dict[str, Any]) -> None:
    """A row's tokens are the same alone and beside any other: only equal ones are told apart."""
    other = replace(PLAIN, **change)
    assert draws([PLAIN, other]) == [draws([PLAIN])[0], draws([other])[0]]


def test_ids_do_not_matter_for_what_is_drawn() -> None:
    assert draws([replace(PLAIN, id="a")]) == draws([replace(PLAIN, id="b")])
    assert len(set(draws([replace(PLAIN, id="a"), replace(PLAIN, id="b")]))) == 2


def test_the_seed_of_a_request_overrides_the_decoders() -> None:
    seeded = replace(PLAIN, seed=5)
    assert draws([seeded]) == draws([seeded], seed=9) == draws([PLAIN], seed=5)
    assert draws([PLAIN], seed=9) != draws([PLAIN], seed=5)
    assert len(set(draws([seeded, PLAIN], seed=5))) == 2, "the same seed, said twice"


# ----------------------------------------------------------------------------------------- options


def test_options_go_to_the_part_that_has_them() -> None:
    options = {
        "threshold": "0.7",
        "refresh_every": 3,
        "draw.temperature": 0.5,
        "top_p": 0.9,
        "sampler.law": "rank",
    }
    parts = build_parts("threshold", "dual", "fixed", options)
    assert parts.sampler == SAMPLERS.create("threshold", {"threshold": 0.7, "law": "rank"})
    assert parts.cache == Dual(refresh_every=3)
    assert parts.schedule == SCHEDULES.create("fixed")
    assert parts.draw == Draw(0.5, top_p=0.9)


def test_ready_parts_are_taken_as_they_are() -> None:
    sampler, cache = SAMPLERS.create("factor"), CACHES.create("prefix")
    schedule, draw = SCHEDULES.create("absolute_aligned"), Draw(0.3, top_k=2)
    parts = build_parts(sampler, cache, schedule, {"top_k": 5}, draw)
    assert parts.sampler is sampler and parts.cache is cache and parts.schedule is schedule
    assert parts.draw == Draw(0.3, top_k=5)
    assert Decoder(MODEL, temperature=0.4).parts.draw == Draw(0.4)
    with pytest.raises(OptionError, match="options factor given beside a ready sampler"):
        build_parts(sampler, cache, schedule, {"factor": 2.0})
    with pytest.raises(OptionError, match="options refresh_every given beside a ready cache"):
        build_parts("llada", Dual(), "fixed", {"cache.refresh_every": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treshold": 0.5}, "unknown option 'treshold'.*did you mean 'threshold'"),
        ({"cache.refresh": 2}, "unknown option 'refresh' for cache; did you mean 'refresh_every'"),
        ({"cache.threshold": 0.5}, "unknown option 'threshold' for cache"),
        ({"kv.threshold": 0.5}, "unknown part 'kv' in option 'kv.threshold'"),
        ({"threshold": -1}, r"Threshold.threshold must be >= 0.0, got -1"),
        ({"threshold": "high"}, "Threshold.threshold must be float, got 'high'"),
        ({"temperature": -0.5}, "Draw.temperature must be >= 0"),
        ({"top_p": 0}, "Draw.top_p must be > 0 and <= 1"),
        ({"top_k": 0}, "Draw.top_k must be >= 1"),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        Decoder(MODEL, "threshold", "dual", options=options)


def test_an_option_of_two_parts_needs_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the keyword for the temperature of draws still means that one."""
    from dataclasses import dataclass

    from dlm_decode.options import option
    from dlm_decode.samplers.threshold import Threshold

    @dataclass(frozen=True)
    class Twice(Threshold):
        refresh_every: int = option(1, "a name that caches have too", low=1)
        temperature: float = option(0.0, "a name that drawing has too", low=0.0)

    SAMPLERS.names()
    monkeypatch.setitem(SAMPLERS._classes, "twice", Twice)
    with pytest.raises(OptionError, match=r"several parts: write one of \w+\.refresh_every, cache"):
        build_parts("twice", "dual", "fixed", {"refresh_every": 2})
    parts = build_parts("twice", "dual", "fixed", {"cache.refresh_every": 2})
    assert parts.cache == Dual(refresh_every=2) and parts.sampler == Twice()
    parts = build_parts("twice", "dual", "fixed", {"sampler.refresh_every": 2})
    assert parts.sampler == Twice(refresh_every=2)
    assert Decoder(MODEL, "twice", "dual", temperature=0.5).parts.draw == Draw(0.5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"sampler": "treshold"}, UnknownNameError, "did you mean 'threshold'"),
        ({"cache": "duel"}, UnknownNameError, "unknown cache 'duel'; did you mean 'dual'"),
        ({"schedule": "fix"}, UnknownNameError, "did you mean 'fixed'"),
        ({"seed": 0.5}, OptionError, "seed must be a number, got 0.5"),
        ({"seed": True}, OptionError, "seed must be a number"),
        ({"seed": 2**63}, OptionError, "seed must be at most 9223372036854775807, got 922"),
        ({"seed": -(2**80)}, OptionError, "seed must be at least -9223372036854775808, got -120"),
        ({"cfg_scale": float("inf")}, OptionError, "cfg_scale must be at most 1000000, got inf"),
        ({"sampler": None}, OptionError, "sampler must be a name or a ready sampler object, got N"),
        ({"sampler": Dual}, OptionError, "sampler must be a name or a ready sampler object, got <"),
        ({"cache": None}, OptionError, "cache must be a name or a ready cache object, got None"),
        ({"schedule": 3}, OptionError, "schedule must be a name or a ready schedule object, got 3"),
        ({"options": [1]}, OptionError, r"options must be a mapping from names .* got \[1\]"),
        ({"options": {5: 1}}, OptionError, "options must be a mapping from names"),
        ({"draw": {"temperature": 1}}, OptionError, "draw must be a Draw, got"),
        ({"cfg_scale": -1}, OptionError, "cfg_scale must be at least 0, got -1"),
        ({"cfg_scale": float("nan")}, OptionError, "cfg_scale must be a number"),
        ({"max_batch_size": 0}, OptionError, "max_batch_size must be at least 1, got 0"),
        ({"max_batch_size": "8"}, OptionError, "max_batch_size must be a number, got '8'"),
    ],
)
def test_wrong_choices_are_refused_by_name(
    changes: dict[str, Any], error: type[DlmDecodeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        Decoder(MODEL, **changes)


@pytest.mark.parametrize("model", ["tiny", None])
def test_a_model_that_is_not_loaded_is_refused(model: Any) -> None:
    with pytest.raises(OptionError, match=r"model must be a loaded one, as api\.load\(\) returns"):
        Decoder(model)


# ----------------------------------------------------------------------------------------- loading


def test_a_saved_model_decodes_as_the_one_in_memory(tmp_path: Any) -> None:
    from dlm_decode.models.loading import save_model

    save_model(MODEL, tmp_path, TOKENIZER)
    loaded = api.load(tmp_path, dtype="float64")
    ours = Decoder(MODEL, tokenizer=TOKENIZER).generate("w3 w4", gen_length=6)[0]
    theirs = Decoder(loaded).generate("w3 w4", gen_length=6)[0]
    assert (ours.ids, ours.text) == (theirs.ids, theirs.text)
    assert api.load(tmp_path).model.dtype == torch.float64
    assert api.load(tmp_path, dtype=torch.bfloat16).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": "int8"}, OptionError, "dtype must be a floating-point type.*got 'int8'"),
        ({"dtype": "double8"}, OptionError, "got 'double8'"),
        ({"dtype": 5}, OptionError, "dtype must be a floating-point type.*got 5"),
        ({"device": "abacus"}, OptionError, "device 'abacus' cannot be used"),
        ({}, CheckpointError, "no folder 'nowhere'"),
    ],
)
def test_what_cannot_be_loaded_is_told(
    changes: dict[str, Any], error: type[DlmDecodeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        api.load("nowhere", **changes)


def test_prompts_are_read_once() -> None:
    """A generator of prompts is enough."""

    def prompts() -> Iterator[str]:
        yield "w3"
        yield "w4"

    assert len(decoder_of().generate(prompts(), gen_length=2)) == 2
