"""Published checkpoints, read from a folder or a Hugging Face hub id and written back.

Only JSON, tokenizer files and safetensors are read: nothing is unpickled and no remote code runs.
Tensors go one at a time into parameters that are allocated once, in the target dtype and device.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files as resource_files
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.memory import require_bytes
from dlm_decode.models import FAMILIES, share_of
from dlm_decode.models.placement import Devices, place
from dlm_decode.models.published import Family, Published
from dlm_decode.models.refused import causal_hint, why_refused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dlm_decode.ranks import Ranks
    from dlm_decode.tensor_parallel import Piece

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SMALL_FILES = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
WEIGHT_FILES = ["*.safetensors"]
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
NAMES_SHOWN = 3


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer (None if the folder has none) and the folder they came from."""

    model: Family
    tokenizer: PreTrainedTokenizerBase | None
    path: Path


@torch.inference_mode(False)
@torch.no_grad()
def load_model(
    path_or_hub_id: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: Devices | str = "cpu",
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load a checkpoint of any registered family.

    `dtype` defaults to the one that config.json names, else to the one of the stored weights.
    Several devices share the layers, see `dlm_decode.models.placement`; with `ranks` this process
    loads its part of every layer, see `dlm_decode.tensor_parallel`.
    Raises `CheckpointError` for anything amiss with the files, `CapacityError` if they do not fit.
    """
    path = local_folder(path_or_hub_id)
    family = find_family(read_json(path / "config.json"))
    shards = weight_shards(path, stored_name(family))
    files = published_files(path)
    dtype = dtype or configured_dtype(files.config) or stored_dtype(shards)
    plan = meta_model(files, dtype)
    check_tensors(plan, shards)
    check_vocabulary(files.tokenizer, plan.info.vocab_size)
    device = torch.device(device) if isinstance(device, str) else device
    pieces = {} if ranks is None else _pieces(plan, ranks)
    if ranks is None and isinstance(device, torch.device):
        check_memory(plan, device)
        model = family.from_published(files, device=device, dtype=dtype)
    else:
        place(plan, [device] if isinstance(device, torch.device) else device)
        model = plan
    fill(model, shards, pieces)
    return LoadedModel(model, files.tokenizer, path)


def meta_model(files: Published, dtype: torch.dtype) -> Family:
    """The model of a checkpoint's small files on the meta device: shapes only."""
    try:
        return find_family(files.config).from_published(files, device="meta", dtype=dtype)
    except RuntimeError as error:  # what torch makes of sizes beyond its own
        raise CheckpointError(f"config.json: torch makes no model of it: {error}") from error


def _pieces(plan: Family, ranks: Ranks) -> dict[str, Piece]:
    from dlm_decode.tensor_parallel import split  # loads torch.distributed, which takes time

    return split(plan, ranks)


def published_files(path: Path) -> Published:
    """What the small files of a folder say, with its tokenizer."""
    config, generation = read_json(path / "config.json"), path / "generation_config.json"
    settings = read_json(generation) if generation.exists() else {}
    return Published(config, settings, load_tokenizer(path))


def planned(
    path_or_hub_id: str | Path, dtype: torch.dtype | None = None
) -> Callable[[torch.device | str], Family]:
    """How to allocate a checkpoint's model on a device, without filling it. No weights are read."""
    path = local_folder(path_or_hub_id)
    config = read_json(path / "config.json")
    family = find_family(config)
    generation = path / "generation_config.json"
    settings = read_json(generation) if generation.exists() else {}
    files = Published(config, settings, load_tokenizer(path))
    found = dtype or configured_dtype(config)
    if found is None:
        found = stored_dtype(weight_shards(path, stored_name(family)))
    return lambda device: family.from_published(files, device=device, dtype=found)


def bundled_model_path() -> Path:
    """The folder of the tiny LLaDA model that comes with the package."""
    return Path(str(resource_files("dlm_decode") / "assets" / "tiny-llada"))


def local_folder(path_or_hub_id: str | Path, *, weights: bool = True) -> Path:
    """The folder itself, or the snapshot of a hub id; configuration first, to refuse it early.

    Without `weights`, no weights are fetched.
    """
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return folder
    hub_id = str(path_or_hub_id)
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", hub_id):
        raise CheckpointError(f"no folder {hub_id!r}, and it is no hub id (owner/name) either")
    snapshot = _snapshot(hub_id, SMALL_FILES)
    find_family(read_json(snapshot / "config.json"))
    return _snapshot(hub_id, SMALL_FILES + WEIGHT_FILES) if weights else snapshot


def _snapshot(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"no local folder {hub_id!r}, and the hub gave no such model: {error}; check the name "
            "and the network, or pass the path of a downloaded folder"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises `CheckpointError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def find_family(config: Mapping[str, Any]) -> type[Family]:
    """The registered family of a config.json."""
    kind, classes = config.get("model_type"), config.get("architectures") or []
    if not isinstance(kind, str | None):
        raise CheckpointError(f"config.json: model_type must be a name, got {kind!r}")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise CheckpointError(f"config.json: architectures must be a list of names: {classes!r}")
    refusal = why_refused(config)
    if refusal is not None:
        raise CheckpointError(
            f"model_type {kind!r} with architectures {classes} can't be decoded: {refusal}"
        )
    for name in FAMILIES.names():
        family = cast("type[Family]", FAMILIES.get(name))
        if family.matches(config):
            return family
    known = ", ".join(FAMILIES.names())
    raise CheckpointError(
        f"model_type {config.get('model_type')!r} with architectures "
        f"{config.get('architectures')} is of no known family (known: {known}); only masked "
        "diffusion models can be decoded, and `dlm-decode list models` says what each family is"
        + causal_hint(config)
    )


@dataclass(frozen=True)
class Shards:
    """Which file stores which tensor, from which byte on, with its shape and dtype.

    `name_of` gives a stored tensor its name.
    """

    name_of: Callable[[str], str | None]
    files: dict[str, Path] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)

    def read(
        self, name: str, file: BinaryIO, into: Tensor | None = None, piece: Piece | None = None
    ) -> Tensor:
        """A stored tensor, or a piece of it, read from its file, which is open.

        `into`: its place, if that fits. Read rather than mapped: what is mapped counts as memory
        until the whole file is let go.
        """
        whole, dtype = self.shapes[name], self.dtypes[name]
        shape = whole if piece is None else piece.shape(whole)
        fits = into is not None and into.device.type == "cpu" and into.is_contiguous()
        if into is None or not fits or into.dtype != dtype:
            into = torch.empty(shape, dtype=dtype)
        room = memoryview(into.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for first, count in [(0, into.numel())] if piece is None else piece.runs(whole):
            file.seek(self.places[name] + first * dtype.itemsize)
            self._fill(name, file, room[: count * dtype.itemsize])
            room = room[count * dtype.itemsize :]
        return into

    def _fill(self, name: str, file: BinaryIO, room: memoryview) -> None:
        while room:
            count = file.readinto(room)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(f"{file.name} ends within {name}; download it again")
            room = room[count:]


def stored_name(family: type[Family]) -> Callable[[str], str | None]:
    """How a family calls a stored tensor, None if it has no use for it; most: as it is stored."""
    return getattr(family, "stored_name", str)


def weight_shards(path: Path, name_of: Callable[[str], str | None] = str) -> Shards:
    """What the headers of all weight files in a folder say."""
    found = Shards(name_of)
    for file in shard_paths(path):
        places = data_places(file)
        with open_shard(file) as shard:
            for stored in shard.keys():  # noqa: SIM118 (not a mapping)
                name = name_of(stored)
                if name is not None:
                    _note_tensor(found, name, file, shard.get_slice(stored), places[stored])
    if not found.files:
        raise CheckpointError(f"the weight files of {path} hold no tensors")
    return found


def stored_dtype(shards: Shards) -> torch.dtype:
    """The dtype of most numbers: single tensors, as a router's bias, may be kept wider."""
    sizes = Counter[torch.dtype]()
    for name, shape in shards.shapes.items():
        sizes[shards.dtypes[name]] += prod(shape)
    return sizes.most_common(1)[0][0]


def data_places(file: Path) -> dict[str, int]:
    """From which byte of a safetensors file on each of its tensors is stored."""
    with open_shard(file), open(file, "rb") as opened:  # refused by the first if it is broken
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {
        name: 8 + size + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _note_tensor(found: Shards, name: str, file: Path, header: Any, place: int) -> None:
    if name in found.files:
        raise CheckpointError(f"{name} is stored in {found.files[name].name} and in {file.name}")
    if header.get_dtype() not in STORED_DTYPES:
        raise CheckpointError(
            f"{name} in {file.name} is stored as {header.get_dtype()}; only "
            f"{', '.join(STORED_DTYPES)} are supported, no quantised weights"
        )
    found.files[name] = file
    found.shapes[name] = tuple(header.get_shape())
    found.dtypes[name] = STORED_DTYPES[header.get_dtype()]
    found.places[name] = place


def shard_paths(path: Path) -> list[Path]:
    """The safetensors files of a folder: those in its index, else the single one."""
    index = path / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = [SINGLE]
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names a file outside its folder: {outside[0]!r}")
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        pickles = sorted(p.name for p in path.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle, which is never loaded: convert it" if pickles else ""
        raise CheckpointError(f"{path} has no {_listed(absent)}{hint}")
    return [path / name for name in names]


def open_shard(path: Path) -> Any:
    """A safetensors file, opened for reading on the CPU."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {error}; download it again"
        ) from error


def configured_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that config.json names (under either of its keys), if any."""
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"config.json: dtype {name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_tensors(model: Family, shards: Shards) -> None:
    """Every tensor of the model is stored, in its shape, and nothing else is."""
    expected = {name: tuple(view.shape) for name, view in model.weights().items()}
    aliases = {again: expected[name] for again, name in model.aliases().items()}
    problems = {
        "missing": [name for name in expected if name not in shards.shapes],
        "unexpected": [name for name in shards.shapes if name not in expected | aliases],
        "misshapen": [
            f"{name} {shards.shapes[name]} instead of {shape}"
            for name, shape in (expected | aliases).items()
            if shards.shapes.get(name, shape) != shape
        ],
    }
    found = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in problems.items() if names]
    if found:
        raise CheckpointError("the weights do not match config.json: " + "; ".join(found))


def check_memory(model: Family, device: torch.device) -> None:
    """Refuse weights that are larger than what the device has free."""
    needed = sum(view.nbytes for view in model.weights().values())
    require_bytes(needed, device, f"the weights in {model.dtype}", "use a smaller dtype")


def fill(model: Family, shards: Shards, pieces: Mapping[str, Piece] | None = None) -> None:
    """Read every stored tensor or its piece into its place, one at a time, in the files' order."""
    slots, aliases, pieces = model.weights(), model.aliases(), pieces or {}
    for path in dict.fromkeys(shards.files.values()):
        with open(path, "rb", buffering=0) as file:
            for name in sorted(shards.places, key=shards.places.__getitem__):
                if shards.files[name] == path and name not in aliases:
                    slot = slots[name]
                    stored = shards.read(name, file, slot, pieces.get(name))
                    if stored is not slot:
                        slot.copy_(stored)
                    check_finite(name, slot)
    for name in aliases:
        if name in shards.files:
            with open(shards.files[name], "rb", buffering=0) as file:
                piece, slot = pieces.get(aliases[name]), slots[aliases[name]]
                repeat = shards.read(name, file, piece=piece)
            if not torch.equal(slot, repeat.to(slot.device, slot.dtype)):
                raise CheckpointError(f"{name} differs from {aliases[name]}, though they are tied")


def check_finite(name: str, weight: Tensor) -> None:
    """Refuse NaN and infinities; extremes carry both, and need no temporary of the same size."""
    low, high = weight.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise CheckpointError(f"{name} has NaN or infinite values in {weight.dtype}")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder, without running code from it; None if it has no files of one."""
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        return None
    settings = path / "tokenizer_config.json"
    described = read_json(settings) if settings.exists() else {}
    try:
        tokenizer = _tokenizer_class(path, described).from_pretrained(str(path))
    except Exception as error:  # whatever a broken file makes the tokenizer libraries raise
        raise CheckpointError(f"the tokenizer files of {path} do not load: {error}") from error
    for number, token in added_tokens(settings, described).items():
        found = tokenizer.convert_tokens_to_ids(token)
        if str(found) != number:
            raise CheckpointError(
                f"{settings} gives {token!r} the id {number}, but it loads as {found}"
            )
    return tokenizer


def added_tokens(settings: Path, described: Mapping[str, Any]) -> dict[str, str]:
    """Ids, as text, of the tokens that a tokenizer_config.json adds to a vocabulary."""
    added = described.get("added_tokens_decoder") or {}
    entries = list(added.values()) if isinstance(added, Mapping) else [added]
    if not all(isinstance(e, Mapping) and isinstance(e.get("content"), str) for e in entries):
        raise CheckpointError(f"{settings}: added_tokens_decoder must map ids to tokens")
    return {number: entry["content"] for number, entry in added.items()}


def _tokenizer_class(path: Path, described: Mapping[str, Any]) -> Any:
    """The class a folder names, or where that is code of the folder's own, the plain equivalent."""
    import transformers

    own = getattr(transformers, str(described.get("tokenizer_class")), None)
    plain = isinstance(own, type) and issubclass(own, transformers.PreTrainedTokenizerBase)
    if plain and "auto_map" not in described:
        return own
    if (path / "tokenizer.json").exists():
        return transformers.PreTrainedTokenizerFast
    return transformers.Qwen2Tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for."""
    if tokenizer is None:
        return
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:
        raise CheckpointError(
            f"the tokenizer has ids up to {highest}, but the model's vocabulary ends at "
            f"{vocab_size - 1}"
        )


@torch.no_grad()
def save_model(
    model: Family,
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a model in its published layout, in several files if it exceeds `max_shard_bytes`.

    Raises `CapabilityError` for one that several processes share.
    """
    if share_of(model) is not None:
        raise CapabilityError("this process has a part of the model only: save it from one process")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", published_config(model))
    weights = model.weights()
    shards = _split(weights, max_shard_bytes)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = [SINGLE] if len(shards) == 1 else names
    for file, shard in zip(names, shards, strict=True):
        tensors = {name: weights[name].clone().contiguous() for name in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {
            name: file for file, shard in zip(names, shards, strict=True) for name in shard
        }
        total = sum(view.nbytes for view in weights.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def published_config(model: Family) -> dict[str, Any]:
    """The config.json a model came from, with its present dtype and the ids it works with."""
    config = {key: value for key, value in model.published.items() if key != "dtype"}
    info = model.info
    ids = {"eos_token_id": info.end_ids, "pad_token_id": info.pad_id}
    ids |= {"mask_token_id": info.mask_id} if info.has_mask else {}
    found = {key: value for key, value in ids.items() if config.get(key) is None}
    return config | found | {"torch_dtype": str(model.dtype).removeprefix("torch.")}


def _split(weights: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Names in order, in lists of at most `max_bytes` together (a larger tensor stays alone)."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, view in weights.items():
        if shards[-1] and size + view.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += view.nbytes
    return shards


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - NAMES_SHOWN} more" if len(shown) > NAMES_SHOWN else ""
    return ", ".join(shown[:NAMES_SHOWN]) + more
