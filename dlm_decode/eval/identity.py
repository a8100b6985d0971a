"""What exactly was run: everything that can change a result, and what it ran on."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_decode import __version__

if TYPE_CHECKING:
    from dlm_decode.eval.decoding import Asking
    from dlm_decode.eval.problems import ProblemSet

WHOLE_BYTES = 1 << 30
SAMPLE_BYTES = 1 << 20
MODELS_OWN = "the model's"
LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def describe_run(args: argparse.Namespace, questions: ProblemSet, asking: Asking) -> dict[str, Any]:
    """The run's identity: two runs with equal ones give equal results."""
    from dlm_decode.arguments import parse_parts
    from dlm_decode.caches import CACHES
    from dlm_decode.schedules import SCHEDULES

    parts = parse_parts(args)
    return {
        "protocol": questions.protocol.id,
        "protocol_sha256": questions.protocol.sha256,
        "data_sha256": dict(questions.sha256),
        "model": describe_model(args.model),
        "sampler": args.sampler,
        "sampler_options": _plain(parts.sampler),
        "cache": CACHES.name_of(parts.cache),
        "cache_options": _plain(parts.cache),
        "schedule": SCHEDULES.name_of(parts.schedule) if args.schedule else MODELS_OWN,
        "schedule_options": _plain(parts.schedule),
        "draw": _plain(parts.draw),
        "cfg_scale": args.cfg_scale,
        "seed": args.seed,
        "dtype": _dtype(args),
        "compile": args.compile,
        "prepack": args.prepack,
        "adapter": None if args.adapter is None else describe_model(args.adapter),
        "kv_dtype": args.kv_dtype,
        "share_prompts": args.share_prompts,
        "forcing": args.forcing,
        "version": __version__,
        **asdict(asking),
    }


def _devices(args: argparse.Namespace) -> list[str]:
    """The devices that the layers lie on."""
    return (args.device or "cpu").split(",")


def _dtype(args: argparse.Namespace) -> str | None:
    """What was asked for, but what "auto" is on this machine: a result depends on it."""
    from dlm_decode.machine import automatic_dtype, named_device

    found = automatic_dtype(named_device(_devices(args)[0])) if args.dtype == "auto" else None
    return args.dtype if found is None else str(found).removeprefix("torch.")


def _plain(configuration: Any) -> Any:
    """A configuration as JSON would have it; wrapped samplers nest."""
    values = asdict(configuration)
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def describe_model(name: str | None) -> dict[str, str]:
    """The name of a model or adapter and a digest of its files, weights and tokenizer."""
    from dlm_decode.models.loading import bundled_model_path, local_folder

    folder = bundled_model_path() if name is None else local_folder(name)
    files = sorted(path for path in folder.glob("*") if path.is_file())
    return {"name": name or "bundled", "sha256": _fingerprint(files)}


def _fingerprint(files: Iterable[Path]) -> str:
    """A digest of names, sizes and contents; of files above 1 GiB, of both ends."""
    found = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as stream:
            if size <= WHOLE_BYTES:
                found.update(stream.read())
            else:
                found.update(stream.read(SAMPLE_BYTES))
                stream.seek(-SAMPLE_BYTES, os.SEEK_END)
                found.update(stream.read())
    return found.hexdigest()


def describe_machine(args: argparse.Namespace) -> dict[str, Any]:
    """What a speed depends on and a result should not."""
    return {
        "device": args.device or "cpu",
        "device_name": ", ".join(dict.fromkeys(map(_device_name, _devices(args)))),
        "batch_size": args.batch_size,
        "threads": args.threads,
        "workers": args.workers,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: _version(name) for name in LIBRARIES},
    }


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "none"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
