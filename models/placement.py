"""A backbone's layers over several devices: which layer goes where, and putting it there.

Layers lie in runs, one a device, in order: hidden states cross once at each border. The embedding
lies with the first layer, the last norm and the LM head with the last one (a head that is tied to
the embedding with the first), and what is decided is decided where the head is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from dlm_decode.errors import CapabilityError, OptionError
from dlm_decode.memory import available_bytes, require_bytes
from dlm_decode.models.backbone import Backbone
from dlm_decode.models.published import Family

Devices = torch.device | Sequence[torch.device] | Mapping[torch.device, int]
"""One device, or several to balance the layers over, or how many layers each of them takes."""


def place(model: Family, devices: Sequence[torch.device] | Mapping[torch.device, int]) -> None:
    """Allocate the weights of a model on the meta device on `devices`, in their order.

    Raises `CapabilityError` for a model that is no `Backbone`, `OptionError` for more devices than
    layers or a number of layers that is not the model's, `CapacityError` for too little memory.
    """
    if not isinstance(model, Backbone):
        raise CapabilityError(
            f"{model.info.family} has layers of its own, which can't lie on several devices: give "
            "one device"
        )
    homes = layer_homes(model, devices)
    for device, needed in weight_bytes(model, homes).items():
        what = f"the part of the weights in {model.dtype} that comes to {device}"
        require_bytes(needed, device, what, "use a smaller dtype or other devices")
    for block, home in zip(model.blocks, homes, strict=True):
        block.to_empty(device=home)
    last = homes[0] if model.config.tied else homes[-1]
    model.embed = _emptied(model.embed, homes[0])
    model.norm = _emptied(model.norm, last)
    model.head = model.embed if model.config.tied else _emptied(model.head, last)
    model.place_angles()


def layer_homes(
    model: Backbone, devices: Sequence[torch.device] | Mapping[torch.device, int]
) -> tuple[torch.device, ...]:
    """The device of each layer."""
    layers = model.config.layers
    if isinstance(devices, Mapping):
        counts = list(devices.values())
        if sum(counts) != layers or min(counts) < 1:
            raise OptionError(
                f"device gives {' + '.join(map(str, counts))} layers to its devices, and the model "
                f"has {layers}: give each device 1 or more, {layers} in all"
            )
    else:
        if len(devices) > layers:
            raise OptionError(
                f"device names {len(devices)} devices for {layers} layers: give at most {layers}"
            )
        sizes = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
        ends = (model.embed.nbytes, 0 if model.config.tied else model.head.nbytes)
        counts = balanced(sizes, *ends, room=_room(devices))
    return tuple(d for d, n in zip(devices, counts, strict=True) for _ in range(n))


def balanced(sizes: Sequence[int], first: int, last: int, *, room: Sequence[float]) -> list[int]:
    """How many layers each device takes, at least one, so that the fullest one is least full.

    Layers of `sizes` bytes, in order, go to devices with `room` bytes; the first of them also holds
    `first` bytes, the last one `last`. Of equally good ways the most even one.
    """
    before = [0, *accumulate(sizes)]
    before = [size + first * (i > 0) + last * (i == len(sizes)) for i, size in enumerate(before)]
    # ways[n], of devices that hold n layers: how full the fullest is, sum of squares, their counts
    ways: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for space in room:
        found: dict[int, tuple[float, float, list[int]]] = {}
        for start, (fullest, squares, counts) in ways.items():
            for stop in range(start + 1, len(sizes) + 1):
                full = (before[stop] - before[start]) / space
                way = max(fullest, full), squares + full**2, [*counts, stop - start]
                found[stop] = min(found.get(stop, way), way)
        ways = found
    return ways[len(sizes)][2]


def weight_bytes(model: Backbone, homes: Sequence[torch.device]) -> Counter[torch.device]:
    """Bytes of the weights that come to each device."""
    needed: Counter[torch.device] = Counter()
    for block, home in zip(model.blocks, homes, strict=True):
        needed[home] += sum(p.nbytes for p in block.parameters())
    needed[homes[0]] += model.embed.nbytes
    needed[homes[0] if model.config.tied else homes[-1]] += model.norm.nbytes
    needed[homes[-1]] += 0 if model.config.tied else model.head.nbytes
    return needed


def _room(devices: Sequence[torch.device]) -> list[float]:
    """Free bytes of each device, shared where it is named twice; all alike where one is unknown."""
    free = [available_bytes(device) for device in devices]
    times = Counter(devices)
    if not all(free):
        return [1.0] * len(devices)
    return [(size or 0) / times[d] for size, d in zip(free, devices, strict=True)]


def _emptied(weight: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
