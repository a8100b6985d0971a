"""Tensor parallelism of a backbone: every process holds a part of every layer.

Attention is split by heads, feed-forward layers and experts by their inner size, the embedding and
the LM head by the vocabulary. A process computes with its part as with a whole, smaller model; what
it adds to the hidden states is summed over the processes, twice a layer (Megatron-LM,
arXiv:1909.08053), and the head's statistics are merged (`dlm_decode.head`). All of it follows from
the plan, so a family over the backbone has nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, prod

from torch import nn
from torch.distributed.tensor import Shard

from dlm_decode.errors import CapabilityError
from dlm_decode.models.backbone import Backbone, BackboneConfig, Block
from dlm_decode.models.feed_forward import parameter
from dlm_decode.models.published import Family
from dlm_decode.ranks import Ranks, Share

COLUMNS, ROWS = Shard(0), Shard(1)
"""Of a matrix: by its outputs, or by its inputs, so that outputs have to be summed."""

DRAWN_TOGETHER = 4
"""Ids of one counter of the noise: kernels begin where such a group does."""

FEED_FORWARD: Mapping[str, Shard] = {"gate": COLUMNS, "up": COLUMNS, "down": ROWS}

PLAN: Mapping[str, Shard] = {
    "embed": COLUMNS,
    "head": COLUMNS,
    **dict.fromkeys(("q", "k", "v", "qkv", "q_bias", "k_bias", "v_bias"), COLUMNS),
    "out": ROWS,
    **FEED_FORWARD,
    **{f"expert_{part}": shard for part, shard in FEED_FORWARD.items()},
    **{f"shared_{part}": shard for part, shard in FEED_FORWARD.items()},
}
"""Part of a layer (see `Backbone.names`) -> the axis it is split along; others are kept whole."""


@dataclass(frozen=True)
class Piece:
    """The entries `ranges` along axis `dim` of a stored tensor, one behind the other."""

    dim: int
    ranges: tuple[range, ...]

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The piece's shape, of a tensor of shape `whole`."""
        return (*whole[: self.dim], sum(map(len, self.ranges)), *whole[self.dim + 1 :])

    def runs(self, whole: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Where it lies in the stored tensor: the first element of each run, and how many."""
        inner = prod(whole[self.dim + 1 :])
        for line in range(prod(whole[: self.dim])):
            for span in self.ranges:
                yield (line * whole[self.dim] + span.start) * inner, len(span) * inner


def split(model: Family, ranks: Ranks) -> dict[str, Piece]:
    """Leave this process's part of a model on the meta device; says what to read of which tensor.

    Raises `CapabilityError` for a model that is no `Backbone` or does not divide.
    """
    if not isinstance(model, Backbone):
        raise CapabilityError(
            f"{model.info.family} has layers of its own, which can't be split: leave "
            "tensor_parallel out"
        )
    check_divides(model.config, ranks.size)
    pieces = {
        name: Piece(PLAN[part].dim, _ranges(model.config, part, view.shape[PLAN[part].dim], ranks))
        for name, part, view in model.stored_parts()
        if part in PLAN
    }
    _shrink(model, ranks)
    return pieces


def check_divides(config: BackboneConfig, size: int) -> None:
    """Refuse a number of processes that heads or feed-forward sizes can't be split over."""
    experts = config.experts
    dense = [config.experts_of(layer) is None for layer in range(config.layers)]
    counts = {
        "query heads": config.heads,
        "key/value heads": config.kv_heads,
        "feed-forward size": config.ffn_size if any(dense) else 0,
        "experts' size": 0 if experts is None else experts.size,
        "shared experts' size": 0 if experts is None else experts.shared_size,
    }
    found = [f"{name} {count}" for name, count in counts.items() if count % size]
    if found:
        common = gcd(*counts.values())
        allowed = [str(n) for n in range(1, common + 1) if common % n == 0]
        raise CapabilityError(
            f"{size} processes can't share the model: its {', '.join(found)} can't be divided by "
            f"{size}; start {' or '.join(allowed)}"
        )
    if vocabulary(config.embedding_rows, size, size - 1).start >= config.vocab_size:
        raise CapabilityError(
            f"{size} processes can't share a vocabulary of {config.vocab_size} ids: start fewer"
        )


def span(count: int, size: int, rank: int) -> range:
    """Which of `count` entries are those of `rank` among `size` processes, as DTensor splits."""
    length, start = Shard.local_shard_size_and_offset(count, size, rank)
    return range(start, start + length)


def vocabulary(count: int, size: int, rank: int) -> range:
    """Which of `count` ids are those of `rank`: whole groups of ids that are drawn together."""
    groups = span(-(-count // DRAWN_TOGETHER), size, rank)
    ends = (min(DRAWN_TOGETHER * end, count) for end in (groups.start, groups.stop))
    return range(*ends)


def _ranges(config: BackboneConfig, part: str, count: int, ranks: Ranks) -> tuple[range, ...]:
    """What this process reads of `count` entries; of a fused projection, of q, k and v each."""
    if part in ("embed", "head"):
        return (vocabulary(count, ranks.size, ranks.rank),)
    heads = (config.heads, config.kv_heads, config.kv_heads)
    sections = [n * config.head_size for n in heads] if part == "qkv" else [count]
    starts = [sum(sections[:i]) for i in range(len(sections))]
    spans = [span(n, ranks.size, ranks.rank) for n in sections]
    return tuple(
        range(start + s.start, start + s.stop) for start, s in zip(starts, spans, strict=True)
    )


def _shrink(model: Backbone, ranks: Ranks) -> None:
    """Make the layers those of a smaller model, and the tables those of this process's ids."""
    config, size, dtype = model.config, ranks.size, model.dtype
    model.info = replace(model.info, heads=config.heads // size, kv_heads=config.kv_heads // size)
    blocks = [
        Block(_smaller(config, size), layer=layer, device="meta", dtype=dtype)
        for layer in range(config.layers)
    ]
    for block in blocks:
        block.ranks = ranks
    model.blocks = nn.ModuleList(blocks)
    rows = vocabulary(config.embedding_rows, size, ranks.rank)
    model.share = Share(ranks, range(rows.start, min(rows.stop, config.vocab_size)))
    tables = [
        parameter(len(rows), config.hidden_size, device="meta", dtype=dtype) for _ in range(2)
    ]
    model.embed, model.head = tables[0], tables[0 if config.tied else 1]


def _smaller(config: BackboneConfig, size: int) -> BackboneConfig:
    """The sizes of one process's part of the layers."""
    experts = config.experts and replace(
        config.experts,
        size=config.experts.size // size,
        shared_size=config.experts.shared_size // size,
    )
    return replace(
        config,
        heads=config.heads // size,
        kv_heads=config.kv_heads // size,
        ffn_size=config.ffn_size // size,
        experts=experts,
    )
