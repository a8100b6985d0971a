"""What a decoding takes in memory: counted while it runs, and foretold without allocating any.

Both count the bytes of live tensors operator by operator. The forecast runs one turn, a refresh of
every row at its full length, on fake tensors: they have shapes and dtypes but no storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dlm_decode.attention import Group, PackedAttention
from dlm_decode.head import HeadPlan, Scored, statistics
from dlm_decode.kv import PAGE_LENGTH, KVStore, page_bytes, pages_of
from dlm_decode.models import DiffusionLM, ModelInfo
from dlm_decode.models.backbone import prepackable
from dlm_decode.models.prepacked import check_prepackable, prepacked_bytes
from dlm_decode.types import Draw


class Allocations(TorchDispatchMode):
    """Counts bytes of tensors made inside it: `live` now, `peak` at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(Tensor, self._know, (args, kwargs or {}))
        made = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, made)
        return made

    def _know(self, tensor: Tensor) -> None:
        """What existed before is not counted; prepacked weights did, and have no storage to ask."""
        if tensor.is_mkldnn:
            return
        self._known.setdefault(tensor.untyped_storage(), 0)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live -= size


@dataclass(frozen=True)
class Footprint:
    """Bytes of one decoding: what stays (weights, pages) and the most that comes on top.

    `logits_bytes` is what the head's statistics take at most, beside the hidden states;
    `activation_bytes` what a forward does. They do not coincide: `peak_bytes` counts the larger.
    """

    weight_bytes: int
    page_bytes: int
    logits_bytes: int
    activation_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.weight_bytes + self.page_bytes + max(self.logits_bytes, self.activation_bytes)

    def as_dict(self) -> dict[str, int]:
        return asdict(self) | {"peak_bytes": self.peak_bytes}


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters, and of the tables and copies it keeps beside them."""
    tensors: dict[int, Tensor] = {id(p): p for p in model.parameters()}
    tensors |= {id(v): v for v in vars(model).values() if isinstance(v, Tensor)}
    return sum(t.nbytes for t in tensors.values()) + prepacked_bytes(model)


def forecast(
    build: Callable[[], Any],
    *,
    batch: int,
    length: int,
    window: int,
    stores: bool = True,
    kv_dtype: torch.dtype | None = None,
    prepack: bool = False,
) -> Footprint:
    """The footprint of `batch` rows of `length` positions, `window` of them scored in a turn.

    `build` makes the model; it is called where tensors have no storage, so its size is no matter.
    `prepack` counts the copies of prepacked weights; raises `CapabilityError` where there are none.
    """
    with FakeTensorMode(), torch.inference_mode():
        model = build()
        pages = batch * pages_of(length, PAGE_LENGTH) if stores else 0
        kept = kv_dtype or model.dtype
        store = _store(model, pages, kept) if stores else None
        activations, logits = _turn_bytes(model, store, batch, length, min(window, length))
        held = pages * page_bytes(model.info, PAGE_LENGTH, kept)
        copied = prepackable(model) if prepack else []
        for weight in copied:
            check_prepackable(weight)
        copies = sum(weight.nbytes for weight in copied)
        return Footprint(weight_bytes(model) + copies, held, logits, activations)


def _store(model: DiffusionLM, pages: int, dtype: torch.dtype) -> KVStore:
    return KVStore(
        model.info, pages=pages, page_length=PAGE_LENGTH, dtype=dtype, device=model.device
    )


def _turn_bytes(
    model: DiffusionLM, store: KVStore | None, batch: int, length: int, window: int
) -> tuple[int, int]:
    """Most bytes that the forward, and then the statistics, of one refresh of all rows take."""
    device, count = model.device, batch * window
    ids = torch.zeros(batch * length, dtype=torch.int64, device=device)
    places = torch.zeros_like(ids) if store is not None else None
    group = Group(0, batch, length, own=True, mask=_mask(model.info, batch, length, device))
    attend = PackedAttention((group,), store, None, places, write_all=True)
    with Allocations() as forward:
        hidden = model.forward(ids, ids, attend)
    scored = Scored(*(torch.zeros(count, dtype=torch.int64, device=device) for _ in range(3)))
    plan = HeadPlan(model.info.vocab_size, frozenset(), Draw(), model.info.mask_id)
    with Allocations() as head:
        read = hidden.index_select(0, torch.zeros_like(scored.keys))
        statistics(lambda start, stop: model.logits(read, start, stop), scored, plan)
    return forward.peak, hidden.nbytes + head.peak


def _mask(info: ModelInfo, batch: int, length: int, device: torch.device) -> Tensor | None:
    if info.regime == "full":
        return None
    return torch.zeros(batch, 1, length, length, dtype=torch.bool, device=device)
