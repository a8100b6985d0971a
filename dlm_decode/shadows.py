"""Shadow tokens: masks that predict a position without seeing the token that stands there.

A forward may carry one for each scored position: a mask token that sees everything the row sees but
the real token at its own position, and the row's other shadows. No real token sees a shadow, and
none is ever stored, so that real outputs are what they would be without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dlm_decode.attention import Group
from dlm_decode.caches import RowPlan
from dlm_decode.packing import Packed
from dlm_decode.rows import Row


def with_shadows(
    packed: Packed,
    read: np.ndarray,
    rows: Sequence[Row],
    plans: Sequence[RowPlan],
    scored: Sequence[np.ndarray],
    *,
    shift: int,
    mask_id: int,
) -> tuple[Packed, Tensor]:
    """`packed` with a shadow of every scored position behind it, and where those are, `(n,)`.

    `read (n,)` are the packed rows that are read out, on the host.
    Of a model whose output at i predicts token i + 1 (`shift`), the shadow of j stands at j - 1.
    """
    device, total = packed.ids.device, len(packed.ids)
    groups: list[Group] = []
    places: list[np.ndarray] = []
    count = 0
    for row, plan, wanted in zip(rows, plans, scored, strict=True):
        if not len(wanted):
            continue
        at = np.maximum(wanted - shift, 0)
        first = int(read[count] - np.searchsorted(plan.query, at[0]))
        groups.append(_group(row, plan, wanted, at, first, total + count, device))
        places.append(at)
        count += len(wanted)
    positions = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *places])).to(device)
    extended = replace(
        packed,
        ids=torch.cat([packed.ids, torch.full_like(positions, mask_id)]),
        positions=torch.cat([packed.positions, positions]),
        groups=(*packed.groups, *groups),
        write_all=False,
    )
    return extended, total + torch.arange(count, device=device)


def _group(
    row: Row,
    plan: RowPlan,
    wanted: np.ndarray,
    at: np.ndarray,
    first: int,
    start: int,
    device: torch.device,
) -> Group:
    """The shadows of one row, at positions `at`; its own tokens are packed from `first` on.

    What a forward stores is stored before it is attended to, so that stored keys are all there is.
    """
    stored = plan.kind != "full"
    reach = row.length if plan.stop is None else plan.stop
    keys = np.arange(reach, dtype=np.int64) if stored else plan.query
    seen = keys[None, :] != wanted[:, None]
    own = np.ones((len(at), len(at)), dtype=bool)
    if row.block_ids is not None:
        blocks = row.block_ids[at][:, None]
        seen &= row.block_ids[keys][None, :] <= blocks
        own &= row.block_ids[at][None, :] <= blocks
    mask = torch.from_numpy(np.concatenate([seen, own], axis=1)[None, None]).to(device)
    where = row.slots[0].places[keys] if stored else first + np.arange(len(keys))
    found = torch.from_numpy(np.ascontiguousarray(where)[None]).to(device)
    return Group(
        start,
        1,
        len(at),
        own=True,
        length=len(keys),
        context=found if stored else None,
        mask=mask,
        sources=None if stored else found,
    )
