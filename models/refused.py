"""Diffusion LMs with public weights that can't be decoded here, and how to load those that can.

What each does otherwise was read in: Tencent/WeDLM's README, dLLM's sampler for Nemotron-Labs-
Diffusion, Steerling's modelling code, SGLang's list of block diffusion models, DreamOn's
configuration and generation code, the configurations of UDLM and GIDD and their repositories'
READMEs. Of Efficient-DLM only the model card was found, and that its weights are called edlm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlm_decode.models.adapted import LAYOUTS, SHIFT

NEMOTRON = (
    "what is decided is seen under causal attention and only the present block sees all of itself, "
    "an attention that no family here has"
)

UNIFORM = "its noise is random tokens, in part at least, which no sampler here follows"

KINDS: Mapping[str, str] = {
    "edlm": "what its context attends to and where its blocks begin could not be established",
    "gidd": UNIFORM,
    "nemotron_labs_diffusion": NEMOTRON,
    "nemotron_labs_diffusion_vlm": NEMOTRON,
    "steerling": "its head reads sums of concepts that its hidden states are taken apart into",
    "udlm": UNIFORM,
    "wedlm": "its attention is causal over tokens that are reordered as they are decided",
}
"""`model_type` -> why not."""

ARCHITECTURES: Mapping[str, str] = {
    "Lfm2ForBlockDiffusion": "its layers mix attention and convolutions",
}
"""Class in `architectures` -> why not."""


def why_refused(config: Mapping[str, Any]) -> str | None:
    """What keeps a checkpoint from being decoded, by its config.json; None: nothing known."""
    if config.get("expand_token_id") is not None:
        return "this is DreamOn, whose expand token lengthens the canvas while it is decoded"
    kind, classes = config.get("model_type"), config.get("architectures") or ()
    known = next((ARCHITECTURES[name] for name in classes if name in ARCHITECTURES), None)
    return known if kind is None else KINDS.get(kind, known)


def causal_hint(config: Mapping[str, Any]) -> str:
    """How to load a causal LM that was adapted to diffusion under its old name; else nothing."""
    kind = config.get("model_type")
    if kind not in (*LAYOUTS, "gpt2"):
        return ""
    return (
        f". A {kind} that was adapted to diffusion under full attention and kept that name, as "
        f'DiffuLLaMA, DiffuGPT and Open-dCoder did, loads with "{SHIFT}" in its config.json: 1 if '
        "the output at position i predicts token i + 1 (all of these), 0 if token i; ReFusion and "
        "SDLM, which see their context causally, do not"
    )
