"""Samplers around samplers: how chains are built, what the inner sees, and how rows are stopped."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_decode.api import Decoder, build_parts
from dlm_decode.cli import main
from dlm_decode.commands.list import _as_dict, _as_text
from dlm_decode.compose import chain_names
from dlm_decode.errors import CapabilityError, OptionError, UnknownNameError
from dlm_decode.samplers import SAMPLERS, Sampler, Wrapper, layers
from dlm_decode.samplers.credit import Credit
from dlm_decode.samplers.llada import Llada
from dlm_decode.samplers.prophet import Prophet
from dlm_decode.samplers.threshold import Threshold
from dlm_decode.types import Canvas, Draw, Request
from tests.contract.cases import tabular
from tests.golden import golden_path, requires_golden
from tests.unit.sampler_cases import make_canvas, random_logits
from tests.unit.wrapper_cases import (
    decode,
    golden_model,
    probed_output,
    ragged_requests,
    steps_of,
    toy,
)

WRAPPERS = [n for n in SAMPLERS.names() if issubclass(SAMPLERS.get(n), Wrapper)]
BASES = [n for n in SAMPLERS.names() if not issubclass(SAMPLERS.get(n), Wrapper)]
IDLE: dict[str, dict[str, Any]] = {
    "prophet": {"early": math.inf, "mid": math.inf, "late": math.inf},
    "sched": {"sched__tau_high": math.inf, "sched__tau_low": math.inf},
    "credit": {"credit__alpha": 0.0},
}
"""Settings under which a wrapper leaves everything to its inner."""


def parts(name: str, **options: Any) -> Sampler:
    return build_parts(name, "none", "fixed", options).sampler


# -------------------------------------------------------------------------------- chains


def test_a_chain_is_written_outermost_first() -> None:
    sampler = parts("prophet+credit+threshold", threshold="0.8", alpha="0.5", late="2")
    assert sampler == Prophet(Credit(Threshold(threshold=0.8), alpha=0.5), late=2.0)
    assert [SAMPLERS.name_of(layer) for layer in layers(sampler)] == [
        "prophet",
        "credit",
        "threshold",
    ]


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_alone_wraps_the_threshold_rule(name: str) -> None:
    assert chain_names(name) == (name, "threshold")
    assert SAMPLERS.create(name) == parts(f"{name}+threshold")
    assert parts(name, threshold=0.6) == parts(f"{name}+threshold", threshold=0.6)


def test_an_option_of_two_layers_must_name_its_layer() -> None:
    with pytest.raises(OptionError, match=r"write one of credit\.alpha, pc\.alpha"):
        parts("credit+pc", alpha=0.5)
    sampler = parts("credit+pc", **{"credit.alpha": 0.5, "pc.alpha": 3.0})
    assert isinstance(sampler, Credit) and sampler.alpha == 0.5
    assert sampler.inner == SAMPLERS.create("pc", {"alpha": 3.0})


def test_the_part_name_sampler_reaches_every_layer() -> None:
    sampler = parts("credit+threshold", **{"sampler.threshold": 0.7, "sampler.beta": 0.1})
    assert sampler == Credit(Threshold(threshold=0.7), beta=0.1)
    assert parts("threshold", **{"threshold.threshold": 0.7}) == Threshold(threshold=0.7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("credit+", "empty layer"),
        ("+threshold", "empty layer"),
        ("threshold+llada", "'threshold' cannot wrap 'llada': only wrappers"),
        ("credit+threshold+prophet", "'threshold' cannot wrap 'prophet'"),
        ("credit+credit+threshold", "once"),
        ("credit+prophet+threshold", r"credit cannot wrap prophet.*prophet\+credit"),
        ("credit+early_stop+sched+llada", "credit cannot wrap sched"),
    ],
)
def test_nonsense_is_refused_with_its_reason(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parts(name)


def test_other_mistakes_in_a_chain() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'credit'"):
        parts("credits+threshold")
    with pytest.raises(OptionError, match="did you mean 'alpha'"):
        parts("credit+threshold", alpa=1)
    with pytest.raises(OptionError, match=r"unknown part 'prophet'.*credit, threshold, cache"):
        parts("credit+threshold", **{"prophet.late": 1})
    with pytest.raises(OptionError, match=r"Credit\.inner must be a sampler, got 'llada'"):
        Credit("llada")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inner"):
        Llada(inner=Threshold())  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="beside a ready sampler object"):
        Decoder(toy(), Credit(), options={"alpha": 0.5})


def test_a_ready_chain_is_taken_as_it_is() -> None:
    by_name = decode("credit+llada", alpha=0.4, steps=8)
    assert steps_of(decode(Credit(Llada(steps=8), alpha=0.4))) == steps_of(by_name)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_asks_for_what_its_inner_asks(name: str) -> None:
    sampler = parts(f"{name}+klass", **{"klass.history": "canvas"})
    assert sampler.needs >= {"logits"} and sampler.scope == "canvas"
    assert "history" in sampler.traits
    assert sampler.attention_layers == (0.0, 1.0)
    assert "history" in parts(name).traits or name != "credit"


# --------------------------------------------------------------------- what the inner sees


def identical(wrapper: str, base: str, **settings: Any) -> None:
    """The wrapper, told to do nothing, decides as its inner alone, turn by turn."""
    options = IDLE[wrapper]
    try:
        wrapped = decode(f"{wrapper}+{base}", **settings, **options)
    except CapabilityError as error:
        pytest.skip(str(error))
    assert steps_of(wrapped) == steps_of(decode(base, **settings))


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("wrapper", list(IDLE))
def test_an_idle_wrapper_changes_nothing(wrapper: str, base: str, cache: str) -> None:
    """Infinite thresholds, or credit without weight: also where the scopes of the two differ."""
    identical(wrapper, base, cache=cache)


@pytest.mark.parametrize("base", ["threshold", "random", "dream", "klass"])
@pytest.mark.parametrize("wrapper", list(IDLE))
def test_an_idle_wrapper_draws_the_same_tokens(wrapper: str, base: str) -> None:
    identical(wrapper, base, temperature=1.0)


@pytest.mark.parametrize("wrapper", ["prophet", "sched"])
def test_an_idle_wrapper_keeps_step_budgets_and_schedules(wrapper: str) -> None:
    for schedule in ("fixed", "absolute_aligned"):
        identical(wrapper, "llada", schedule=schedule, steps=6)


def test_the_inner_state_begins_anew_with_each_block() -> None:
    """Negative control: a quota shared over the whole row decides other positions."""

    class Careless(Prophet):
        def _inner_state(self, view: Canvas, state: Any) -> Any:
            return state["inner"]

    never = {"early": math.inf, "mid": math.inf, "late": math.inf}
    right = steps_of(decode(Prophet(Llada(steps=6), **never)))
    assert right == steps_of(decode("llada", steps=6))
    assert right != steps_of(decode(Careless(Llada(steps=6), **never)))


CHAINS: list[tuple[str, dict[str, Any]]] = [
    ("credit+threshold", {"threshold": 0.6}),
    ("credit+threshold", {"threshold": 0.6, "tuning_free": True}),
    ("credit+klass", {"history": "canvas"}),
    ("credit+entropy", {"entropy__threshold": 1.0}),
    ("prophet+credit+threshold", {"threshold": 0.6, "early": 4.0}),
    ("prophet+llada", {"steps": 8, "average": "all", "early": 3.0}),
    ("sched+hierarchy", {"shape": "exponential"}),
    ("early_stop+prophet+credit+factor", {"early": 4.0}),
    ("blank_stop+local_leap", {}),
]


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize(("name", "options"), CHAINS)
def test_a_row_in_a_batch_is_decoded_as_alone(
    name: str, options: dict[str, Any], cache: str
) -> None:
    together = decode(name, cache=cache, batch=2, **options)
    alone = [decode(name, request, cache=cache, **options)[0] for request in ragged_requests()]
    assert steps_of(together) == steps_of(alone)
    assert [r.canvas for r in together] == [r.canvas for r in alone]
    mask = toy().info.mask_id
    assert all(mask not in r.canvas for r in together)


def test_credit_and_prophet_save_forwards_together() -> None:
    """On the same rows each layer decides earlier than without it."""
    requests = ragged_requests()

    def forwards(name: str, **options: Any) -> int:
        results = decode(name, requests, model=toy(3), threshold=0.9, **options)
        return sum(r.forwards for r in results)

    base = forwards("threshold")
    credit = forwards("credit+threshold")
    assert forwards("prophet+credit+threshold", early=3, mid=2, late=1) < credit < base


@pytest.mark.parametrize("draw", [Draw(), Draw(temperature=0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "options"), CHAINS)
def test_decide_is_pure_and_needs_no_host_sync(
    name: str, options: dict[str, Any], draw: Draw
) -> None:
    sampler = parts(name, **{key.replace("__", "."): value for key, value in options.items()})
    canvas = make_canvas(rows=3, width=7)
    state = sampler.init(canvas)
    output = probed_output(sampler, canvas, random_logits(canvas), state, draw)
    seen = replace(canvas, draw=draw)
    first, second = (sampler.decide(seen, output, state) for _ in range(2))
    assert torch.equal(first[0].commit, second[0].commit)
    assert torch.equal(first[0].tokens, second[0].tokens)
    with FakeTensorMode():
        canvas = replace(make_canvas(rows=3, width=7), draw=draw)
        state = sampler.init(canvas)
        output = probed_output(sampler, canvas, torch.randn(3, 7, 8), state, draw)
        decision, _ = sampler.decide(canvas, output, state)
    assert decision.commit.shape == (3, 7)


# ------------------------------------------------------------------------------- EOS stops


def before_the_end(ids: tuple[int, ...], end_ids: tuple[int, ...]) -> tuple[int, ...]:
    ends = [i for i, token in enumerate(ids) if token in end_ids]
    return ids[: ends[0]] if ends else ids


def endings(name: str, *, stop_at_eos: bool = False, block: int = 3) -> list[Any]:
    """Texts and forwards of sampled rows of a model whose texts end at different places."""
    model = tabular()
    requests = [
        Request([1, 2, 1, 3], gen_length=9, block_length=block, seed=seed, stop_at_eos=stop_at_eos)
        for seed in range(24)
    ]
    results = decode(name, requests, model=model, temperature=1.0)
    return [(before_the_end(r.ids, model.info.end_ids), r.forwards) for r in results]


@pytest.mark.parametrize("inner", ["threshold", "llada", "left_to_right"])
def test_early_stop_preserves_the_text(inner: str) -> None:
    """E1: an end id in a finished block. Everything before it is decided, so nothing can change."""
    assert SAMPLERS.get("early_stop").preserves_text  # type: ignore[attr-defined]
    plain, stopped = endings(inner), endings(f"early_stop+{inner}")
    assert [text for text, _ in plain] == [text for text, _ in stopped]
    assert sum(n for _, n in stopped) < sum(n for _, n in plain)


@pytest.mark.parametrize("inner", ["threshold", "llada", "left_to_right"])
def test_stopping_at_the_first_end_id_preserves_the_text(inner: str) -> None:
    """E4, E5: the request's own `stop_at_eos`; never later than the end of the block."""
    plain = endings(inner)
    sooner = endings(inner, stop_at_eos=True)
    later = endings(f"early_stop+{inner}")
    assert [text for text, _ in plain] == [text for text, _ in sooner]
    assert all(a <= b for (_, a), (_, b) in zip(sooner, later, strict=True))


