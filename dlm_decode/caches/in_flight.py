"""Blocks in flight see one another and what is finished, and nothing behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dlm_decode.caches import CACHES, CachePolicy, RowPlan, RowView, span_query
from dlm_decode.options import option


@CACHES.register("in_flight")
@dataclass(frozen=True)
class InFlight(CachePolicy):
    """Keep K/V of finished blocks, compute the window's, and end the row where the window ends.

    LoPA (arXiv:2512.16229) over D2F's pipeline with full attention in the window, by its code: a
    block is stored when it is finished, as the forward after saw it beside the blocks in flight,
    and never refreshed. Made for the schedule `pipeline`. What lies behind the window, a suffix
    too, is not seen.

    The published code never computes the last stored position again, so that of a model whose
    output at i - 1 predicts i the prediction of the window's first position is as old as the last
    finished block: `lead` "kept".
    """

    paper: ClassVar[str] = "LoPA, arXiv:2512.16229 (code)"
    sees_behind: ClassVar[bool] = False

    lead: str = option(
        "computed",
        "the output that predicts the window's first position: computed anew, or the one kept "
        "from when what lies before was stored (the published code)",
        choices=("computed", "kept"),
    )

    @property
    def refreshes_blocks(self) -> bool:
        return False

    def plan(self, row: RowView) -> RowPlan:
        first, stop = row.window.start, row.window.stop
        last = first if row.last_start is None else row.last_start
        begin = int(np.append(row.changed(first), first).min(initial=last))
        keeps = self.lead == "kept" and row.shift > 0 and first > 0
        if keeps and begin == first:
            return RowPlan(span_query(first, stop), "window", stop=stop, lead="kept")
        query = span_query(min(begin, first - row.shift), stop)
        return RowPlan(query, "window", stop=stop, lead="keep" if keeps else None)

    def horizon(self, row: RowView) -> int | None:
        return None if row.step else 1
