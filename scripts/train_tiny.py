"""Train the bundled tiny models: `ar` (the autoregressive twin), `diffusion` (from the twin's
weights), `report`.

    python scripts/train_tiny.py ar --work RUNS
    python scripts/train_tiny.py diffusion --work RUNS
    python scripts/train_tiny.py report --work RUNS --out dlm_decode/assets

A killed stage goes on from its last checkpoint when started again with the same options.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from dlm_decode.training.data import (
    Corpus,
    DiffusionBatch,
    NoiseConfig,
    Phase,
    causal_batch,
    diffusion_batch,
    phase_at,
)
from dlm_decode.training.decode import evaluate
from dlm_decode.training.export import export_causal, export_diffusion
from dlm_decode.training.loop import LoopConfig, Run, causal_loss, diffusion_loss
from dlm_decode.training.models import ModelConfig, TinyTransformer, to_diffusion
from dlm_decode.training.tokenizer import build_tokenizer, padded_vocab_size

Evaluate = Callable[[TinyTransformer], Mapping[str, Mapping[str, float]]]

WEIGHTS = {"mini-gsm8k": 1.0, "mini-mbpp": 0.5, "lists": 1.8, "grids": 0.8}
LATER_WEIGHTS = {"mini-gsm8k": 2.4, "mini-mbpp": 0.8, "lists": 0.7, "grids": 0.7}
LAST_WEIGHTS = {"mini-gsm8k": 3.0, "mini-mbpp": 0.8, "lists": 0.7, "grids": 0.4}
PHASES = (
    Phase(0, WEIGHTS, NoiseConfig()),
    Phase(700, LATER_WEIGHTS, NoiseConfig()),
    # Fully random masks often leave a result's later copy in sight; blocks do not, so more of them.
    Phase(1400, LAST_WEIGHTS, NoiseConfig(blockwise=0.75, block_lengths=(4, 8, 16, 16, 32))),
)
"""The diffusion stage moves to what is learned last: arithmetic."""


def parse_arguments() -> argparse.Namespace:
    """The command line; the defaults are the recipe of the bundled models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["ar", "diffusion", "report"])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and logs")
    parser.add_argument("--out", type=Path, help="report: folder to export both models to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--ar-steps", type=int, default=1250)
    parser.add_argument("--ar-rows", type=int, default=32, help="rows of 160 tokens a step")
    parser.add_argument(
        "--prompt-weight", type=float, default=0.3, help="ar: loss weight of prompt tokens"
    )
    parser.add_argument("--steps", type=int, default=4050, help="diffusion updates")
    parser.add_argument("--decay", type=float, default=0.63, help="share of the updates decayed")
    parser.add_argument("--tokens", type=int, default=8000, help="diffusion: tokens a step")
    parser.add_argument(
        "--lengths",
        type=parse_weights,
        default=parse_weights("72=0.5,96=0.3,120=0.2"),
        help="diffusion: row lengths and their shares",
    )
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--evaluate-every", type=int, default=400)
    parser.add_argument(
        "--evaluate-items", type=int, default=32, help="validation items a family during training"
    )
    parser.add_argument(
        "--report-items", type=int, default=200, help="test items a family in the report"
    )
    parser.add_argument("--report-seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def parse_weights(text: str) -> dict[str, float]:
    """`a=1,b=0.5` as a mapping."""
    return {
        name: float(weight) for name, _, weight in (part.partition("=") for part in text.split(","))
    }


def train_ar(args: argparse.Namespace, corpus: Corpus, model: TinyTransformer) -> None:
    """The autoregressive twin, in `WORK/ar`."""
    make_batch = partial(
        causal_batch, corpus, rows=args.ar_rows, length=160, prompt_weight=args.prompt_weight
    )
    run = Run(
        model,
        args.work / "ar",
        LoopConfig(args.ar_steps, args.learning_rate, evaluate_every=args.evaluate_every),
    )
    run.resume()
    run.train(make_batch, causal_loss, watcher(args, corpus, (None,)))


def train_diffusion(args: argparse.Namespace, corpus: Corpus, model: TinyTransformer) -> None:
    """The masked diffusion model from the twin's averaged weights, in `WORK/diffusion`."""
    lengths = {int(length): share for length, share in args.lengths.items()}

    def make_batch(step: int) -> DiffusionBatch:
        phase = phase_at(PHASES, step)
        mixture = Corpus(corpus.tokenizer, phase.weights, seed=args.seed)
        return diffusion_batch(
            mixture, step, tokens=args.tokens, lengths=lengths, noise=phase.noise
        )

    config = LoopConfig(
        args.steps, args.learning_rate, decay=args.decay, evaluate_every=args.evaluate_every
    )
    twin = load_average(args, model, "ar")
    model.load_state_dict(
        to_diffusion(twin, mask_id=corpus.mask_id, n_tokens=len(corpus.tokenizer)).state_dict()
    )
    run = Run(model, args.work / "diffusion", config)
    run.resume()
    run.train(make_batch, diffusion_loss, watcher(args, corpus, (1, 4, 8)))


def report(args: argparse.Namespace, corpus: Corpus, model: TinyTransformer) -> None:
    """Export what is trained and print test accuracy of the exported (fp16) weights as JSON."""
    if args.out is None:
        raise SystemExit("--out must be given for the report stage")
    for stage, export, folder, per_steps in (
        ("ar", export_causal, "tiny-ar", (None,)),
        ("diffusion", export_diffusion, "tiny-llada", (1, 2, 4, 8, 16)),
    ):
        trained = load_average(args, model, stage)
        export(trained, corpus, args.out / folder)
        rounded = trained.half().float()
        table = evaluate(
            rounded,
            corpus,
            per_steps=per_steps,
            n=args.report_items,
            seed=args.report_seed,
            split="test",
        )
        print(
            json.dumps(
                {
                    "stage": stage,
                    "n": args.report_items,
                    "seed": args.report_seed,
                    "accuracy": table,
                }
            )
        )


def watcher(
    args: argparse.Namespace, corpus: Corpus, per_steps: tuple[int | None, ...]
) -> Evaluate:
    """Accuracy on the same validation items every time."""
    return partial(
        evaluate, corpus=corpus, per_steps=per_steps, n=args.evaluate_items, seed=args.seed
    )


def load_average(args: argparse.Namespace, like: TinyTransformer, stage: str) -> TinyTransformer:
    """The averaged weights of a stage's checkpoint."""
    copy = TinyTransformer(like.config)
    copy.load_state_dict(
        torch.load(args.work / stage / "checkpoint.pt", weights_only=True)["average"]
    )
    return copy.eval()


def main() -> None:
    """Run one stage."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    corpus = Corpus(tokenizer, WEIGHTS, seed=args.seed)
    size = padded_vocab_size(tokenizer)
    model = TinyTransformer(ModelConfig(size, args.width, args.layers, args.heads, args.hidden))
    if args.compile and args.stage != "report":
        for block in model.blocks:
            block.compile(dynamic=False)
    {"ar": train_ar, "diffusion": train_diffusion, "report": report}[args.stage](
        args, corpus, model
    )


if __name__ == "__main__":
    main()
