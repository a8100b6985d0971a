"""`model.generate(custom_generate=custom_generate, drafter=...)`: transformers prepares, we decode.

The processors and stopping criteria are those that `generate` builds, so every option of it that
works through them works here. What has no meaning beside a draft is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from dlm_decode.bridge.controllers import Controller
from dlm_decode.bridge.drafters import Drafter
from dlm_decode.bridge.law import Law
from dlm_decode.bridge.loop import Piece, Speculator, Stop
from dlm_decode.bridge.rules import Rule
from dlm_decode.bridge.stats import Speculation
from dlm_decode.errors import CapabilityError, OptionError

OnPiece = Callable[[Piece], None]


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    draft_rule: str | Rule = "match",
    draft_controller: str | Controller = "failfast",
    draft_seed: int = 0,
    on_piece: OnPiece | None = None,
    on_result: Callable[[list[Speculation]], None] | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Ids `(B, N)`, prompt included, padded at the right, as `generate` returns them.

    `**model_kwargs` is what transformers hands to every decoding method; of it only the attention
    mask is read. A streamer does not reach a callable: `on_piece` is called after each round of a
    row instead, and `on_result` at the end with the results and their figures.
    """
    if drafter is None:
        raise OptionError("generate(custom_generate=custom_generate) needs drafter=...")
    _refuse(generation_config)
    prompts = unpadded(input_ids, model_kwargs.get("attention_mask"))
    speculator = Speculator(
        model,
        drafter,
        rule=draft_rule,
        controller=draft_controller,
        law=Law(logits_processor, greedy=not generation_config.do_sample),
        seed=draft_seed,
        max_batch_size=len(prompts),
        end_ids=_end_ids(generation_config),
        stop=_stop(stopping_criteria, input_ids.device),
    )
    room = int(generation_config.max_length) - input_ids.shape[1]
    results: dict[int, Speculation] = {}
    for piece in speculator.stream(prompts, max_new_tokens=room):
        if on_piece is not None:
            on_piece(piece)
        if piece.result is not None:
            results[piece.place] = piece.result
    if on_result is not None:
        on_result([results[i] for i in range(len(prompts))])
    return _joined(input_ids, [results[i].ids for i in range(len(prompts))], generation_config)


def unpadded(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Each row's own ids, without its padding."""
    if mask is None:
        return [[int(token) for token in row] for row in input_ids.tolist()]
    return [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]


def _refuse(config: GenerationConfig) -> None:
    if (config.num_beams or 1) > 1:
        raise CapabilityError(f"drafts need num_beams=1, got {config.num_beams}")
    if config.return_dict_in_generate:
        raise CapabilityError("return_dict_in_generate must be off: take on_result for figures")


def _end_ids(config: GenerationConfig) -> tuple[int, ...]:
    ends = config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, list) else (int(ends),)


def _stop(criteria: StoppingCriteriaList, device: torch.device) -> Stop | None:
    """The criteria beside end ids and length, which the loop keeps itself."""
    known = (EosTokenCriteria, MaxLengthCriteria)
    others = StoppingCriteriaList([c for c in criteria if not isinstance(c, known)])
    if not others:
        return None

    def stops(ids: list[int]) -> bool:
        return bool(others(torch.tensor([ids], device=device), None)[0])

    return stops


def _joined(input_ids: Tensor, new: list[tuple[int, ...]], config: GenerationConfig) -> Tensor:
    ends = _end_ids(config)
    pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
    width = max(map(len, new))
    rows = [[*ids, *[int(pad)] * (width - len(ids))] for ids in new]
    return torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], dim=1)
