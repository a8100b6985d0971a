"""BERT and its relatives as masked diffusion LMs: transformers' own classes over whole rows."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.models import FAMILIES, Attend, ModelInfo, row_runs
from dlm_decode.models.hosted import allocated, tied_names
from dlm_decode.models.published import Published

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNUSED = re.compile(r"(^|\.)(position_ids|inv_freq)$|(^|\.)(pooler|seq_relationship)\.")
"""Tensors that checkpoints may hold and masked language modelling has no use for."""

BATCHED = frozenset({"mra", "nystromformer", "yoso"})
"""Kinds whose approximate attention makes a row's logits depend on the rows beside it."""

NO_CACHE = "its layers attend inside transformers' own class, which keeps no K/V for the engine"


@FAMILIES.register("masked_lm")
class MaskedLM(nn.Module):
    """BERT, RoBERTa, ModernBERT and other masked LMs of transformers; full attention, no cache.

    Any class of `AutoModelForMaskedLM` whose logits come from one linear layer. It is run on whole
    rows, those of equal length together, so nothing is ever padded. No code of a checkpoint is run.
    Text prompts are encoded as they stand: write "[CLS]" and "[SEP]" where the model expects them.
    """

    paper: ClassVar[str] = "BERT, arXiv:1810.04805; ModernBERT, arXiv:2412.13663"
    tiny: ClassVar[Mapping[str, Any]] = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "vocab_size": 48,
        "mask_token_id": 44,
        "eos_token_id": 42,
        "pad_token_id": 42,
    }

    def __init__(
        self, net: PreTrainedModel, files: Published, *, published: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.net, self.published = net, dict(published)
        self.head_name, self.head = detached_head(net)
        self.takes = frozenset(inspect.signature(net.forward).parameters)
        self.first_position = first_position(net)
        self.info = masked_lm_info(net, self.head, files, self.first_position)

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

        return config.get("model_type") in MODEL_FOR_MASKED_LM_MAPPING_NAMES

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> MaskedLM:
        """The model of a config.json, with its weights allocated but not filled.

        Refuses what is no encoder or mixes rows, and heads that can't be told from the rest.
        """
        files.require({"is_decoder": False, "is_encoder_decoder": False})
        files.require({"quantization_config": None})
        if files.config["model_type"] in BATCHED:
            raise CheckpointError(
                f"model_type {files.config['model_type']!r} cannot be decoded: its approximate "
                "attention makes a row's logits depend on the rows beside it"
            )
        net = allocated("AutoModelForMaskedLM", files.config, device, dtype)
        model = cls(net, files, published=files.config)
        if torch.device(device).type == "meta":
            model.try_head()
        return model

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        """What the head reads, `(T, D)`, of `ids (T,)` at `positions (T,)`."""
        done, start = [], 0
        for rows, length in row_runs(attend):
            span = slice(start, start + rows * length)
            given = {"input_ids": ids[span]} if embeds is None else {"inputs_embeds": embeds[span]}
            if "position_ids" in self.takes:
                given["position_ids"] = positions[span] + self.first_position
            done.append(self.read({k: v.unflatten(0, (rows, -1)) for k, v in given.items()}))
            start = span.stop
        return done[0] if len(done) == 1 else torch.cat(done)

    def read(self, given: Mapping[str, Tensor]) -> Tensor:
        """What the head reads, of inputs `(rows, N, ...)`, flat `(rows * N, D)`."""
        if not given.keys() <= self.takes:
            raise CapabilityError(f"{type(self.net).__name__} reads token ids, not embeddings")
        return self.net(**given).logits.flatten(0, 1)

    def embedding(self, ids: Tensor) -> Tensor:
        """Input embeddings `(..., E)` of `ids (...)`."""
        return self.net.get_input_embeddings()(ids)

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """`hidden (n, D)` to the columns `[start, stop)` of the vocabulary, `(n, S)`."""
        bias = self.head.bias
        return F.linear(
            hidden, self.head.weight[start:stop], None if bias is None else bias[start:stop]
        )

    def try_head(self) -> None:
        """Refuse a class that does more with its head than to apply it last.

        One that looks at its inputs' values can't be tried on a device that has none.
        """
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        try:
            usable = self.read({"input_ids": ids}).shape == (2, self.head.in_features)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            if "meta tensors" in str(error):
                return
            raise unusable(self.net, str(error)) from error
        if not usable:
            raise unusable(self.net, "its logits do more than one linear layer does")

    def weights(self) -> dict[str, Tensor]:
        """Every stored tensor under its published name: views, to be read or filled in place."""
        again = self.aliases()
        return {name: t.detach() for name, t in self.tensors().items() if name not in again}

    def aliases(self) -> dict[str, str]:
        """Tensors that a checkpoint may repeat: their name -> the name of the one they equal."""
        return tied_names(self.net, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Everything under its name in transformers, a shared tensor under each of its names."""
        own = self.net.state_dict(keep_vars=True)
        return own | self.head.state_dict(prefix=f"{self.head_name}.", keep_vars=True)

    @staticmethod
    def stored_name(name: str) -> str | None:
        """The present name of a tensor that a checkpoint calls `name`; None: it is not needed."""
        if UNUSED.search(name):
            return None
        return re.sub(r"LayerNorm\.(gamma|beta)$", _norm_name, name)


def _norm_name(found: re.Match[str]) -> str:
    return "LayerNorm." + {"gamma": "weight", "beta": "bias"}[found[1]]


def detached_head(net: PreTrainedModel) -> tuple[str, nn.Linear]:
    """The name and the linear layer of the logits; `net` now gives what that layer reads."""
    head = net.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise unusable(net, "it has no linear layer for its logits")
    name = next(name for name, module in net.named_modules() if module is head)
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, nn.Identity())
    return name, head


def unusable(net: PreTrainedModel, why: str) -> CheckpointError:
    return CheckpointError(f"{type(net).__name__} cannot be decoded as a masked LM: {why}")


def first_position(net: PreTrainedModel) -> int:
    """The id of the first position: RoBERTa counts from behind its padding id, others from 0."""
    for name, module in net.named_modules():
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            return int(module.padding_idx) + 1
    return 0


def masked_lm_info(
    net: PreTrainedModel, head: nn.Linear, files: Published, first_position: int
) -> ModelInfo:
    """The mask and the end of a text ([SEP] or </s>) are the config's or the tokenizer's."""
    config, tokenizer = net.config, files.tokenizer
    end = None if tokenizer is None else tokenizer.sep_token or tokenizer.eos_token
    texts = replace(files.own_tokens(turn=end), end=end)
    ids = files.special_ids(texts, head.out_features)
    heads = getattr(config, "num_attention_heads", None) or 1
    sizes = ("hidden_size", "num_hidden_layers", "max_position_embeddings")
    found = [getattr(config, name, 0) for name in sizes]
    if not all(type(size) is int and size > 0 for size in found):
        raise CheckpointError(f"config.json: {', '.join(sizes)} must be positive, got {found}")
    width, layers, positions = found
    return ModelInfo(
        family="masked_lm",
        vocab_size=head.out_features,
        hidden_size=head.in_features,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        max_positions=positions - first_position,
        mask_id=ids.mask_id,
        end_ids=ids.end_ids,
        pad_id=ids.pad_id,
        runs_layers=False,
        whole_rows=NO_CACHE,
    )