def test_a_block_of_end_ids_alone_preserves_the_text() -> None:
    """E2 without a pad id waits for a whole block of end ids: later than E1, text the same."""
    plain, stopped = endings("llada", block=2), endings("blank_stop+llada", block=2)
    assert [text for text, _ in plain] == [text for text, _ in stopped]
    first = endings("early_stop+llada", block=2)
    assert sum(n for _, n in first) < sum(n for _, n in stopped) < sum(n for _, n in plain)


def test_a_block_of_pad_ids_does_not_preserve_the_text() -> None:
    """E2 with a pad id that is no end id: the counter-example is a block of it before more text."""
    assert not SAMPLERS.get("blank_stop").preserves_text  # type: ignore[attr-defined]
    request = Request([3, 5, 7, 2], gen_length=9, block_length=1, stop_at_eos=False)
    plain = decode("llada", request)[0]
    pad = plain.ids[2]
    stopped = decode("blank_stop+llada", request, pad_id=pad)[0]
    ends = toy().info.end_ids
    assert stopped.forwards < plain.forwards
    assert before_the_end(stopped.ids, ends) != before_the_end(plain.ids, ends)


@pytest.mark.parametrize("name", ["prophet", "sched"])
def test_filling_early_does_not_preserve_the_text(name: str) -> None:
    assert not SAMPLERS.get(name).preserves_text  # type: ignore[attr-defined]
    options = {"early": 0, "mid": 0, "late": 0} if name == "prophet" else {"tau_high": 0}
    texts = [r.ids for r in decode(f"{name}+llada", **options)]
    assert texts != [r.ids for r in decode("llada")]


