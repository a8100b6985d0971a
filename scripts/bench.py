"""Measure the engine against its own parts and against the plain published loop, in one run.

    python scripts/bench.py            # both tables, on the bundled model and on a random LLaDA
    python scripts/bench.py step       # seconds per turn, and what of it is not the network
    python scripts/bench.py decode     # tokens per second against the published loop
    python scripts/bench.py caches     # every cache policy x batch x length, with its error

`step` times every call of the backbone and of the LM head inside the engine's turns; the rest of a
turn is overhead: the statistics pass over the logits, and everything else (plan, pack, decide,
apply). `bare` is one forward of the backbone alone on the same tokens, with plain attention and
nothing stored. `decode` runs the same decoding
by the engine and by tests/reference (Fast-dLLM's published loop, batch 1) on the same weights and
checks that the tokens agree. `caches` decodes with `threshold` under every policy; `scaling` is
tokens per second over those of batch 1, `bare` the same ratio for the backbone alone on a window,
and `share` the one over the other; errors are those of `dlm-decode audit` over one request. Times
are medians over turns or runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dlm_decode import engine
from dlm_decode.api import Decoder, load
from dlm_decode.attention import Group, PackedAttention
from dlm_decode.audit import audit_cache
from dlm_decode.caches import CACHES as POLICIES
from dlm_decode.footprint import Allocations, weight_bytes
from dlm_decode.head import HeadPlan, Scored, Tile, tile_width
from dlm_decode.head import statistics as statistics_pass
from dlm_decode.models import Attend, DiffusionLM
from dlm_decode.models.loading import bundled_model_path, save_model
from dlm_decode.models.toy import random_llada
from dlm_decode.types import Draw, Request
from tests.reference.llada import fast_dllm_generate
from tests.reference.network import Network

CACHES = ("none", "prefix", "dual")


@dataclass(frozen=True)
class Setting:
    """A model and the shape of the decoding."""

    name: str
    model: DiffusionLM
    prompt: int
    length: int
    block: int
    tokens_per_step: int

    def requests(self, batch: int, length: int | None = None) -> list[Request]:
        generator = torch.Generator().manual_seed(batch)
        high = min(self.model.info.mask_id, *self.model.info.end_ids, self.model.info.vocab_size)
        size = (batch, self.prompt)
        prompts = torch.randint(0, max(high, 4), size, generator=generator).tolist()
        return [
            Request(
                p,
                gen_length=length or self.length,
                block_length=self.block,
                stop_at_eos=False,
            )
            for p in prompts
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

    def statistics(self, tile: Tile, scored: Scored, plan: HeadPlan) -> dict[str, Tensor]:
        """The engine's head pass, timed; the head's own time is taken out."""
        start, head = time.perf_counter(), self.head_s[-1]
        found = statistics_pass(tile, scored, plan)
        self.statistics_s.append(time.perf_counter() - start - (self.head_s[-1] - head))
        return found

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        start = time.perf_counter()
        hidden = self._model.forward(ids, positions, attend, embeds=embeds)
        self.backbone_s.append(time.perf_counter() - start)
        self.head_s.append(0.0)
        return hidden

    def times(self, turns: list[float]) -> tuple[list[float], ...]:
        return turns, self.backbone_s, self.head_s, self.statistics_s

    def embedding(self, ids: Tensor) -> Tensor:
        return self._model.embedding(ids)

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        began = time.perf_counter()
        found = self._model.logits(hidden, start, stop)
        self.head_s[-1] += time.perf_counter() - began
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
    same_tokens: bool


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
    tokens_per_s: float
    scaling: float
    bare: float
    share: float
    peak_mib: float
    logit_error: float
    commits_differ: int


def cache_rows(
    setting: Setting, batches: tuple[int, ...], lengths: tuple[int, ...], tokens: int, runs: int
) -> Iterator[CacheRow]:
    """Every policy that fits the model, at each length and batch size; batch 1 comes first."""
    regime = setting.model.info.regime
    names = [name for name in POLICIES.names() if regime in POLICIES.get(name).regimes]
    sizes = sorted({1, *batches})
    for length in (n for n in lengths if n <= setting.model.info.max_positions):
        shape = replace(setting, prompt=length - tokens, length=tokens)
        window = min(setting.block, tokens)
        bare = {b: b / bare_forward_s(setting.model, window, b) for b in sizes}
        for cache in names:
            alone = 0.0
            for batch in sizes:
                row = cache_row(shape, cache, batch, runs)
                alone = alone or row.tokens_per_s
                scaling, ideal = row.tokens_per_s / alone, bare[batch] / bare[1]
                yield replace(row, scaling=scaling, bare=ideal, share=scaling / ideal)


def cache_row(setting: Setting, cache: str, batch: int, runs: int) -> CacheRow:
    """Time, cost and memory of one decoding, and how far one of its rows is from no cache."""
    decoder = Decoder(setting.model, "threshold", cache, max_batch_size=batch)
    requests = setting.requests(batch)
    results = decoder.generate(requests)
    seconds = median_s(lambda: decoder.generate(requests), runs)
    report = audit_cache(decoder, requests[:1])
    return CacheRow(
        setting.name,
        cache,
        batch,
        setting.prompt + setting.length,
        sum(r.trace.computed_positions for r in results),
        sum(r.forwards for r in results),
        seconds,
        batch * setting.length / seconds,
        1.0,
        1.0,
        1.0,
        peak_bytes(decoder, setting.requests(batch, setting.block)) / 2**20,
        report.logit_error,
        report.commits_differ or 0,
    )


def peak_bytes(decoder: Decoder, requests: list[Request]) -> int:
    """Weights, and the most bytes that are live on top of them while `requests` are decoded."""
    with Allocations() as counted:
        decoder.generate(requests)
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
    requests = setting.requests(batch, length)
    engine.statistics = model.statistics  # the one place that is timed from outside
    decoder.generate(requests)
    for times in (model.backbone_s, model.head_s, model.statistics_s):
        times.clear()
    turns, began = [], time.perf_counter()
    seen: dict[str, int] = {}
    for frame in decoder.stream(requests):
        seen[frame.id] = frame.turn
        if len(seen) == batch and len(set(seen.values())) == 1:
            turns.append(time.perf_counter() - began)
            began = time.perf_counter()
    kept = range(1, len(turns)) if cache != "none" else range(len(turns))
    engine.statistics = statistics_pass
    columns = [[times[i] * 1e3 for i in kept] for times in model.times(turns)]
    turn, backbone, head, passes = (statistics.median(column) for column in columns)
    rest = statistics.median(t - b - h - s for t, b, h, s in zip(*columns, strict=True))
    query = {"none": setting.prompt + length, "prefix": length, "dual": length}[cache]
    bare = bare_forward_s(setting.model, query, batch) * 1e3
    shares = (passes + rest) / turn, rest / turn
    return StepRow(setting.name, cache, batch, turn, bare, backbone, head, passes, rest, *shares)


def bare_forward_s(model: DiffusionLM, query: int, batch: int, runs: int = 7) -> float:
    """Seconds of one backbone forward of `batch` rows of `query` tokens, nothing stored."""
    ids = torch.zeros(batch * query, dtype=torch.int64)
    positions = torch.arange(query).repeat(batch)
    attend = PackedAttention((Group(0, batch, query, own=True),))

    def once() -> None:
        with torch.inference_mode():
            model.forward(ids, positions, attend)

    return median_s(once, runs)


def median_s(run: Callable[[], object], runs: int) -> float:
    run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def decode_rows(setting: Setting, folder: Path, runs: int) -> Iterator[DecodeRow]:
    network = Network(folder)
    for cache in CACHES:
        for rule in ("quota", "threshold"):
            yield decode_row(setting, network, cache, rule, runs)


def decode_row(setting: Setting, network: Network, cache: str, rule: str, runs: int) -> DecodeRow:
    request = setting.requests(1)[0]
    quota = rule == "quota"
    options = setting.options() if quota else {"threshold": 0.9}
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
    ours_s = median_s(lambda: decoder.generate(request), runs)
    plain_s = median_s(plain, runs)
    return DecodeRow(
        setting.name,
        cache,
        rule,
        setting.length,
        result.forwards,
        reference.nfe,
        setting.length / ours_s,
        setting.length / plain_s,
        plain_s / ours_s,
        list(result.ids) == reference.tokens[0, -setting.length :].tolist(),
    )


def settings(width: int, layers: int, vocab: int, quick: bool) -> Iterator[tuple[Setting, Path]]:
    """The bundled model, and a random LLaDA saved to a temporary folder for the plain loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = bundled_model_path()
        if path.is_dir():
            bundled = load().model
            kept = Path(folder) / "bundled"
            save_model(bundled, kept)
            yield Setting("bundled", bundled, 48, 64, 16, 2), kept
        heads = max(width // 64, 1)
        model = random_llada(
            0, layers=layers, hidden=width, heads=heads, vocab=vocab, max_positions=2048
        )
        kept = Path(folder) / "random"
        save_model(model, kept)
        length = 64 if quick else 256
        name = f"random d={width} L={layers} V={vocab}"
        yield Setting(name, model, 256, length, 32, 4), kept


def table(rows: Sequence[StepRow | DecodeRow | CacheRow]) -> str:
    """Markdown."""
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
    kinds = ("step", "decode", "caches", "all")
    parser.add_argument("what", nargs="?", choices=kinds, default="all", help="all: step, decode")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=126_464)
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 8, of caches 1 4 16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024], help="of caches")
    parser.add_argument("--tokens", type=int, default=128, help="decoded in a row of caches")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each decoding")
    parser.add_argument("--quick", action="store_true", help="decode 64 tokens, not 256")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32\n")
    batches = tuple(args.batches or ((1, 4, 16) if args.what == "caches" else (1, 8)))
    lengths = tuple(args.lengths)
    found: list[dict[str, object]] = []
    for setting, folder in settings(args.width, args.layers, args.vocab, args.quick):
        for what, rows in (
            ("step", lambda s=setting: step_rows(s, batches)),
            ("caches", lambda s=setting: cache_rows(s, batches, lengths, args.tokens, args.runs)),
            ("decode", lambda s=setting, f=folder: decode_rows(s, f, args.runs)),
        ):
            if args.what == what or (args.what == "all" and what != "caches"):
                listed = list(rows())
                found += [{"table": what} | asdict(row) for row in listed]
                print(
                    (table(listed) if listed else f"{setting.name}: too short") + "\n", flush=True
                )
        print(statistics_memory(setting, max(batches) * setting.block) + "\n", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
