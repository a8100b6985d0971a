"""LoRA adapters in peft's published form, merged into a model's weights when it is loaded.

peft itself computes and merges the updates, in linear layers that share the model's weights and
stand under their published names. Only JSON and safetensors are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.models.loading import check_finite, open_shard, read_json
from dlm_decode.models.published import Family

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "init_lora_weights": (True, False, "gaussian"),
    "fan_in_fan_out": (False,),
}
"""What adapter_config.json may say where not everything is supported; other fields are peft's."""


@torch.no_grad()
def merge_adapter(model: Family, folder: str | Path) -> None:
    """Add an adapter's updates to the weights of `model`, in place.

    Raises `CheckpointError` for an adapter that is no plain LoRA of this model, `CapabilityError`
    without peft.
    """
    path = Path(folder).expanduser()
    config, stored = lora_config(path), adapter_tensors(path)
    weights = model.weights()
    tree, layers = linear_tree(weights)
    inject(tree, config, stored)
    for name in layers:
        layer: Any = tree.get_submodule(name)
        if hasattr(layer, "merge"):
            layer.merge()
            weights[f"{name}.weight"].copy_(layer.get_base_layer().weight)
            check_finite(f"{name}.weight with {path.name}", weights[f"{name}.weight"])


def lora_config(path: Path) -> LoraConfig:
    """The settings of an adapter's folder; refuses what is beyond a plain LoRA."""
    if not path.is_dir():
        raise CheckpointError(f"the adapter must be a folder with {CONFIG}, and {path} is none")
    settings = read_json(path / CONFIG)
    for key, allowed in PLAIN.items():
        value = settings.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(
                f"{path / CONFIG}: {key} is {value!r}, but only "
                f"{' or '.join(map(repr, allowed))} can be merged"
            )
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise CapabilityError(
            "merging an adapter needs peft: pip install 'dlm-decode[lora]'"
        ) from error
    try:
        return LoraConfig.from_peft_type(**{**settings, "inference_mode": True})
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path / CONFIG} is no configuration of peft: {error}") from error


def adapter_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's folder; a pickle is refused."""
    file = path / WEIGHTS
    if not file.is_file():
        pickles = sorted(p.name for p in path.glob("*.bin"))
        hint = f"; {pickles[0]} is a pickle, which is never loaded: convert it" if pickles else ""
        raise CheckpointError(f"{path} has no {WEIGHTS}{hint}")
    with open_shard(file) as shard:
        return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118


def linear_tree(weights: Mapping[str, Tensor]) -> tuple[nn.Module, list[str]]:
    """Linear layers over the matrices of `weights`, nested by their names; and those names."""
    tree, layers = nn.Module(), []
    for stored, view in weights.items():
        name, _, kind = stored.rpartition(".")
        if kind != "weight" or view.ndim != 2:
            continue
        *parents, last = name.split(".")
        node = tree
        for part in parents:
            if part not in dict(node.named_children()):
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.out_features, layer.in_features = view.shape
        layer.weight = nn.Parameter(view, requires_grad=False)
        node.add_module(last, layer)
        layers.append(name)
    return tree, layers


def inject(tree: nn.Module, config: LoraConfig, stored: Mapping[str, Tensor]) -> None:
    """Put the adapter into the layers it names, with its tensors; every one must find its place."""
    from peft import inject_adapter_in_model, set_peft_model_state_dict

    try:
        inject_adapter_in_model(config, tree)
    except ValueError as error:
        raise CheckpointError(f"the adapter does not fit the model: {error}") from error
    try:
        found: Any = set_peft_model_state_dict(tree, dict(stored))
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the adapter does not fit the model: {error}") from error
    missing = [name for name in found.missing_keys if "lora_" in name]
    problems = {"missing": missing, "of no layer here": list(found.unexpected_keys)}
    for kind, names in problems.items():
        if names:
            raise CheckpointError(
                f"the adapter does not fit the model: {len(names)} tensors {kind}: {names[0]}"
            )
