"""Say what a checkpoint is and what can be done with it, without loading its weights.

PATH is a folder or a hub id, of which only the small files are fetched. Tensor names and shapes are
compared with what config.json asks for. Exit status 1: something that decoding needs is missing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm_decode.errors import CapabilityError, CheckpointError

if TYPE_CHECKING:
    from dlm_decode.models import ModelInfo
    from dlm_decode.models.loading import Shards
    from dlm_decode.models.published import Family, Published


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="folder or hub id of a checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    found = describe(args.path)
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 1 if found["missing"] else 0


def describe(path_or_hub_id: str) -> dict[str, Any]:
    """All that `inspect` prints. Raises `CheckpointError` for what no family can read."""
    from dlm_decode.machine import cpu_report
    from dlm_decode.models.loading import local_folder, published_files

    folder = local_folder(path_or_hub_id, weights=False)
    files = published_files(folder)
    model = plan(files)
    shards, problems = stored(folder, model)
    missing = problems + missing_texts(files)
    return {
        **identity(model),
        "sizes": sizes(model.info),
        "attention": attention(model.info),
        "ids": ids(model.info, files),
        "weights": weights(model, shards),
        "supports": supports(model.info),
        "cpu": cpu_report(),
        "missing": missing,
    }


def plan(files: Published) -> Family:
    """The model on the meta device: shapes only."""
    import torch

    from dlm_decode.models.loading import configured_dtype, meta_model

    return meta_model(files, configured_dtype(files.config) or torch.float32)


def stored(folder: Path, model: Family) -> tuple[Shards | None, list[str]]:
    """What the weight files hold (None: nothing readable), and what is wrong with them."""
    from dlm_decode.models.loading import check_tensors, stored_name, weight_shards

    shards = None
    try:
        shards = weight_shards(folder, stored_name(type(model)))
        check_tensors(model, shards)
    except CheckpointError as error:
        return shards, [str(error)]
    return shards, []


def missing_texts(files: Published) -> list[str]:
    """What is lacking of the tokenizer, and what that keeps one from doing."""
    if files.tokenizer is None:
        return ["no tokenizer files: prompts have to be token ids"]
    return []


def identity(model: Family) -> dict[str, Any]:
    """Family, what it is, and where it was published."""
    from dlm_decode.models import FAMILIES

    entry = next(e for e in FAMILIES.entries() if e.cls is type(model))
    published = {key: model.published.get(key) for key in ("model_type", "architectures")}
    return {"family": entry.name, "summary": entry.summary, "paper": entry.paper, **published}


def sizes(info: ModelInfo) -> dict[str, int]:
    """Layers, widths and counts."""
    names = ("layers", "hidden_size", "heads", "kv_heads", "head_size", "vocab_size")
    return {name: getattr(info, name) for name in (*names, "max_positions")}


def attention(info: ModelInfo) -> dict[str, Any]:
    """Who sees whom, in which blocks, and which token an output predicts."""
    blocks = {"block_length": info.block_length, "blocks_from": info.block_origin}
    return {"regime": info.regime, "shift": info.shift, **blocks}


def ids(info: ModelInfo, files: Published) -> dict[str, Any]:
    """Special ids, with their texts where there is a tokenizer."""
    found: Mapping[str, list[int]] = {
        "mask": [info.mask_id] if info.has_mask else [],
        "end": list(info.end_ids),
        "pad": [] if info.pad_id is None else [info.pad_id],
    }
    if files.tokenizer is None:
        return dict(found)
    texts = files.tokenizer.convert_ids_to_tokens
    return {name: dict(zip(map(str, n), texts(n), strict=True)) for name, n in found.items()}


def weights(model: Family, shards: Shards | None) -> dict[str, Any]:
    """Parameters, bytes in the dtype they load in, and the dtypes and files they are stored in."""
    views = model.weights().values()
    return {
        "parameters": sum(view.numel() for view in views),
        "bytes": sum(view.nbytes for view in views),
        "dtype": str(model.dtype).removeprefix("torch."),
        "stored_as": sorted({str(d).removeprefix("torch.") for d in shards.dtypes.values()})
        if shards
        else [],
        "files": len(set(shards.files.values())) if shards else 0,
    }


def supports(info: ModelInfo) -> dict[str, Any]:
    """Caches and samplers that fit, caches that change nothing, and the schedule by default."""
    from dlm_decode.api import default_schedule
    from dlm_decode.caches import CACHES, check_fit
    from dlm_decode.engine import check_needs
    from dlm_decode.samplers import SAMPLERS

    caches = [name for name in CACHES.names() if _fits(check_fit, CACHES.create(name), info)]
    samplers = [n for n in SAMPLERS.names() if _fits(check_needs, SAMPLERS.create(n), info)]
    exact = [name for name in caches if CACHES.get(name).exactness == "exact"]
    return {
        "caches": caches,
        "exact_caches": exact,
        "samplers": samplers,
        "schedule": default_schedule(info),
    } | ({"no_cache_because": info.whole_rows} if info.whole_rows else {})


def _fits(check: Callable[[Any, ModelInfo], None], part: Any, info: ModelInfo) -> bool:
    try:
        check(part, info)
    except CapabilityError:
        return False
    return True


def as_text(found: Mapping[str, Any]) -> str:
    """One line for each fact, sections indented."""
    lines: list[str] = []
    for name, value in found.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {_worded(inner)}" for key, inner in value.items())]
        else:
            lines.append(f"{name}: {_worded(value)}")
    return "\n".join(lines)


def _worded(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {text}" for key, text in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    return "any" if value is None else str(value)
