"""Statistics of logits that were raised at a few ids, without forwarding again. Nothing here syncs.

Letters: B rows, W window, K ids of a position, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlm_decode.errors import CapabilityError
from dlm_decode.head import output_from_logits
from dlm_decode.noise import id_gumbel
from dlm_decode.types import Canvas, Output


def fuse_whole(
    canvas: Canvas, output: Output, ids: Tensor, boost: Tensor, needs: frozenset[str]
) -> Output:
    """Every statistic in `needs` of `output.logits` plus `boost (B, W, K)` at `ids (B, W, K)`."""
    logits = output.logits.scatter_add(-1, ids, boost.to(output.logits.dtype))
    fused = output_from_logits(logits, needs=needs, draw=canvas.draw, canvas=canvas).stats
    changed = {name: value for name, value in fused.items() if name != "valid"}
    return _replaced(output, changed, boost)


def fuse_few(canvas: Canvas, output: Output, ids: Tensor, boost: Tensor) -> Output:
    """The same for `top1`, `p1`, `lse` and the drawn token, from the ids' own logits.

    `boost (B, W, K)` is not negative, and one of its ids is `top1` wherever there is any. The
    logits come from `output.probed`, that of `top1` from its probability. No id without a boost
    overtakes the best, or the drawn one, so the new winner is that one or among `ids`.
    """
    p1, lse = output.p1.double(), output.lse.double()
    is_top = ids == output.top1[..., None]
    below = output.probed.double() - (lse + p1.log())[..., None]
    below = torch.where(is_top, 0.0, below.clamp(max=0.0))
    growth = (p1[..., None] * below.exp() * boost.expm1()).masked_fill(boost == 0, 0.0).sum(-1)
    own = (boost * is_top).sum(-1)
    wins, slot, best = _rival(below + boost, ids, (boost > 0) & ~is_top, own)
    changed = {
        "top1": torch.where(wins, _at(ids, slot), output.top1),
        "p1": p1 * torch.where(wins, best, own).exp() / (1 + growth),
        "lse": lse + growth.log1p(),
    }
    if output.is_sampled:
        logits = below + (lse + p1.log())[..., None]
        changed |= _fused_draw(canvas, output, ids, logits, boost, changed["lse"])
    return _replaced(output, changed, boost)


def _fused_draw(
    canvas: Canvas, output: Output, ids: Tensor, logits: Tensor, boost: Tensor, lse: Tensor
) -> dict[str, Tensor]:
    """The token drawn with the same noise from the raised logits, and its probability."""
    if canvas.draw.filters:
        raise CapabilityError("top_p and top_k need whole logits here: set dense=true")
    drawn = output.sampled[..., None]
    is_drawn = ids == drawn
    own = (boost * is_drawn).sum(-1)
    temperature = canvas.draw.temperature
    value = (logits + boost) / temperature + id_gumbel(canvas, ids)
    logit = output.p_sampled.double().log() + output.lse.double() + own
    held = logit / temperature + id_gumbel(canvas, drawn)[..., 0]
    wins, slot, _ = _rival(value, ids, (boost > 0) & ~is_drawn, held)
    logit = torch.where(wins, _at(logits + boost, slot), logit)
    return {
        "sampled": torch.where(wins, _at(ids, slot), output.sampled),
        "p_sampled": (logit - lse).exp(),
    }


def _rival(
    values: Tensor, ids: Tensor, rivals: Tensor, held: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Whether the best of `rivals (B, W, K)` exceeds `held (B, W)`, its slot and its value.

    Of equal ones it is the smallest id.
    """
    values = values.masked_fill(~rivals, -torch.inf)
    best = values.amax(-1)
    order = torch.where(rivals & (values == best[..., None]), ids, torch.iinfo(ids.dtype).max)
    return best > held, order.argmin(-1), best


def _at(values: Tensor, slot: Tensor) -> Tensor:
    return values.gather(-1, slot[..., None])[..., 0]


def _replaced(output: Output, changed: dict[str, Tensor], boost: Tensor) -> Output:
    """The output with `changed` statistics where there is a boost, in their own dtypes."""
    raised = (boost > 0).any(-1)
    stats = {name: value for name, value in output.stats.items() if name != "probed"}
    for name, value in changed.items():
        where = raised.view(*raised.shape, *[1] * (value.ndim - 2))
        old = stats.get(name)
        stats[name] = value if old is None else torch.where(where, value.to(old.dtype), old)
    return Output(stats)
