"""Train the dependency predictor of the `demask` sampler for a model, from the model's own answers.

    python scripts/train_demask.py --out demask.safetensors
    python scripts/train_demask.py --model FOLDER --prompts prompts.txt --out demask.safetensors

Then: dlm-decode generate --model FOLDER --sampler demask --set predictor=demask.safetensors
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path

import torch

from dlm_decode.api import Decoder, load
from dlm_decode.errors import DlmDecodeError
from dlm_decode.options import describe_options
from dlm_decode.tasks import FAMILIES, train_stream
from dlm_decode.training.demask import DemaskConfig, Text, save_predictor, train_predictor


def parse_arguments() -> argparse.Namespace:
    """The command line; training options come from `DemaskConfig`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id (default: the bundled model)")
    parser.add_argument("--dtype", help="such as float32 (default: the checkpoint's)")
    parser.add_argument("--device", help="such as cuda (default: cpu)")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument(
        "--prompts", type=Path, help="text file, one prompt a line (default: the built-in tasks)"
    )
    parser.add_argument("--examples", type=int, default=512, help="answers to learn from")
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers")
    parser.add_argument("--threads", type=int, default=1)
    for info in describe_options(DemaskConfig):
        flag = "--" + info.name.replace("_", "-")
        parser.add_argument(flag, default=info.default, help=f"{info.help} ({info.default})")
    return parser.parse_args()


def prompts_of(args: argparse.Namespace) -> list[str]:
    """Prompts from the file, or from the training stream of all task families alike."""
    if args.prompts is not None:
        lines = args.prompts.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.strip()][: args.examples]
    stream = train_stream(dict.fromkeys(FAMILIES, 1.0), seed=f"demask/{args.seed}")
    return [item.prompt for item in islice(stream, args.examples)]


def own_answers(
    decoder: Decoder, prompts: list[str], config: DemaskConfig, length: int
) -> list[Text]:
    """What the model itself answers, whole canvases."""
    results = decoder.generate(
        prompts, gen_length=length, block_length=config.block_length, stop_at_eos=False
    )
    return [Text(r.canvas, len(r.canvas) - length) for r in results]


def main() -> int:
    """Answer the prompts, train, calibrate, write the file, and print the calibration."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    try:
        config = DemaskConfig(**{f.name: getattr(args, f.name) for f in fields(DemaskConfig)})
        loaded = load(args.model, dtype=args.dtype, device=args.device)
        decoder = Decoder(
            loaded,
            "threshold",
            "dual",
            temperature=args.temperature,
            seed=config.seed,
            max_batch_size=args.batch_size,
        )
        sequences = own_answers(decoder, prompts_of(args), config, args.gen_length)
        weights, calibration = train_predictor(loaded.model, sequences, config, log=report)
    except DlmDecodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    save_predictor(args.out, loaded.model, weights, calibration, config)
    print(json.dumps({"bytes": args.out.stat().st_size, **asdict(calibration)}))
    return 0


def report(step: int, loss: float) -> None:
    """Every 20th loss, on the error stream."""
    if step % 20 == 0:
        print(f"step {step}: loss {loss:.4f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
