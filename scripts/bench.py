"""Measure the engine against its own parts and against the plain published loop, in one run.

    python scripts/bench.py            # both tables, on the bundled model and on a random LLaDA
    python scripts/bench.py step       # seconds per turn, and what of it is not the network
    python scripts/bench.py head       # the LM head with its statistics against the head alone
    python scripts/bench.py decode     # tokens per second against the published loop
    python scripts/bench.py caches     # every cache policy x batch x length, with its error
    python scripts/bench.py speculation  # what K branches of a window cost, and what they save

`step` times every call of the backbone and of the LM head inside the engine's turns, over a cache
for ragged batches; the rest of a turn is overhead: the statistics pass over the logits, and
everything else (plan, pack, decide, apply). `bare` is one forward of the backbone alone on the same
tokens, with plain attention and nothing stored, `bare_head` the LM head in one piece with nothing
read off it; both together are the floor of a turn. `decode` runs the same decoding by the engine
and by tests/reference (Fast-dLLM's published loop, batch 1) on the same weights and checks that the
tokens agree (they need not where our refreshes compute less than the loop's). `caches` decodes with
`threshold` under every policy, batches ragged: `floor_s` is the bare backbone on as many positions
and the bare head on as many scored ones; `scaling` is the turns of rows per second over those of
batch 1, `bare` the same for the floors, and `share` the one over the other; errors are those of
`dlm-decode audit` over one request. `speculation` forwards K branches of a window over shared
stored K/V: `ratio` is their time over that of one, `floor_ratio` the same for the bare backbone on
as many tokens; K branches pay while the forwards they leave are fewer than `pays_below` of all. On
the bundled model the table of scripts/bench_speculation.py follows. Times are medians over turns or
runs, `spread` is the distance of the quartiles over the median. With one thread they are seconds
that the process spent, which other programs disturb less than the wall clock's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dlm_decode import turn as device_part
from dlm_decode.api import Decoder, load
from dlm_decode.attention import Group, PackedAttention
from dlm_decode.audit import CacheReport, audit_cache
from dlm_decode.caches import CACHES as POLICIES
from dlm_decode.clock import clock_of
from dlm_decode.errors import CapabilityError
from dlm_decode.footprint import Allocations, weight_bytes
from dlm_decode.head import HeadPlan, Scored, Tile, tile_width
from dlm_decode.head import statistics as statistics_pass
from dlm_decode.kv import KVStore
from dlm_decode.models import Attend, DiffusionLM
from dlm_decode.models.backbone import prepack_layers
from dlm_decode.models.loading import bundled_model_path, save_model
from dlm_decode.models.toy import random_llada
from dlm_decode.ranks import Share
from dlm_decode.types import Draw, Generation, Request
from scripts import bench_speculation
from tests.reference.llada import fast_dllm_generate
from tests.reference.network import Network

CACHES = ("none", "prefix", "dual")
REGIONS: dict[str, dict[str, Any]] = {
    "dual generation": {"refresh_region": "generation"},
    "dual window+32": {"refresh_region": "window", "vicinity": 32},
}
"""Variants of `dual` whose refreshes compute less, by what they are called in the table."""


def now_s() -> float:
    """What the clock for comparisons says: models are measured on the CPU here."""
    return clock_of(torch.device("cpu"))()


@dataclass(frozen=True)
class Times:
    """Median seconds of some runs, and the distance of their quartiles over it."""

    median_s: float
    spread: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Times:
        low, middle, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
        return cls(middle, (high - low) / middle)


@dataclass(frozen=True)
class Setting:
    """A model and the shape of the decoding."""

    name: str
    model: DiffusionLM
    prompt: int
    length: int
    block: int
    tokens_per_step: int

    def requests(
        self, batch: int, length: int | None = None, *, ragged: bool = False
    ) -> list[Request]:
        """Random prompts, as long as the setting says; `ragged`: all but the first up to a quarter
        shorter."""
        generator = torch.Generator().manual_seed(batch)
        high = min(self.model.info.mask_id, *self.model.info.end_ids, self.model.info.vocab_size)
        size = (batch, self.prompt)
        prompts = torch.randint(0, max(high, 4), size, generator=generator).tolist()
        shorter = [7 * i % max(self.prompt // 4, 1) if ragged else 0 for i in range(batch)]
        return [
            Request(
                p[less:],
                gen_length=length or self.length,
                block_length=self.block,
                stop_at_eos=False,
            )
            for p, less in zip(prompts, shorter, strict=True)
        ]

    def options(self, length: int | None = None) -> dict[str, int]:
        return {"steps": max((length or self.length) // self.tokens_per_step, 1)}


class Timed:
    """A model that notes how long its backbone and its head take, call by call."""

    def __init__(self, model: DiffusionLM) -> None:
        self._model = model
        self.info, self.device, self.dtype = model.info, model.device, model.dtype
        self.backbone_s: list[float] = []
        self.head_s: list[float] = []
        self.statistics_s: list[float] = []
        self.scored: list[int] = []

    def statistics(
        self, tile: Tile, scored: Scored, plan: HeadPlan, share: Share | None = None
    ) -> dict[str, Tensor]:
        """The engine's head pass, timed; the head's own time is taken out."""
        self.scored.append(len(scored.positions))
        start, head = now_s(), self.head_s[-1]
        found = statistics_pass(tile, scored, plan, share)
        self.statistics_s.append(now_s() - start - (self.head_s[-1] - head))
        return found

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        start = now_s()
        hidden = self._model.forward(ids, positions, attend, embeds=embeds)
        self.backbone_s.append(now_s() - start)
        self.head_s.append(0.0)
        return hidden

    def times(self, turns: list[float]) -> tuple[list[float], ...]:
        return turns, self.backbone_s, self.head_s, self.statistics_s

    def embedding(self, ids: Tensor) -> Tensor:
        return self._model.embedding(ids)

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        began = now_s()
        found = self._model.logits(hidden, start, stop)
        self.head_s[-1] += now_s() - began
        return found


@dataclass(frozen=True)
class StepRow:
    """Medians over the window turns (all turns for `none`) of one run, milliseconds."""

    model: str
    cache: str
    batch: int
    turn_ms: float
    bare_ms: float
    backbone_ms: float
    head_ms: float
    statistics_ms: float
    rest_ms: float
    overhead_share: float
    rest_share: float
    bare_head_ms: float
    head_ratio: float
    turn_ratio: float
    spread: float


@dataclass(frozen=True)
class HeadRow:
    """The LM head with one pass of statistics, beside the head alone."""

    model: str
    scored: int
    asked: str
    temperature: float
    bare_ms: float
    head_ms: float
    ratio: float
    spread: float


@dataclass(frozen=True)
class DecodeRow:
    """One decoding by the engine and by the published loop."""

    model: str
    cache: str
    rule: str
    tokens: int
    forwards: int
    plain_forwards: int
    tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float
    spread: float
    same_tokens: bool


@dataclass(frozen=True)
class BranchRow:
    """One forward of K branches of a window."""

    model: str
    K: int
    window: int
    context: int
    forward_ms: float
    ratio: float
    floor_ratio: float
    pays_below: float
    spread: float


@dataclass(frozen=True)
class CacheRow:
    """One policy at one batch size and row length."""

    model: str
    cache: str
    batch: int
    length: int
    positions: int
    forwards: int
    seconds: float
    floor_s: float
    ratio: float
    spread: float
    tokens_per_s: float
    scaling: float
    bare: float
    share: float
    peak_mib: float
    logit_error: float
    commits_differ: int


def cache_rows(
    setting: Setting,
    policies: Sequence[str],
    batches: tuple[int, ...],
    lengths: tuple[int, ...],
    tokens: int,
    runs: int,
) -> Iterator[CacheRow]:
    """Those policies that fit the model and `threshold`, at each length and batch size; batch 1
    comes first."""
    names = [name for name in policies if fits(setting.model, name)]
    sizes = sorted({1, *batches})
    for length in (n for n in lengths if n <= setting.model.info.max_positions):
        shape = replace(setting, prompt=length - tokens, length=tokens)
        window = min(setting.block, tokens)
        rates = {
            (b, n): bare_forward(setting.model, n, b, runs).median_s / (b * n)
            for b in sizes
            for n in (length, window)
        }
        for cache in names:
            report = audit_cache(Decoder(setting.model, "threshold", cache), shape.requests(1))
            alone: CacheRow | None = None
            for batch in sizes:
                row = cache_row(
                    shape, cache, batch, runs, (rates[batch, length], rates[batch, window]), report
                )
                alone = alone or row
                scaling = (row.forwards / row.seconds) / (alone.forwards / alone.seconds)
                bare = (row.forwards / row.floor_s) / (alone.forwards / alone.floor_s)
                yield replace(row, scaling=scaling, bare=bare, share=scaling / bare)


def fits(model: DiffusionLM, cache: str) -> bool:
    """Whether `threshold` decodes the model with the cache in blocks of their own."""
    try:
        Decoder(model, "threshold", cache)
    except CapabilityError:
        return False
    return True


def cache_row(
    setting: Setting,
    cache: str,
    batch: int,
    runs: int,
    rates: tuple[float, float],
    report: CacheReport,
) -> CacheRow:
    """Time, cost and memory of one decoding of ragged rows.

    `rates` are the bare backbone's seconds a position, of whole rows and of windows; `report` holds
    the errors.
    """
    decoder = Decoder(setting.model, "threshold", cache, max_batch_size=batch)
    requests = setting.requests(batch, ragged=True)
    peak = peak_bytes(decoder, requests)
    done: list[Generation] = []
    with counted_scores() as scored:
        times = timed(lambda: done.extend(decoder.generate(requests)), runs, warm=False)
    results = done[:batch]
    turns = len(scored) // runs
    mean = max(round(statistics.mean(scored)), 1)
    floor_s = backbone_floor_s(rates, requests, results)
    floor_s += turns * bare_head_times(setting.model, mean, runs).median_s
    return CacheRow(
        setting.name,
        cache,
        batch,
        setting.prompt + setting.length,
        sum(r.trace.computed_positions for r in results),
        sum(r.forwards for r in results),
        times.median_s,
        floor_s,
        times.median_s / floor_s,
        times.spread,
        batch * setting.length / times.median_s,
        1.0,
        1.0,
        1.0,
        peak / 2**20,
        report.logit_error,
        report.commits_differ or 0,
    )


def backbone_floor_s(
    rates: tuple[float, float], requests: Sequence[Request], results: Sequence[Generation]
) -> float:
    """Seconds of the bare backbone on the positions that a decoding computed."""
    whole = 0
    for request, result in zip(requests, results, strict=True):
        kinds = result.trace.forwards_by_kind
        forwards = sum(kinds.get(kind, 0) for kind in ("full", "refresh"))
        whole += forwards * (len(request.prompt_ids) + request.gen_length)
    rest = sum(result.trace.computed_positions for result in results) - whole
    return whole * rates[0] + max(rest, 0) * rates[1]


@contextmanager
def counted_scores() -> Iterator[list[int]]:
    """Gathers how many positions each turn of the engine scores."""
    counts: list[int] = []

    def counting(
        tile: Tile, scored: Scored, plan: HeadPlan, share: Share | None = None
    ) -> dict[str, Tensor]:
        counts.append(len(scored.positions))
        return statistics_pass(tile, scored, plan, share)

    device_part.statistics = counting
    try:
        yield counts
    finally:
        device_part.statistics = statistics_pass


def peak_bytes(decoder: Decoder, requests: list[Request], turns: int = 3) -> int:
    """Weights, and the most bytes live on top of them in the first turns of `requests`."""
    with Allocations() as counted, closing(decoder.stream(requests)) as frames:
        for frame in frames:
            if frame.turn == turns:
                break
    assert isinstance(decoder.model, torch.nn.Module)
    return weight_bytes(decoder.model) + counted.peak


def step_rows(setting: Setting, batches: tuple[int, ...]) -> Iterator[StepRow]:
    for cache in CACHES:
        for batch in batches:
            yield step_row(setting, cache, batch)


def step_row(setting: Setting, cache: str, batch: int) -> StepRow:
    length = setting.block
    model = Timed(setting.model)
    options = setting.options(length)
    decoder = Decoder(model, "llada", cache, max_batch_size=batch, options=options)
    requests = setting.requests(batch, length, ragged=cache != "none")
    device_part.statistics = model.statistics  # timed from outside
    decoder.generate(requests)
    for times in (model.backbone_s, model.head_s, model.statistics_s, model.scored):
        times.clear()
    turns, began = [], now_s()
    seen: dict[str, int] = {}
    for frame in decoder.stream(requests):
        seen[frame.id] = frame.turn
        if len(seen) == batch and len(set(seen.values())) == 1:
            turns.append(now_s() - began)
            began = now_s()
    kept = range(1, len(turns)) if cache != "none" else range(len(turns))
    device_part.statistics = statistics_pass
    columns = [[times[i] * 1e3 for i in kept] for times in model.times(turns)]
    turn, backbone, head, passes = (statistics.median(column) for column in columns)
    rest = statistics.median(t - b - h - s for t, b, h, s in zip(*columns, strict=True))
    query = {"none": setting.prompt + length, "prefix": length, "dual": length}[cache]
    bare = bare_forward(setting.model, query, batch).median_s * 1e3
    scored = round(statistics.median(model.scored[i] for i in kept))
    bare_head = bare_head_times(setting.model, scored).median_s * 1e3
    ratios = bare_head, (head + passes) / bare_head, turn / (bare + bare_head)
    shares = (passes + rest) / turn, rest / turn
    parts = turn, bare, backbone, head, passes, rest
    spread = Times.of(columns[0]).spread
    return StepRow(setting.name, cache, batch, *parts, *shares, *ratios, spread)


def head_rows(setting: Setting, batches: Sequence[int], runs: int) -> Iterator[HeadRow]:
    """The head with its statistics beside the head in one piece, by what is read off it."""
    info, cases = setting.model.info, (("", 0.0), ("p2", 0.0), ("entropy", 0.0), ("", 1.0))
    for count in (batch * setting.block for batch in batches):
        bare = bare_head_times(setting.model, count, runs)
        hidden = torch.randn(count, info.hidden_size, dtype=setting.model.dtype)
        at = torch.arange(count)
        for need, temperature in cases:
            needs = frozenset({need} if need else ())
            plan = HeadPlan(info.vocab_size, needs, Draw(temperature), info.mask_id)

            def once(hidden: Tensor = hidden, at: Tensor = at, plan: HeadPlan = plan) -> None:
                with torch.inference_mode():
                    tile = partial(setting.model.logits, hidden)
                    statistics_pass(tile, Scored(at, at, at), plan)

            found = timed(once, runs)
            ratio, spread = found.median_s / bare.median_s, max(found.spread, bare.spread)
            asked, ms = need or "top1", (bare.median_s * 1e3, found.median_s * 1e3)
            yield HeadRow(setting.name, count, asked, temperature, *ms, ratio, spread)


def bare_head_times(model: DiffusionLM, count: int, runs: int = 7) -> Times:
    """The LM head on `count` positions, in one piece."""
    hidden = torch.zeros(count, model.info.hidden_size, dtype=model.dtype)
    with torch.inference_mode():
        return timed(lambda: model.logits(hidden), runs)


def bare_forward(model: DiffusionLM, query: int, batch: int, runs: int = 7) -> Times:
    """One backbone forward of `batch` rows of `query` tokens, nothing stored."""
    ids = torch.zeros(batch * query, dtype=torch.int64)
    positions = torch.arange(query).repeat(batch)
    attend = PackedAttention((Group(0, batch, query, own=True),))

    def once() -> None:
        with torch.inference_mode():
            model.forward(ids, positions, attend)

    return timed(once, runs)


def timed(run: Callable[[], object], runs: int, *, warm: bool = True) -> Times:
    """Times of `runs` calls, with `warm` after one that is not timed."""
    if warm:
        run()
    times = []
    for _ in range(runs):
        start = now_s()
        run()
        times.append(now_s() - start)
    return Times.of(times)


def speculation_rows(setting: Setting, states: Sequence[int], runs: int) -> Iterator[BranchRow]:
    """One forward of K versions of a window that share the row's stored K/V."""
    window = min(setting.block, setting.length)
    context = setting.prompt + setting.length - window
    found: dict[int, tuple[Times, Times]] = {}
    for k in sorted({1, *states}):
        forward = branch_times(setting.model, context, window, k, runs)
        bare = bare_forward(setting.model, k * window, 1, runs)
        found[k] = forward, bare
        (one, bare_one), ratio = found[1], forward.median_s / found[1][0].median_s
        yield BranchRow(
            setting.name,
            k,
            window,
            context,
            forward.median_s * 1e3,
            ratio,
            bare.median_s / bare_one.median_s,
            1 / ratio,
            max(forward.spread, one.spread),
        )


