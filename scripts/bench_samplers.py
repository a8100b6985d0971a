"""What each sampler's own work costs beside the network, as a Markdown table.

    python scripts/bench_samplers.py --threads 1
    python scripts/bench_samplers.py --samplers threshold klass --batches 1 8 --cache none

Every sampler (a wrapper goes around `threshold`) decodes one block of a random LLaDA. `decide` is
the time of its `query` and `decide` in a turn; `backbone` is the network's without the LM head, in
which lies what a sampler makes it compute beside the window (see `positions` a turn and `needs`).
Medians over turns, in seconds spent (`clock_of`).
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dlm_decode.api import Decoder
from dlm_decode.clock import clock_of
from dlm_decode.models import DiffusionLM
from dlm_decode.models.toy import random_llada
from dlm_decode.samplers import SAMPLERS

EXEMPT = {"logits", "attention", "hidden", "soft_embeddings", "shadow", "window"}
"""Needs beyond the usual statistics."""


@dataclass(frozen=True)
class Cost:
    """One sampler at one batch size; times are medians of a turn."""

    sampler: str
    batch: int
    needs: str
    decide_ms: float
    backbone_ms: float
    share: float
    positions: float


class Stopwatch:
    """Stands for an object and notes the seconds of some of its methods, call by call."""

    def __init__(self, held: Any, methods: tuple[str, ...], clock: Callable[[], float]) -> None:
        self._held, self._methods, self._clock = held, methods, clock
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._held, name)
        return self._timed(name, found) if name in self._methods else found

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._clock()
            result = call(*args, **kwargs)
            self.seconds[name].append(self._clock() - began)
            return result

        return timed


def cost(model: DiffusionLM, name: str, batch: int, args: argparse.Namespace) -> Cost:
    """Decode one block with the sampler, twice, and take the medians of the second time."""
    decoder = Decoder(model, name, args.cache, max_batch_size=batch)
    needs = decoder.parts.sampler.needs & EXEMPT
    clock = clock_of(model.device)
    network: Any = Stopwatch(model, ("forward",), clock)
    sampler: Any = Stopwatch(decoder.parts.sampler, ("query", "decide"), clock)
    decoder.engine = replace(decoder.engine, model=network, sampler=sampler)
    generator = torch.Generator().manual_seed(batch)
    high = min(model.info.mask_id, *model.info.end_ids)
    prompts = torch.randint(0, high, (batch, args.prompt), generator=generator).tolist()
    lengths = {"gen_length": args.block, "block_length": args.block, "stop_at_eos": False}
    decoder.generate(prompts, **lengths)
    for watch in (network, sampler):
        watch.seconds.clear()
    results = decoder.generate(prompts, **lengths)
    own = [sum(parts) for parts in zip(*sampler.seconds.values(), strict=True)]
    decide, backbone = statistics.median(own), statistics.median(network.seconds["forward"])
    computed = sum(r.trace.computed_positions for r in results) / sum(r.forwards for r in results)
    shown = ", ".join(sorted(needs)) or "-"
    return Cost(name, batch, shown, decide * 1e3, backbone * 1e3, decide / backbone, computed)


def table(rows: Iterable[Cost]) -> Iterator[str]:
    """Lines of Markdown."""
    names = [name.replace("_", " ") for name in Cost.__dataclass_fields__]
    yield "| " + " | ".join(names) + " |"
    yield "|" + " --- |" * len(names)
    for row in rows:
        values = asdict(row) | {"share": f"{row.share:.1%}"}
        shown = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in values.values())
        yield "| " + " | ".join(shown) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS.names())
    parser.add_argument("--cache", default="dual")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = random_llada(
        layers=args.layers,
        hidden=args.width,
        heads=max(args.width // 64, 1),
        vocab=args.vocab,
        max_positions=args.prompt + args.block,
    )
    runs = (cost(model, name, batch, args) for name in args.samplers for batch in args.batches)
    for line in table(runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
