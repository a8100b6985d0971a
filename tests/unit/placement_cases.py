"""Layers over two devices, where no second device is: run as a program, by `test_placement`.

The devices are pretended: torch's hook for backends written in Python gives tensors another device,
and every operation on them runs on the CPU, but only if all its tensors are on one device; copies
alone may cross. So a tensor that is not moved explicitly is an error here as it is on GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from dlm_decode import api
from dlm_decode.models.backbone import Backbone
from dlm_decode.types import Request

COPIES = ("aten::_to_copy", "aten::copy_")
PAIR = "pretend:0,pretend:1"


class Pretended(Tensor):
    """A tensor of the CPU that is said to lie elsewhere."""

    held: Tensor

    @staticmethod
    def __new__(cls, real: Tensor, device: torch.device) -> Pretended:
        made: Pretended = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=device,
        )
        made.held = real
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return carried_out(op, args, kwargs or {})

    def tolist(self) -> Any:
        """What torch does for any device but not for subclasses."""
        return self.cpu().tolist()


class Pretending(TorchDispatchMode):
    """Operations that make tensors from none obey their `device` argument."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return carried_out(op, args, kwargs or {})


def carried_out(op: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the CPU, its results on the one device of its tensors."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    devices = {x.device for x in tensors if x.dim() or x.device.type != "cpu"}
    name = op.overloadpacket._qualified_op_name
    if len(devices) > 1 and name not in COPIES:
        raise AssertionError(f"{op} mixes tensors of {sorted(map(str, devices))}")
    stated = kwargs.get("device")
    home = torch.device(stated) if stated is not None else next(iter(devices), torch.device("cpu"))
    home = args[0].device if name == "aten::copy_" else home
    if stated is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = op(*tree_map(_real, args), **tree_map(_real, kwargs))
    if op._schema.is_mutable:
        return args[0]
    if home.type != "pretend":
        return found
    return tree_map(lambda x: Pretended(x, home) if isinstance(x, Tensor) else x, found)


def _real(x: Any) -> Any:
    return x.held if isinstance(x, Pretended) else x


def decoded(model: Any, sampler: str, **settings: Any) -> list[tuple[int, ...]]:
    """Ids of a ragged batch."""
    decoder = api.Decoder(model, sampler, seed=3, max_batch_size=2, **settings)
    prompts = ([1, 2, 3], [4, 5, 6, 7, 8])
    requests = [Request(p, gen_length=5, block_length=3, id=str(len(p))) for p in prompts]
    return [g.ids for g in sorted(decoder.run(requests), key=lambda g: g.id)]


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("threshold", {"cache": "dual", "temperature": 1.0}),
    ("entropy", {"cache": "prefix", "cfg_scale": 0.5}),
    ("dapd", {}),
    ("lrd", {}),
)
"""Stored K/V, a region and guidance, watched attention, embeddings of the sampler's own."""


def check(path: Path, cases: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    """A checkpoint decodes to the same ids over two devices, with all its tensors in place."""
    expected = [decoded(api.load(path), sampler, **settings) for sampler, settings in cases]
    with Pretending():
        loaded = api.load(path, device=PAIR)
        model = loaded.model
        assert isinstance(model, Backbone)
        first, last = (torch.device(name) for name in PAIR.split(","))
        homes = model.layer_devices
        assert (homes[0], homes[-1], model.embed.device) == (first, last, first)
        assert model.device == (first if model.config.tied else last)
        found = [decoded(loaded, sampler, **settings) for sampler, settings in cases]
    assert found == expected, (found, expected)


def negative_control() -> None:
    """The pretended devices refuse what GPUs refuse."""
    with Pretending():
        a, b = (torch.zeros(2, device=name) for name in PAIR.split(","))
        assert (a + b.to(a.device)).device == a.device
        mixtures: tuple[Callable[[], Tensor], ...] = (lambda: a + b, lambda: a[b.long()])
        for mixed in mixtures:
            try:
                mixed()
            except AssertionError as error:
                assert "mixes" in str(error)
            else:
                raise RuntimeError("a mixture of devices went through")


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend("pretend")
    torch.inference_mode = torch.no_grad  # type: ignore[assignment, misc]  # not for wrapped tensors
    negative_control()
    first, *others = map(Path, sys.argv[1:])
    check(first, CASES)
    for folder in others:
        check(folder, (("threshold", {}),))
    print("all in place")
