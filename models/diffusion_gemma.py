"""DiffusionGemma through transformers' own class: an encoder of what is decided, a canvas decoder.

Letters as in `dlm_decode.models`, and L for the length of a canvas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_decode.errors import CapabilityError, CheckpointError
from dlm_decode.models import FAMILIES, Attend, ModelInfo, row_runs, row_windows
from dlm_decode.models.hosted import allocated, tied_names
from dlm_decode.models.published import Published

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SURE = 1e4
"""Logit of a token that is given; all others have 0, and so no probability at all."""

NO_CACHE = "its encoder and its layers attend inside transformers' own class"


@FAMILIES.register("diffusion_gemma")
class DiffusionGemma(nn.Module):
    """DiffusionGemma: canvases of random tokens, denoised with sampler `renoise`; text only.

    What lies before a row's window is encoded causally, the window is decoded bidirectionally over
    it, and what lies behind is not seen. The encoder runs anew in each forward.
    """

    paper: ClassVar[str] = "google/diffusiongemma-26B-A4B-it, transformers 5.24"
    tiny: ClassVar[Mapping[str, Any]] = {
        "model_type": "diffusion_gemma",
        "canvas_length": 8,
        "boi_token_id": 40,
        "eoi_token_id": 41,
        "image_token_id": 43,
        "text_config": {
            "vocab_size": 48,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "max_position_embeddings": 256,
            "use_bidirectional_attention": "vision",
            "eos_token_id": 42,
            "pad_token_id": 0,
            "bos_token_id": 2,
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
    }

    def __init__(
        self, net: PreTrainedModel, files: Published, *, published: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.net, self.published = net, dict(published)
        self.info = gemma_info(net, files)

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "diffusion_gemma"

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> DiffusionGemma:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require({"quantization_config": None})
        net = allocated("AutoModelForImageTextToText", files.config, device, dtype)
        if dtype == torch.float64:
            net.set_experts_implementation("eager")  # the grouped kernel knows no doubles
        return cls(net, files, published=files.config)

    @property
    def device(self) -> torch.device:
        return self.net.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.net.lm_head.weight.dtype

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        embeds: Tensor | None = None,
        beliefs: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Final hidden states `(T, D)` of the windows of `ids (T,)`, 0 elsewhere."""
        if embeds is not None:
            raise CapabilityError("diffusion_gemma reads token ids, not embeddings")
        hidden = torch.zeros(len(ids), self.info.hidden_size, device=self.device, dtype=self.dtype)
        for start, places in self.alike(attend):
            canvas = places[:, start:]
            told = None if beliefs is None else believed(ids, canvas, *beliefs)
            hidden[canvas] = self.decoded(ids[places[:, :start]], ids[canvas], told)
        return hidden

    def alike(self, attend: Attend) -> Iterator[tuple[int, Tensor]]:
        """Rows that can be computed together: where their window begins, and the packed places
        `(rows, stop)` up to its end."""
        lengths = [length for rows, length in row_runs(attend) for _ in range(rows)]
        first = [sum(lengths[:i]) for i in range(len(lengths))]
        rows = sorted(zip(row_windows(attend), first, strict=True))
        for (start, stop), members in groupby(rows, key=lambda row: row[0]):
            begin = torch.tensor([at for _, at in members], device=self.device)
            yield start, begin[:, None] + torch.arange(stop, device=self.device)

    def decoded(self, before: Tensor, canvas: Tensor, logits: Tensor | None) -> Tensor:
        """Hidden states `(rows, L, D)` of `canvas (rows, L)` behind `before (rows, N)`.

        `logits (rows, L, V)` are what was predicted a turn ago, -inf for rows of which nothing was.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.net.config.get_text_config(decoder=True))
        self.net.model.encoder(input_ids=before, cache=cache)
        known = None if logits is None else (logits > -torch.inf).any(-1).all(-1)
        if logits is not None and known is not None:
            logits = logits.masked_fill(~known[:, None, None], 0.0).to(self.dtype)
        return self.net.model.decoder(
            decoder_input_ids=canvas,
            cache=cache,
            self_conditioning_logits=logits,
            self_conditioning_mask=known,
        ).last_hidden_state

    def embedding(self, ids: Tensor) -> Tensor:
        """Input embeddings `(..., D)` of `ids (...)`."""
        return self.net.model.decoder.embed_tokens(ids)

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """`hidden (n, D)` to the columns `[start, stop)` of the vocabulary, `(n, S)`, capped."""
        cap = float(self.net.config.text_config.final_logit_softcapping)
        plain = F.linear(hidden, self.net.lm_head.weight[start:stop])
        wide = torch.promote_types(plain.dtype, torch.float32)
        return torch.tanh(plain.to(wide) / cap) * cap

    def weights(self) -> dict[str, Tensor]:
        """Every stored tensor under its published name: views, to be read or filled in place."""
        again = self.aliases()
        tensors = self.net.state_dict(keep_vars=True)
        return {name: t.detach() for name, t in tensors.items() if name not in again}

    def aliases(self) -> dict[str, str]:
        """Tensors that a checkpoint may repeat: the encoder's and the head, tied to the decoder."""
        return tied_names(self.net, self.net.state_dict(keep_vars=True))


def believed(ids: Tensor, canvas: Tensor, places: Tensor, logits: Tensor) -> Tensor:
    """Logits `(rows, L, V)` of the turn before at the packed places `canvas (rows, L)`.

    They are `logits (m, V)` at `places (m,)`; the other tokens of `ids (T,)` there are given ones.
    """
    line = torch.full_like(ids, -1).index_copy(0, places, torch.arange(len(places)).to(places))
    found, given = logits[line[canvas].clamp(min=0)], ids[canvas][..., None]
    sure = torch.zeros_like(found).scatter_(-1, given, SURE)
    return torch.where(line[canvas][..., None] < 0, sure, found)


def gemma_info(net: PreTrainedModel, files: Published) -> ModelInfo:
    """Blocks are the canvases, from the end of the prompt; end ids as generation has them.

    Layers differ in their heads: those of the first one are named.
    """
    text, whole = net.config.text_config, net.config
    layer = text.per_layer_config[0]
    ends = files.generation.get("eos_token_id") or files.config.get("eos_token_id")
    ends = text.eos_token_id if ends is None else ends
    end_ids = tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)
    if not all(type(end) is int and 0 <= end < text.vocab_size for end in end_ids):
        raise CheckpointError(f"config.json: eos_token_id must be token ids, got {ends!r}")
    return ModelInfo(
        family="diffusion_gemma",
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=layer.num_key_value_heads,
        head_size=layer.head_dim,
        max_positions=text.max_position_embeddings,
        mask_id=text.vocab_size,
        end_ids=end_ids,
        pad_id=text.pad_token_id,
        block_length=whole.canvas_length,
        runs_layers=False,
        whole_rows=NO_CACHE,
        self_conditioned=True,
    )
