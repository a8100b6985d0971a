"""Self-speculation decides what its inner decides, in the same order, in fewer forwards.

The five ways to get it wrong of the last section are caught by the same comparison.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlm_decode import cli, packing
from dlm_decode.api import Decoder, build_parts, load
from dlm_decode.caches import RowPlan, RowView
from dlm_decode.caches.dual import Dual
from dlm_decode.errors import OptionError
from dlm_decode.models.loading import LoadedModel
from dlm_decode.samplers import Sampler, self_speculative
from dlm_decode.samplers.left_to_right import LeftToRight
from dlm_decode.samplers.llada import Llada
from dlm_decode.samplers.self_speculative import SelfSpeculative
from dlm_decode.samplers.threshold import Threshold
from dlm_decode.scores import commit_candidates
from dlm_decode.types import Canvas, Decision, Output, Request
from tests.contract.test_samplers import assert_no_sync, inputs_of
from tests.golden import Case, golden_cases, golden_path, requires_golden
from tests.unit.speculation_cases import (
    INNERS,
    Revoking,
    Run,
    decided,
    sampled_runs,
)

# ---------------------------------------------------------------------------- the published runs


@cache
def golden_model(name: str) -> LoadedModel:
    return load(golden_path(name), dtype=torch.float32)


FREEDAVE = [
    pytest.param(model, case, id=f"{model}-{case['name']}")
    for model in ("llada-tiny-a", "dream-tiny-a")
    for case in golden_cases(model, "decode_freedave")
]


@requires_golden
@pytest.mark.parametrize(("model", "case"), FREEDAVE)
def test_freedave(model: str, case: Case) -> None:
    """Its plain runs exactly, and its accelerated ones with no more forwards than it needs."""
    s = case["settings"]
    name = "left_to_right" if s["alg_temp"] == -1 else "llada"
    options: dict[str, Any] = {}
    if s["confidence_threshold"] is not None:
        name, options = "threshold", {"threshold": s["confidence_threshold"]}
    if model.startswith("dream"):
        options["compat"] = "fast-dllm"
    if "draft_steps" in s:
        name, options = f"self_speculative+{name}", options | {"max_states": s["draft_steps"]}
    decoder = Decoder(
        golden_model(model), name, "dual" if s["dual_cache"] else "prefix", options=options
    )
    prompt, length = case["prompt_ids"][0], s["max_gen_length"]
    request = Request(prompt, gen_length=length, block_length=s["block_length"], stop_at_eos=False)
    result = decoder.generate(request)[0]
    assert list(result.ids) == case["final_ids"][0][-length:]
    if "draft_steps" in s:
        assert result.forwards <= case["nfe"]
    else:
        assert result.forwards == case["nfe"]


# ---------------------------------------------------------------------------- the same output


def check(run: Run) -> tuple[int, int]:
    """Whole results alike, forwards no more and all accounted for; returns both numbers of them."""
    plain, ahead = run.plain(), run.ahead()
    assert decided(ahead) == decided(plain)
    for a, b in zip(plain, ahead, strict=True):
        assert b.forwards <= a.forwards
        assert b.forwards + (b.trace.accepted or 0) == a.forwards == len(b.trace.steps)
        assert (b.trace.drafted or 0) >= (b.trace.accepted or 0)
        if run.states == 1:
            assert (b.forwards, b.trace.drafted) == (a.forwards, 0)
            assert b.trace.computed_positions == a.trace.computed_positions
    return sum(r.forwards for r in plain), sum(r.forwards for r in ahead)


RUNS = sampled_runs(2 * len(INNERS))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.label)
def test_tokens_and_their_order_are_the_inners(run: Run) -> None:
    check(run)


def test_the_sampled_runs_reach_every_corner() -> None:
    assert {run.inner for run in RUNS} == set(range(len(INNERS)))
    assert {run.cache for run in RUNS} == {0, 1, 2, 3}
    assert {run.block for run in RUNS} == {1, 4, 8, None}
    assert {run.states for run in RUNS} == set(range(1, 9))
    assert {run.model for run in RUNS} == {"llada", "dream", "tied"}
    assert any(run.cfg_scale for run in RUNS) and any(run.temperature for run in RUNS)


@pytest.mark.parametrize(("cache", "temperature"), [(0, 0.0), (2, 0.0), (3, 1.0)])
@pytest.mark.parametrize(
    "inner", [Revoking(), Revoking(overwrites=True), Revoking(endless=True)], ids=repr
)
def test_tokens_that_are_taken_back_are_too(
    inner: Revoking, cache: int, temperature: float
) -> None:
    """Its state, the order of its changes, and the step cap that ends an endless one."""
    check(Run(0, cache, "llada", 4, 5, temperature, revoking=inner))


def test_forwards_are_saved() -> None:
    plain, ahead = check(Run(0, 2, "llada", None, 8, 0.0, stop_at_eos=False))
    assert ahead < 0.95 * plain


def test_drafts_do_not_change_with_the_batch() -> None:
    run = Run(2, 2, "llada", 8, 4, 1.0, batch=1)
    together = replace(run, batch=3).ahead()
    alone = run.ahead()
    assert decided(alone) == decided(together)
    assert [r.trace.drafted for r in alone] == [r.trace.drafted for r in together]


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        ({}, "all"),
        ({"min_acceptance": 0.3}, "some"),
        ({"min_acceptance": 1.0}, "none"),
        ({"row_cost": 0.2}, "some"),
        ({"row_cost": 1e6}, "none"),
        ({"most_tokens": 1}, "none"),
        ({"most_tokens": 10**6}, "all"),
    ],
    ids=str,
)
def test_the_draft_length_changes_costs_only(options: dict[str, float], drafts: str) -> None:
    run = Run(0, 2, "llada", 8, 6, 0.0, stop_at_eos=False)
    plain, every = run.plain(), run.ahead()
    ahead = run.decode(SelfSpeculative(Llada(), max_states=6, **options))  # type: ignore[arg-type]
    assert decided(ahead) == decided(plain)
    counts = [sum(r.trace.drafted or 0 for r in results) for results in (ahead, every)]
    kind = "none" if counts[0] == 0 else "all" if counts[0] == counts[1] else "some"
    assert kind == drafts and counts[0] <= counts[1]


def test_a_larger_batch_drafts_less_where_tokens_are_limited() -> None:
    """The windows of three rows fill what leaves one row room for more states; texts are equal."""
    run = Run(0, 2, "llada", 8, 6, 0.0, stop_at_eos=False)
    assert run.block is not None
    sampler = SelfSpeculative(Llada(), max_states=6, most_tokens=3 * run.block)
    alone, together = (replace(run, batch=n).decode(sampler) for n in (1, 3))
    assert decided(alone) == decided(together) == decided(run.plain())
    drafted = [sum(r.trace.drafted or 0 for r in results) for results in (alone, together)]
    assert drafted[0] > drafted[1]


def test_a_graph_with_second_tokens_decides_the_same(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    nodes = [[[1, 1]], [[1, 2]], [[2, 1]], [[1, 1], [2, 1]], [[1, 1], [2, 2]]]
    path.write_text(json.dumps({"nodes": nodes}))
    for temperature in (0.0, 1.0):
        run = Run(0, 2, "llada", 8, 6, temperature)
        sampler = SelfSpeculative(Llada(), max_states=6, drafter="graph", graph=str(path))
        assert "top2" in sampler.needs
        assert decided(run.decode(sampler)) == decided(run.plain())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_from_a_graph_needs_no_host_sync(temperature: float) -> None:
    sampler: Any = SelfSpeculative(Llada(), drafter="graph", row_cost=0.1)
    for given in inputs_of(sampler, temperature)[:2]:
        assert_no_sync(sampler, given)


# ---------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("self_speculative+punt", {}, "cannot wrap punt: it asks for forwards of its own"),
        ("self_speculative+dapd", {}, "cannot wrap dapd: it reads attention"),
        ("self_speculative+credit+threshold", {}, "unless credit is given dense=true"),
        ("self_speculative+prophet+credit+llada", {}, "unless credit is given dense=true"),
        ("prophet+self_speculative+llada", {}, r"as in self_speculative\+prophet"),
        ("self_speculative+llada", {"graph": "x.json"}, "needs drafter=graph"),
        ("self_speculative+llada", {"graph": "x.json", "drafter": "graph"}, "cannot be read"),
        ("self_speculative+llada", {"max_states": 0}, "max_states must be >= 1 and <= 1024, got 0"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        build_parts(name, "none", "fixed", options)


# ---------------------------------------------------------------------------- on the command line


@requires_golden
def test_verify_and_audit_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    prompts = ([27, 187, 63], [5, 9, 44, 2])
    rows.write_text(
        "".join(json.dumps({"prompt_ids": p, "gen_length": 12}) + "\n" for p in prompts)
    )
    given = ["--model", str(golden_path("llada-tiny-a")), "--input", str(rows)]
    method = ["--sampler", "llada", "--block-length", "8"]
    written = []
    for more in ([], ["--verify", "lossless", "--set", "max_states=6"]):
        assert cli.main(["generate", *given, *method, *more]) == 0
        written.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    plain, ahead = ({row["id"]: row for row in found} for found in written)
    for key, row in ahead.items():
        assert row["ids"] == plain[key]["ids"]
        assert row["forwards"] + row["accepted"] == plain[key]["forwards"]
        assert "drafted" not in plain[key]
    assert cli.main(["audit", "--lossless", "--json", *given, *method]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical_share"] == 1 and report["forwards_ratio"] <= 1 and report["rows"] == 2
    assert cli.main(["audit", "--lossless", *given, *method]) == 0
    assert "identical outputs: 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sampler", "punt"], "cannot wrap punt"),
        (["--schedule", "sliding"], "its windows move while they have masks"),
    ],
)
def test_verify_says_why_it_cannot(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--prompt", "x", "--verify", "lossless", *more]) == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------- that the comparison can fail


def differs(sampler: Sampler, run: Run, **parts: Any) -> bool:
    """Whether a mutant is noticed: its run ahead against its own plain run."""
    torch.manual_seed(0)
    plain = run.decode(sampler, **parts)
    torch.manual_seed(0)
    ahead = run.decode(SelfSpeculative(sampler, max_states=run.states), **parts)
    return decided(plain) != decided(ahead)


def first_noticed(sampler: Sampler, runs: list[Run], **parts: Any) -> Run | None:
    return next((run for run in runs if differs(sampler, run, **parts)), None)


def test_accepting_subsets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FreeDave's rule: a draft all of whose tokens are in T(D_a), though T(D_a) has more."""

    def subset(there: Canvas, begun: Canvas, output: Output, drafts: Tensor) -> tuple[Any, ...]:
        open_ = drafts == begun.mask_id
        grown = ~open_ & (drafts != begun.tokens[:, None])
        same = ((drafts == there.tokens[:, None]) | open_).all(-1) & output.valid.any(-1)
        rank = torch.where(same & grown.any(-1), grown.sum(-1), -1)
        return (rank > 0).any(-1), rank.argmax(-1)

    runs = [Run(0, 0, m, None, 6, t, stop_at_eos=False) for m in ("dream", "llada") for t in (0, 1)]
    assert first_noticed(Threshold(threshold=0.7), runs[:1]) is None
    monkeypatch.setattr(self_speculative, "_matching", subset)
    assert first_noticed(Threshold(threshold=0.7), runs)


