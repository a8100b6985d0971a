"""SEDD with the absorbing graph, decoded as a masked diffusion LM.

Letters as in `dlm_decode.models`, and C for the size of the condition, V for the clean vocabulary.

The network gives log s_v(x, sigma) at each position i: the logarithm of the concrete score
p_sigma(x with v at i) / p_sigma(x). Under the absorbing process, by itself each token is still
there with probability exp(-sigma), and x with U its unmasked tokens has the probability

    p_sigma(x) = exp(-sigma)^|U| (1 - exp(-sigma))^(N - |U|) p_0(U).

A masked i that is revealed moves one factor over, so that at masked positions

    s_v(x, sigma) = exp(-sigma) / (1 - exp(-sigma)) p_0(v | U) = p_0(v | U) / (exp(sigma) - 1):

the score is the conditional law of a clean token, times a number that does not depend on v. The
softmax of log s over v therefore is that law whatever sigma is, and terms of the published
network that are the same for all v (`scale_by_sigma` subtracts log(exp(sigma) - 1) + log V) drop
out: the head's plain outputs are the logits. This holds for the true score; a trained network
also reads sigma, so it is given the one that the row is typical of, where the expected share of
masks 1 - exp(-sigma) is the row's own, m / N:

    sigma = -log(1 - m / N), at most the schedule's last.

Published code (github.com/louaaron/Score-Entropy-Discrete-Diffusion): network, tensor names, noise
schedules. Derived: the equations above (also in RADD, arXiv:2406.03736) and the choice of sigma,
which the published samplers take from their clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlm_decode.errors import CheckpointError
from dlm_decode.models import FAMILIES, Attend, row_runs
from dlm_decode.models.bd3lm import BD3LM, DiTConfig, dit_info
from dlm_decode.models.published import MOST_PARTS, Published, head_size

LOGLINEAR_EPS = 1e-3
"""Share of tokens that the log-linear schedule leaves unmasked at its end."""

NO_CACHE = "it is told the share of masks in the whole row, which changes with every decision"


@FAMILIES.register("sedd")
class SEDD(BD3LM):
    """SEDD, absorbing: a score entropy diffusion transformer, read as a masked LM; no cache."""

    paper: ClassVar[str] = "SEDD, arXiv:2310.16834"
    tiny: ClassVar[Mapping[str, Any]] = {
        "tokens": 47,
        "graph": {"type": "absorb"},
        "noise": {"type": "loglinear"},
        "model": {
            "type": "ddit",
            "hidden_size": 32,
            "cond_dim": 8,
            "length": 128,
            "n_blocks": 2,
            "n_heads": 4,
            "scale_by_sigma": True,
        },
    }

    def __init__(self, *args: Any, last_sigma: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last_sigma = last_sigma

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Its config.json is that of its training, which names no `model_type`."""
        inner = config.get("model")
        return "graph" in config and isinstance(inner, Mapping) and inner.get("type") == "ddit"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> SEDD:
        """The model of a config.json, with its weights allocated but not filled."""
        graph = section(files, "graph").config.get("type")
        if graph != "absorb":
            raise CheckpointError(
                f"config.json: graph.type is {graph!r}, but only 'absorb' is supported: other "
                "graphs have no mask"
            )
        config = sedd_config(files)
        info = replace(dit_info(files, config), family="sedd", whole_rows=NO_CACHE)
        return cls(
            config,
            info,
            published=files.config,
            device=device,
            dtype=dtype,
            last_sigma=last_sigma(section(files, "noise")),
        )

    def condition(self, ids: Tensor, attend: Attend) -> Tensor:
        """The condition `(T, C)` of each token: that of its row's share of masks."""
        found, start = [], 0
        for rows, length in row_runs(attend):
            row = ids[start : start + rows * length].view(rows, length)
            found.append(self.timed(self.sigma(row)).repeat_interleave(length, 0))
            start += rows * length
        return torch.cat(found)

    def sigma(self, ids: Tensor) -> Tensor:
        """The total noise `(rows,)` that rows `(rows, N)` of ids are typical of."""
        wide = torch.promote_types(self.dtype, torch.float32)
        clean = (ids != self.info.mask_id).to(wide).mean(1)
        return -clean.clamp(min=math.exp(-self.last_sigma)).log()


def section(files: Published, name: str) -> Published:
    """A part of config.json; refuses one that is not there."""
    found = files.config.get(name)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: {name} must be an object, got {found!r}")
    return Published(found)


def sedd_config(files: Published) -> DiTConfig:
    """SEDD's field names to ours; the mask comes on top of its `tokens`."""
    model = section(files, "model")
    width, heads = model.number("hidden_size"), model.number("n_heads")
    head_size(width, heads, heads)
    return DiTConfig(
        vocab_size=files.number("tokens") + 1,
        hidden_size=width,
        layers=model.number("n_blocks", MOST_PARTS),
        heads=heads,
        max_positions=model.number("length"),
        condition_size=model.number("cond_dim"),
        prefix="",
    )


def last_sigma(noise: Published) -> float:
    """The total noise at the end of the schedule."""
    kind = noise.config.get("type")
    if kind == "loglinear":
        return -math.log(LOGLINEAR_EPS)
    if kind == "geometric":
        return noise.real("sigma_max", 1.0)
    raise CheckpointError(f"config.json: noise.type {kind!r} is neither loglinear nor geometric")
