"""What a GPU makes of the engine: every figure beside the floor that the hardware sets.

    bash scripts/bench_gpu.sh                  # a model of LLaDA-8B's shape, one table
    bash scripts/bench_gpu.sh --smoke          # the same on a CPU with a tiny model, to try it out

First the ceilings (copying, matrix products) are measured; every floor is computed from them: the
larger of bytes / copy rate and operations / product rate, layer stack, stored K/V and head one
after another. Then: the statistics kernels; a window forward with its statistics, eagerly and as a
CUDA graph, whose tokens have to be equal; turns of the engine by batch, eagerly and as graphs of
the whole turn; turns in which reading a value on the host is an error; whole decodings, whose
tokens have to be the same with graphs; attention of ragged rows by SDPA and by FlexAttention. The
weights are random, so that confidences are flat and a fixed number of tokens is committed a turn:
tokens per forward say nothing here. Exit status 1: a part failed, or something differed that must
not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dlm_decode.api import Decoder
from dlm_decode.attention import Group, PackedAttention
from dlm_decode.graphs import OnGPU
from dlm_decode.head import HeadPlan, Scored
from dlm_decode.head import statistics as statistics_pass
from dlm_decode.kernels import VARIABLE
from dlm_decode.kv import KVStore
from dlm_decode.models import Attend
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.llada import LLaDA
from dlm_decode.models.published import Published
from dlm_decode.ragged import trial
from dlm_decode.turn import DevicePart
from dlm_decode.types import Draw, Request

STEPS_COMPARED = 50


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of what is decoded with it."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    ffn: int = 12288
    vocab: int = 126_464
    prompt: int = 1280
    length: int = 256
    block: int = 32
    tokens_per_turn: int = 4
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    copied: int = 1 << 30
    product: int = 8192

    @property
    def row(self) -> int:
        return self.prompt + self.length


SMOKE = Shape(2, 64, 2, 128, 1024, 32, 16, 8, 4, (1, 2), 1 << 20, 128)


@dataclass(frozen=True)
class Row:
    """One line of the table; `floor` and `ratio` (measured / floor) are None for ceilings."""

    part: str
    what: str
    measured: float
    unit: str
    floor: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Ceilings:
    """Measured rates: bytes copied a second (read plus written), operations a second."""

    bytes_s: float
    ops_s: float

    def seconds(self, moved: float, operations: float = 0.0) -> float:
        return max(moved / self.bytes_s, operations / self.ops_s)


@dataclass(frozen=True)
class Bench:
    """What every part of the benchmark is given."""

    shape: Shape
    model: Backbone
    ceilings: Ceilings
    runs: int

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward_floor_s(self, batch: int, query: int, scored: int, *, own: bool) -> float:
        """One forward of `batch` rows of `query` tokens, `scored` of them through the head."""
        itemsize, tokens = self.model.dtype.itemsize, batch * query
        trunk = sum(p.numel() for p in self.model.blocks.parameters())
        info, head = self.model.info, self.model.head.numel()
        pairs = 4 * tokens * self.shape.row * info.heads * info.head_size * info.layers
        stored = 2 * info.layers * info.kv_heads * info.head_size * self.shape.row * batch
        logits = scored * self.shape.vocab
        parts = (
            (trunk * itemsize, 2 * trunk * tokens),
            (0 if own else stored * itemsize, pairs),
            ((head + logits) * itemsize, 2 * head * scored),
        )
        return sum(self.ceilings.seconds(*part) for part in parts)

    def row(self, part: str, what: str, seconds: float, floor_s: float) -> Row:
        return Row(part, what, seconds * 1e3, "ms", floor_s * 1e3, seconds / floor_s)


def median_s(run: Callable[[], object], runs: int, device: torch.device) -> float:
    """Median seconds of `run`, after three warm-ups; by events where the device has them."""
    for _ in range(3):
        run()
    return statistics.median(_once_s(run, device) for _ in range(runs))


def _once_s(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> Backbone:
    """A LLaDA of that shape with random weights, made where it stays."""
    config = {
        "d_model": shape.width,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "mlp_hidden_size": shape.ffn,
        "max_sequence_length": 4 * shape.row,
        "vocab_size": shape.vocab,
        "mask_token_id": shape.vocab - 4,
        "eos_token_id": shape.vocab - 6,
        "pad_token_id": shape.vocab - 6,
    }
    model = LLaDA.from_published(Published(config), device=device, dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1.0)
    return model


def measure_ceilings(shape: Shape, device: torch.device, dtype: torch.dtype, runs: int) -> Ceilings:
    source = torch.zeros(shape.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = median_s(lambda: target.copy_(source), runs, device)
    n = shape.product
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    multiplying = median_s(lambda: a @ b, runs, device)
    return Ceilings(2 * shape.copied / copying, 2 * n**3 / multiplying)


# ------------------------------------------------------------------------------------------- parts


def ceiling_rows(bench: Bench) -> Iterator[Row]:
    yield Row("ceiling", "copy", bench.ceilings.bytes_s / 1e12, "TB/s")
    yield Row("ceiling", "matrix product", bench.ceilings.ops_s / 1e12, "TFLOP/s")
    weight = bench.model.blocks[0].feed_forward.parts()["gate"]  # type: ignore[union-attr, operator]
    for n in (32, 128, 256):
        x = torch.ones(n, weight.shape[1], dtype=weight.dtype, device=bench.device)
        floor = bench.ceilings.seconds(weight.nbytes, 2 * n * weight.numel())
        seconds = median_s(lambda x=x: x @ weight.T, bench.runs, bench.device)  # type: ignore[misc]
        yield bench.row("ceiling", f"{n} rows through a feed-forward matrix", seconds, floor)


def kernel_rows(bench: Bench) -> Iterator[Row]:
    """Statistics of given logits by every kernel that runs here, greedily and drawing."""
    vocab, device = bench.shape.vocab, bench.device
    for n in (32, 256):
        logits = torch.randn(n, vocab, device=device).to(bench.model.dtype)
        for temperature in (0.0, 1.0):
            plan = HeadPlan(vocab, frozenset({"entropy", "p2"}), Draw(temperature), 0)
            found = {}
            for name in ("reference", "triton") if device.type == "cuda" else ("reference",):
                with kernel(name):
                    found[name] = statistics_pass(tile_of(logits), scored(n, device), plan)
                    seconds = median_s(
                        lambda n=n, logits=logits, plan=plan: statistics_pass(  # type: ignore[misc]
                            tile_of(logits), scored(n, device), plan
                        ),
                        bench.runs,
                        device,
                    )
                what = f"{name}, {n} rows, temperature {temperature:g}"
                yield bench.row("statistics", what, seconds, logits.nbytes / bench.ceilings.bytes_s)
            if not all(torch.equal(f["top1"], found["reference"]["top1"]) for f in found.values()):
                raise RuntimeError("the kernels disagree about the best ids")


@contextmanager
def kernel(name: str) -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        os.environ.update({} if before is None else {VARIABLE: before})


def scored(n: int, device: torch.device) -> Scored:
    at = torch.arange(n, device=device)
    return Scored(at, at, at)


def tile_of(logits: Tensor) -> Callable[[int, int], Tensor]:
    """Tiles of logits; a copy is left out where the whole is one tile, as with a head."""
    whole = logits.shape[1]
    return lambda a, b: logits if (a, b) == (0, whole) else logits[:, a:b].clone()


class Window:
    """A window forward with its statistics over fixed buffers: `ids (B W,)` in, top ids out."""

    def __init__(self, bench: Bench, batch: int) -> None:
        shape, info, device = bench.shape, bench.model.info, bench.device
        self.model, self.vocab = bench.model, shape.vocab
        store = KVStore(
            info, pages=batch, page_length=shape.row, dtype=bench.model.dtype, device=device
        )
        for pool in (*store.keys, *store.values):
            pool.data.normal_()
        begin = torch.arange(batch, device=device)[:, None] * shape.row + shape.prompt
        places = (begin + torch.arange(shape.block, device=device)).flatten()
        self.positions = places % shape.row
        group = Group(0, batch, shape.block, False, shape.row, None, 0, shape.row)
        self.attend: Attend = PackedAttention((group,), store, None, places, write_all=True)
        self.ids = torch.zeros_like(places)
        self.plan = HeadPlan(shape.vocab, frozenset({"entropy"}), Draw(), info.mask_id)
        self.scored = scored(len(places), device)

    def __call__(self) -> tuple[Tensor, Tensor]:
        hidden = self.model.forward(self.ids, self.positions, self.attend)
        found = statistics_pass(
            lambda a, b: self.model.logits(hidden, a, b), self.scored, self.plan
        )
        return found["top1"], found["p1"]


def captured(run: Callable[[], Any], device: torch.device) -> tuple[Callable[[], object], Any]:
    """A replay of `run` as a CUDA graph and its (static) results; elsewhere `run` itself."""
    if device.type != "cuda":
        found = [torch.empty_like(t) for t in run()]

        def again() -> None:
            for kept, made in zip(found, run(), strict=True):
                kept.copy_(made)

        return again, found
    return OnGPU(device)(run)


def window_rows(bench: Bench) -> Iterator[Row]:
    """A window forward and its statistics, eagerly and as a graph."""
    shape, device = bench.shape, bench.device
    for batch in shape.batches:
        run = Window(bench, batch)
        replay, kept = captured(run, device)
        for step in range(STEPS_COMPARED):
            run.ids.copy_((torch.arange(len(run.ids)) * 7919 + step) % (shape.vocab - 8))
            eager = [t.clone() for t in run()]
            replay()
            if not all(torch.equal(a, b) for a, b in zip(eager, kept, strict=True)):
                raise RuntimeError(f"batch {batch}: the graph differs from eager")
        floor = bench.forward_floor_s(batch, shape.block, batch * shape.block, own=False)
        for name, once in (("eager", run), ("graph", replay)):
            seconds = median_s(once, bench.runs, device)
            yield bench.row("window", f"{name}, batch {batch}", seconds, floor)


@contextmanager
def no_syncs(device: torch.device) -> Iterator[None]:
    """Reading a value on the host is an error in the device part of a turn."""
    computed = DevicePart.__call__

    def watched(*args: Any) -> tuple[Tensor, Any]:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            return computed(*args)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    DevicePart.__call__ = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        DevicePart.__call__ = computed  # type: ignore[method-assign]


def attention_rows(bench: Bench) -> Iterator[Row]:
    """One layer's attention of windows over rows of several lengths: a call a row, one for all."""
    info, shape = bench.model.info, bench.shape
    for batch in shape.batches:
        lengths = [shape.row - i * shape.row // (2 * batch) for i in range(batch)]
        given = trial(lengths, shape.block, info, device=bench.device, dtype=bench.model.dtype)
        ways = {"sdpa": given.apart, "flex": given.together}
        if bench.device.type != "cuda":
            ways.pop("flex")
        elif not torch.allclose(given.together(), given.apart(), rtol=0.02, atol=0.02):
            raise RuntimeError(f"batch {batch}: FlexAttention differs")
        for name, run in ways.items():
            seconds = median_s(run, bench.runs, bench.device)
            floor = bench.ceilings.seconds(given.k.nbytes + given.v.nbytes)
            yield bench.row("attention", f"{name}, {batch} ragged rows", seconds, floor)


def requests(shape: Shape, batch: int) -> list[Request]:
    ids = [[(31 * b + i) % (shape.vocab - 8) for i in range(shape.prompt)] for b in range(batch)]
    lengths = {"gen_length": shape.length, "block_length": shape.block, "stop_at_eos": False}
    return [Request(prompt, **lengths) for prompt in ids]  # type: ignore[arg-type]


def decoder_of(bench: Bench, batch: int, region: str, *, graphs: bool = False) -> Decoder:
    """With `graphs`, where there is a GPU for them."""
    turns = bench.shape.length // bench.shape.tokens_per_turn
    return Decoder(
        bench.model,
        "llada",
        "dual",
        max_batch_size=batch,
        options={"steps": turns, "refresh_region": region},
        graphs=graphs and bench.device.type == "cuda",
    )


def turn_rows(bench: Bench) -> Iterator[Row]:
    """Turns of the engine in the second block: the refresh, and the median window turn.

    With graphs all turns of that block are replayed, for the first has the same structures.
    """
    shape = bench.shape
    per_block = shape.block // shape.tokens_per_turn
    for batch, graphs in product(shape.batches, (False, True)):
        frames = decoder_of(bench, batch, "whole", graphs=graphs).stream(requests(shape, batch))
        times = []
        for _ in range(2 * per_block):
            began = time.perf_counter()
            for _ in range(batch):  # a turn ends with a transfer to the host
                next(frames)
            times.append(time.perf_counter() - began)
        most = batch * shape.block
        how = f"batch {batch}, {'graphs' if graphs else 'eager'}"
        refresh = bench.forward_floor_s(batch, shape.row, most, own=True)
        yield bench.row("turn", f"refresh, {how}", times[per_block], refresh)
        window = bench.forward_floor_s(batch, shape.block, most, own=False)
        seconds = statistics.median(times[per_block + 1 :])
        yield bench.row("turn", f"window, {how}", seconds, window)


def sync_rows(bench: Bench) -> Iterator[Row]:
    """Turns that may not read a value on the host before all is decided; fails where one does."""
    frames = decoder_of(bench, 1, "whole").stream(requests(bench.shape, 1))
    with no_syncs(bench.device):
        turns = [next(frames).turn for _ in range(3)]
    yield Row("turn", "turns without a host sync before their end", float(len(turns)), "turns")


def decode_rows(bench: Bench) -> Iterator[Row]:
    """Tokens a second of whole decodings, with refreshes of the row and of what is generated."""
    shape = bench.shape
    kinds_of_run = product((1, 8), ("whole", "generation"), (False, True))
    tokens: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    for batch, region, graphs in kinds_of_run:
        if batch > max(shape.batches):
            continue
        decoder = decoder_of(bench, batch, region, graphs=graphs)
        asked = requests(shape, batch)
        began = time.perf_counter()
        results = decoder.generate(asked)
        rate = batch * shape.length / (time.perf_counter() - began)
        ids = [result.ids for result in results]
        if tokens.setdefault((batch, region), ids) != ids:
            raise RuntimeError(f"refresh {region}, batch {batch}: graphs change the tokens")
        kinds = results[0].trace.forwards_by_kind
        refreshed = shape.row if region == "whole" else shape.length
        most, blocks = batch * shape.block, shape.length // shape.block
        first = bench.forward_floor_s(batch, shape.row, most, own=True)
        again = bench.forward_floor_s(batch, refreshed, most, own=region == "whole")
        window = bench.forward_floor_s(batch, shape.block, most, own=False)
        turns = sum(kinds.values()) - blocks
        bound = batch * shape.length / (first + (blocks - 1) * again + turns * window)
        per_forward = shape.length / sum(kinds.values())
        computed = sum(r.trace.computed_positions for r in results) / (batch * shape.length)
        how = "graphs" if graphs else "eager"
        what = f"refresh {region}, batch {batch}, {how} (TPF {per_forward:.2f}, PPT {computed:.1f})"
        yield Row("decode", what, rate, "tokens/s", bound, rate / bound)


PARTS = (
    *(ceiling_rows, kernel_rows, window_rows, turn_rows, sync_rows, decode_rows),
    attention_rows,  # the last: it compiles
)


def cells(row: Row) -> str:
    values = (f"{v:.3g}" if isinstance(v, float) else v or "" for v in asdict(row).values())
    return "| " + " | ".join(values) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--device", help="default: cuda, with --smoke cpu")
    parser.add_argument("--dtype", help="default: bfloat16, with --smoke float32")
    parser.add_argument("--batches", type=int, nargs="+", help="default: 1 2 4 8 16")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each figure")
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    args = parser.parse_args()
    shape = SMOKE if args.smoke else Shape()
    if args.batches:
        shape = replace(shape, batches=tuple(args.batches))
    device = torch.device(args.device or ("cpu" if args.smoke else "cuda"))
    dtype = getattr(torch, args.dtype or ("float32" if args.smoke else "bfloat16"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench_gpu: this torch sees no GPU; --smoke tries the script on a CPU")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}, {dtype}, {shape}\n", flush=True)
    rows: list[Row] = []
    failures: list[str] = []
    with torch.inference_mode():
        model = make_model(shape, device, dtype)
        bench = Bench(shape, model, measure_ceilings(shape, device, dtype, args.runs), args.runs)
        print("| " + " | ".join(Row.__dataclass_fields__) + " |\n" + "| --- " * 6 + "|")
        for part in PARTS:
            try:
                for row in part(bench):
                    rows.append(row)
                    print(cells(row), flush=True)
            except Exception as error:  # one part that fails must not cost the others' figures
                failures.append(f"{part.__name__}: {type(error).__name__}: {error}")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if failures:
        raise SystemExit("\n".join(["", "bench_gpu: failed", *failures]))


if __name__ == "__main__":
    main()