def branch_times(model: DiffusionLM, context: int, window: int, k: int, runs: int) -> Times:
    """`k` windows side by side, each seeing the stored context and itself."""
    info, tokens = model.info, k * window
    store = KVStore(info, pages=1, page_length=context, dtype=model.dtype, device=model.device)
    branch = torch.arange(tokens) // window
    own = branch[:, None] == branch[None, :]
    mask = torch.cat([torch.ones(tokens, context, dtype=torch.bool), own], dim=1)[None, None]
    group = Group(0, 1, tokens, True, context, None, 0, context, None if k == 1 else mask)
    attend = PackedAttention((group,), store)
    ids = torch.zeros(tokens, dtype=torch.int64)
    positions = context + torch.arange(window).repeat(k)

    def once() -> None:
        with torch.inference_mode():
            model.forward(ids, positions, attend)

    return timed(once, runs)


def decode_rows(setting: Setting, folder: Path, runs: int) -> Iterator[DecodeRow]:
    network = Network(folder)
    for cache in (*CACHES, *REGIONS):
        for rule in ("quota", "threshold"):
            yield decode_row(setting, network, cache, rule, runs)


def decode_row(setting: Setting, network: Network, name: str, rule: str, runs: int) -> DecodeRow:
    """`name` is a cache, or one of `REGIONS`: the published loop knows the plain cache alone."""
    request, cache = setting.requests(1)[0], name.split()[0]
    quota = rule == "quota"
    options = REGIONS.get(name, {}) | (setting.options() if quota else {"threshold": 0.9})
    decoder = Decoder(setting.model, "llada" if quota else rule, cache, options=options)
    plain_options = {"steps": setting.options()["steps"] if quota else setting.length}
    prompt = torch.tensor([list(request.prompt_ids)])

    def plain() -> object:
        return fast_dllm_generate(
            network,
            prompt,
            steps=plain_options["steps"],
            gen_length=setting.length,
            block_length=setting.block,
            mask_id=setting.model.info.mask_id,
            cache=cache,
            threshold=None if quota else 0.9,
        )

    result, reference = decoder.generate(request)[0], plain()
    ours, theirs = timed(lambda: decoder.generate(request), runs), timed(plain, runs)
    return DecodeRow(
        setting.name,
        name,
        rule,
        setting.length,
        result.forwards,
        reference.nfe,
        setting.length / ours.median_s,
        setting.length / theirs.median_s,
        theirs.median_s / ours.median_s,
        max(ours.spread, theirs.spread),
        list(result.ids) == reference.tokens[0, -setting.length :].tolist(),
    )


