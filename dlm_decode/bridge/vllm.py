"""EXPERIMENTAL: a proposer for vLLM's `custom_class` speculation, tested against its documented
interface only, never yet inside vLLM.

    --speculative-config '{"method": "custom_class", "num_speculative_tokens": 16,
                           "model": "dlm_decode.bridge.vllm.DiffusionProposer"}'
    --additional-config '{"dlm_decode": {"drafter": "FOLDER", "sampler": null}}'

vLLM takes such drafts as one-hot, so its output keeps the target's law. It gives no request ids:
K/V are found again by the row's beginning. vLLM itself is never imported here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dlm_decode.api import load
from dlm_decode.bridge.controllers import CONTROLLERS
from dlm_decode.bridge.drafters import Context
from dlm_decode.bridge.drafters.diffusion import DiffusionDrafter
from dlm_decode.errors import OptionError

REMEMBERED = 64
"""Rows whose K/V are kept, the least recently used ones are forgotten."""
HEAD = 32
"""Ids at a row's beginning that tell it apart."""


class DiffusionProposer:
    """What vLLM's V1 model runner calls: `load_model` once, then `propose` each step."""

    def __init__(self, vllm_config: Any) -> None:
        """Reads `num_speculative_tokens`, and "dlm_decode" of `additional_config`."""
        self.length = int(vllm_config.speculative_config.num_speculative_tokens)
        extra = getattr(vllm_config, "additional_config", None) or {}
        self.settings: Mapping[str, Any] = extra.get("dlm_decode", {})
        unknown = set(self.settings) - {"drafter", "sampler", "controller", "device"}
        if unknown:
            raise OptionError(
                f"unknown settings in additional_config: {', '.join(sorted(unknown))}"
            )
        self.controller = CONTROLLERS.create(self.settings.get("controller", "failfast"))
        self.drafter: DiffusionDrafter | None = None
        self.memory: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def load_model(self, *unused: Any) -> None:
        """Load the drafter; vLLM passes its target model, which is not needed."""
        model = load(self.settings.get("drafter"), device=self.settings.get("device"))
        self.drafter = DiffusionDrafter(model, self.settings.get("sampler"))

    def dummy_run(self, num_tokens: int) -> None:
        """Nothing to warm up: the drafter owns its memory."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for the rows that sampled something this step, an empty list for the others.

        `token_ids_cpu (rows, N)` holds each row's ids, the first `num_tokens_no_spec` of which are
        its own, the tokens just sampled among them.
        """
        if self.drafter is None:
            self.load_model()
        assert self.drafter is not None
        active = [i for i, sampled in enumerate(sampled_token_ids) if len(sampled)]
        contexts = [
            self._context([int(t) for t in token_ids_cpu[i][: int(num_tokens_no_spec[i])]])
            for i in active
        ]
        found: list[list[int]] = [[] for _ in sampled_token_ids]
        with torch.inference_mode():
            drafts = self.drafter.propose(contexts)
        for i, context, draft in zip(active, contexts, drafts, strict=True):
            found[i] = list(draft.tokens)
            self._remember(context)
        return found

    def _context(self, ids: list[int]) -> Context:
        assert self.drafter is not None
        return Context(
            ids=ids,
            prompt_length=0,
            key=0,
            room=self.length,
            controller=self.controller,
            control=self.controller.init(),
            end_ids=self.drafter.model.info.end_ids,
            memory=self.memory.get(tuple(ids[:HEAD])),
        )

    def _remember(self, context: Context) -> None:
        name = tuple(context.ids[:HEAD])
        self.memory[name] = context.memory
        self.memory.move_to_end(name)
        while len(self.memory) > REMEMBERED:
            self.memory.popitem(last=False)
