"""The bridge: something cheap drafts, an autoregressive model verifies, the output is its own.

`speculate` is the short way in, `Speculator` the long one; `custom_generate` is for
`model.generate(custom_generate=...)` of transformers.
"""

from __future__ import annotations

from dlm_decode.bridge.adaptive_parallel import adaptive_parallel
from dlm_decode.bridge.controllers import CONTROLLERS, Controller
from dlm_decode.bridge.draft import FACTORISED, ONE_HOT, Draft
from dlm_decode.bridge.drafters import Context, Drafter
from dlm_decode.bridge.drafters.baselines import NullDrafter, PromptLookup, RandomDrafter
from dlm_decode.bridge.drafters.diffusion import DiffusionDrafter
from dlm_decode.bridge.hf import custom_generate
from dlm_decode.bridge.law import Sampling
from dlm_decode.bridge.loop import Piece, Speculator, speculate
from dlm_decode.bridge.retokenize import Retokenized
from dlm_decode.bridge.rules import RULES, Rule
from dlm_decode.bridge.stats import Round, Speculation, Totals
from dlm_decode.bridge.tree import Tree, best_prefixes
from dlm_decode.bridge.verifier import Verifier

__all__ = [
    "CONTROLLERS",
    "FACTORISED",
    "ONE_HOT",
    "RULES",
    "Context",
    "Controller",
    "DiffusionDrafter",
    "Draft",
    "Drafter",
    "NullDrafter",
    "Piece",
    "PromptLookup",
    "RandomDrafter",
    "Retokenized",
    "Round",
    "Rule",
    "Sampling",
    "Speculation",
    "Speculator",
    "Totals",
    "Tree",
    "Verifier",
    "adaptive_parallel",
    "best_prefixes",
    "custom_generate",
    "speculate",
]
