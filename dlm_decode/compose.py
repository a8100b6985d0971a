"""Chains of samplers by name: "credit+threshold" is the wrapper `credit` around `threshold`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from dlm_decode.errors import OptionError
from dlm_decode.samplers import SAMPLERS, Sampler, Wrapper, layers


def chain_names(text: str) -> tuple[str, ...]:
    """The layers that `text` names, outermost first.

    A wrapper without an inner wraps `threshold`. Raises `OptionError` for what cannot be nested.
    """
    names = tuple(part.strip() for part in text.split("+"))
    if "" in names:
        raise OptionError(
            f"sampler {text!r} has an empty layer: write names joined by '+', outermost first, "
            "as in credit+threshold"
        )
    for outer, inner in pairwise(names):
        if not is_wrapper(outer):
            wrappers = ", ".join(filter(is_wrapper, SAMPLERS.names()))
            raise OptionError(
                f"sampler {outer!r} cannot wrap {inner!r}: only wrappers ({wrappers}) may stand "
                f"before a '+', got {text!r}"
            )
    if len(set(names)) < len(names):
        raise OptionError(f"each wrapper may stand in a chain once, got {text!r}")
    return (*names, "threshold") if is_wrapper(names[-1]) else names


def is_wrapper(name: str) -> bool:
    """Whether the sampler called `name` works on another one."""
    return issubclass(SAMPLERS.get(name), Wrapper)


def chain_classes(sampler: str | Sampler) -> dict[str, type[Sampler]]:
    """The classes of a chain by name, outermost first; of a ready sampler too."""
    if isinstance(sampler, str):
        return {name: SAMPLERS.get(name) for name in chain_names(sampler)}
    return {SAMPLERS.name_of(layer): type(layer) for layer in layers(sampler)}


def create_chain(sampler: str | Sampler, options: Mapping[str, Mapping[str, Any]]) -> Sampler:
    """Build a chain, each layer from the options under its name; a ready sampler takes none."""
    if not isinstance(sampler, str):
        given = {key: value for layer in options.values() for key, value in layer.items()}
        return SAMPLERS.create(sampler, given)
    *wrappers, base = chain_names(sampler)
    built = SAMPLERS.create(base, options.get(base, {}))
    for name in reversed(wrappers):
        wrapper = SAMPLERS.create(name, options.get(name, {}))
        assert isinstance(wrapper, Wrapper)
        built = replace(wrapper, inner=built)
    return built