# ------------------------------------------------------------------------------ showing them


def test_wrappers_are_marked_where_samplers_are_listed() -> None:
    entries = {entry.name: entry for entry in SAMPLERS.entries()}
    assert [name for name, entry in entries.items() if entry.is_wrapper] == WRAPPERS
    assert "wraps another sampler: credit+NAME" in _as_text(entries["credit"])
    assert "wraps" not in _as_text(entries["threshold"])
    assert _as_dict(entries["credit"])["wrapper"] and not _as_dict(entries["pc"])["wrapper"]


@requires_golden
def test_the_command_line_takes_a_chain(tmp_path: Path) -> None:
    """`--sampler credit+threshold`, options finding their layers, equals the Python interface."""
    rows, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text(json.dumps({"prompt_ids": [27, 187, 63], "gen_length": 16}) + "\n")
    given = ["--model", str(golden_path("llada-tiny-a")), "--input", str(rows)]
    method = ["--sampler", "prophet+credit+threshold", "--block-length", "8"]
    options = ["--set", "credit.alpha=0.4", "late=1", "threshold.threshold=0.7"]
    assert main(["generate", *given, *method, *options, "--output", str(out)]) == 0
    request = Request([27, 187, 63], gen_length=16, block_length=8)
    sampler = Prophet(Credit(Threshold(threshold=0.7), alpha=0.4), late=1.0)
    expected = Decoder(golden_model(), sampler).generate(request)[0]
    assert json.loads(out.read_text())["ids"] == list(expected.ids)