def test_a_tree_over_an_unfrozen_context_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches that compute their block only, and see what branch 0 stored of the rest."""
    entries = packing._entries

    def tree(rows: Any, *rest: Any) -> Any:
        for entry in entries(rows, *rest):
            query, stop = entry.plan.query, rows[entry.row].window.stop
            plan = RowPlan(query[query < stop], "window")
            alone = entry.branch == 0 or entry.plan.kind != "window"
            yield replace(entry, plan=entry.plan if alone else plan, branches=1)

    runs = [Run(0, 1, m, 8, 6, 0.0, stop_at_eos=False) for m in ("llada", "dream")]
    assert first_noticed(LeftToRight(), runs) is None
    monkeypatch.setattr(packing, "_entries", tree)
    assert first_noticed(LeftToRight(), runs)


@dataclass(frozen=True)
class Topk(Sampler):
    """The best position by `torch.topk` over all rows at once, whose order of ties is its own."""

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        c = (output.p1 * 8).round().masked_fill(~canvas.eligible, -1)
        order = c.flatten().topk(c.numel()).indices
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(c.numel())).view_as(c)
        chosen = rank == rank.amin(-1, keepdim=True)
        return commit_candidates(canvas, output, chosen, output.p1), state


def test_ties_broken_by_topk_are_noticed() -> None:
    runs = [Run(0, c, "tied", b, 8, 0.0, batch=3) for b in (8, None) for c in (0, 2)]
    assert first_noticed(Topk(), runs)


@dataclass(frozen=True)
class Unkeyed(Sampler):
    """A random position, from torch's own stream of numbers."""

    def decide(self, canvas: Canvas, output: Output, state: Any) -> tuple[Decision, Any]:
        noise = torch.rand(canvas.tokens.shape).masked_fill(~canvas.eligible, -1)
        chosen = noise == noise.amax(-1, keepdim=True)
        return commit_candidates(canvas, output, chosen, output.p1), state


def test_noise_that_is_not_keyed_is_noticed() -> None:
    assert first_noticed(Unkeyed(), [Run(0, 0, "llada", 8, 4, 0.0)])


def test_looking_beyond_a_refresh_is_noticed() -> None:
    @dataclass(frozen=True)
    class Blind(Dual):
        def horizon(self, row: RowView) -> int | None:
            return None

    runs = [Run(0, 3, m, None, 8, 0.0, stop_at_eos=False) for m in ("llada", "dream")]
    assert first_noticed(LeftToRight(), runs, cache=Dual(refresh_every=3)) is None
    assert first_noticed(LeftToRight(), runs, cache=Blind(refresh_every=3))