def settings(
    width: int, layers: int, vocab: int, quick: bool, prepack: bool
) -> Iterator[tuple[Setting, Path]]:
    """The bundled model, and a random LLaDA saved to a temporary folder for the plain loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = bundled_model_path()
        if path.is_dir():
            bundled = load().model
            kept = Path(folder) / "bundled"
            save_model(bundled, kept)
            if prepack:
                prepack_layers(bundled)
            yield Setting("bundled", bundled, 48, 64, 16, 2), kept
        heads = max(width // 64, 1)
        model = random_llada(
            0, layers=layers, hidden=width, heads=heads, vocab=vocab, max_positions=2048
        )
        kept = Path(folder) / "random"
        save_model(model, kept)
        if prepack:
            prepack_layers(model)
        length = 64 if quick else 256
        name = f"random d={width} L={layers} V={vocab}"
        yield Setting(name, model, 256, length, 32, 4), kept


def table(
    rows: Sequence[StepRow | HeadRow | DecodeRow | CacheRow | BranchRow | bench_speculation.Line],
) -> str:
    """Markdown, a column for each field of the rows, which are of one dataclass."""
    names = list(asdict(rows[0]))
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for row in rows:
        values = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in asdict(row).values())
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


def statistics_memory(setting: Setting, rows: int) -> str:
    """What the head's statistics hold at a time, beside what whole logits would take."""
    info = setting.model.info
    plan = HeadPlan(info.vocab_size, frozenset(), Draw(), info.mask_id)
    tile = rows * tile_width(rows, plan, torch.device("cpu"), 4) * 4
    whole = rows * info.vocab_size * 4
    return (
        f"{setting.name}: head tile for {rows} scored positions {tile / 2**20:.2f} MiB, "
        f"whole logits would be {whole / 2**20:.2f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    kinds = ("step", "head", "decode", "caches", "speculation", "all")
    parser.add_argument("what", nargs="?", choices=kinds, default="all", help="all: step, decode")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=126_464)
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 8, of caches 1 4 16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024], help="of caches")
    parser.add_argument("--caches", nargs="+", default=POLICIES.names(), help="policies of caches")
    parser.add_argument("--tokens", type=int, default=128, help="decoded in a row of caches")
    states = [2, 4, 8, 16]
    parser.add_argument("--states", type=int, nargs="+", default=states, help="K of speculation")
    parser.add_argument("--count", type=int, default=8, help="items a task, of speculation")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each decoding")
    parser.add_argument("--quick", action="store_true", help="decode 64 tokens, not 256")
    parser.add_argument("--prepack", action="store_true", help="of our model, not the plain loop's")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32\n")
    clock = "seconds spent" if torch.get_num_threads() == 1 else "wall clock"
    print(f"times: {clock}\n")
    batches = tuple(args.batches or ((1, 4, 16) if args.what == "caches" else (1, 8)))
    lengths = tuple(args.lengths)
    found: list[dict[str, object]] = []
    for setting, folder in settings(args.width, args.layers, args.vocab, args.quick, args.prepack):
        for what, rows in (
            ("step", lambda s=setting: step_rows(s, batches)),
            ("head", lambda s=setting: head_rows(s, batches, 2 * args.runs + 1)),
            (
                "caches",
                lambda s=setting: cache_rows(
                    s, args.caches, batches, lengths, args.tokens, args.runs
                ),
            ),
            ("decode", lambda s=setting, f=folder: decode_rows(s, f, args.runs)),
            ("speculation", lambda s=setting: speculation_rows(s, args.states, 2 * args.runs + 1)),
        ):
            if args.what == what or (args.what == "all" and what in ("step", "decode")):
                listed = []
                for row in rows():
                    print(table([row]).splitlines()[-1] if listed else table([row]), flush=True)
                    listed.append(row)
                found += [{"table": what} | asdict(row) for row in listed]
                print("" if listed else f"{setting.name}: too short\n", flush=True)
        print(statistics_memory(setting, max(batches) * setting.block) + "\n", flush=True)
    if args.what == "speculation" and bundled_model_path().is_dir():
        given = ["--count", str(args.count), "--states", *map(str, args.states)]
        lines = list(bench_speculation.lines(bench_speculation.parser().parse_args(given)))
        found += [{"table": "saved"} | asdict(line) for line in lines]
        print(table(lines))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
