"""DiffuGPT: GPT-2 adapted to masked diffusion. Letters as in `dlm_decode.models`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlm_decode.models import FAMILIES, Attend, ModelInfo
from dlm_decode.models.adapted import SHIFT, Adapted, stated_shift
from dlm_decode.models.bd3lm import Tensors
from dlm_decode.models.published import MOST_PARTS, Published, head_size

SUPPORTED: Mapping[str, Any] = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "quantization_config": None,
}

UNUSED = re.compile(r"\.attn\.(masked_)?bias$")
"""The causal masks that GPT-2's checkpoints may hold."""

WRAPPED: Mapping[str, str] = {
    r"^denoise_model\.": "transformer.",
    r"^embed_tokens\.": "transformer.wte.",
}
"""The names under which DiffuGPT's class stores GPT-2's tensors -> GPT-2's own."""


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    head_size: int
    ffn_size: int
    max_positions: int
    eps: float
    tied: bool


class GPT2Block(nn.Module):
    """Attention, then a GELU layer, each behind its norm."""

    def __init__(
        self, config: GPT2Config, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.tensors = Tensors(block_shapes(config), device=device, dtype=dtype)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """`x (T, D)` to `(T, D)`."""
        heads = self._linear("attn.c_attn", self._norm("ln_1", x))
        q, k, v = heads.unflatten(-1, (3, self.config.heads, -1)).unbind(1)
        x = x + self._linear("attn.c_proj", attend(q, k, v).flatten(1))
        inner = F.gelu(self._linear("mlp.c_fc", self._norm("ln_2", x)), approximate="tanh")
        return x + self._linear("mlp.c_proj", inner)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        """GPT-2 stores its matrices the other way round: inputs, outputs."""
        return torch.addmm(self.tensors[f"{name}.bias"], x, self.tensors[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, self.tensors, name, self.config.eps)


@FAMILIES.register("diffugpt")
class DiffuGPT(nn.Module):
    """DiffuGPT: GPT-2 under full attention; `diffusion_shift` (1) added to config.json.

    Its tensors may have GPT-2's names or those of DiffuGPT's own class. Read: DiffuLLaMA's model
    and inference code, and others' loaders of the published tensors, not its config.json.
    """

    paper: ClassVar[str] = Adapted.paper.partition(";")[0]
    tiny: ClassVar[Mapping[str, Any]] = {
        "model_type": "gpt2",
        SHIFT: 1,
        "activation_function": "gelu_new",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "vocab_size": 48,
        "layer_norm_epsilon": 1e-5,
        "mask_token_id": 44,
        "eos_token_id": 42,
        "pad_token_id": 42,
    }

    def __init__(
        self,
        config: GPT2Config,
        info: ModelInfo,
        *,
        published: Mapping[str, Any],
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.info, self.published = config, info, dict(published)
        self.outer = Tensors(outer_shapes(config), device=device, dtype=dtype)
        blocks = (GPT2Block(config, device=device, dtype=dtype) for _ in range(config.layers))
        self.blocks = nn.ModuleList(blocks)

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "gpt2" and SHIFT in config

    @classmethod
    def from_published(
        cls, files: Published, *, device: torch.device | str, dtype: torch.dtype
    ) -> DiffuGPT:
        """The model of a config.json, with its weights allocated but not filled."""
        files.require(SUPPORTED)
        config = gpt2_config(files)
        info = gpt2_info(files, config)
        return cls(config, info, published=files.config, device=device, dtype=dtype)

    @property
    def device(self) -> torch.device:
        return self.outer["transformer.wte.weight"].device

    @property
    def dtype(self) -> torch.dtype:
        return self.outer["transformer.wte.weight"].dtype

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, *, embeds: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm `(T, D)` of `ids (T,)` at `positions (T,)`."""
        x = self.embedding(ids) if embeds is None else embeds
        x = x + F.embedding(positions, self.outer["transformer.wpe.weight"])
        for layer, block in enumerate(self.blocks):
            x = block(x, lambda q, k, v, i=layer: attend(i, q, k, v))
        return layer_norm(x, self.outer, "transformer.ln_f", self.config.eps)

    def embedding(self, ids: Tensor) -> Tensor:
        """Input embeddings `(..., D)` of `ids (...)`, without those of positions."""
        return F.embedding(ids, self.outer["transformer.wte.weight"])

    def logits(self, hidden: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """`hidden (n, D)` to the columns `[start, stop)` of the vocabulary, `(n, S)`."""
        name = "transformer.wte" if self.config.tied else "lm_head"
        return F.linear(hidden, self.outer[f"{name}.weight"][start:stop])

    def weights(self) -> dict[str, Tensor]:
        """Every stored tensor under its published name: views, to be read or filled in place."""
        named = self.outer.named()
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, GPT2Block)
            inner = block.tensors.named()
            named |= {f"transformer.h.{layer}.{name}": view for name, view in inner.items()}
        return named

    def aliases(self) -> dict[str, str]:
        """Tensors that a checkpoint may repeat: their name -> the name of the one they equal."""
        return {"lm_head.weight": "transformer.wte.weight"} if self.config.tied else {}

    @staticmethod
    def stored_name(name: str) -> str | None:
        """GPT-2's name of a tensor that a checkpoint calls `name`; None: it is not needed."""
        if UNUSED.search(name):
            return None
        for wrapped, own in WRAPPED.items():
            name = re.sub(wrapped, own, name)
        return name


def gpt2_config(files: Published) -> GPT2Config:
    """GPT-2's field names to ours."""
    width, heads = files.number("n_embd"), files.number("n_head")
    return GPT2Config(
        vocab_size=files.number("vocab_size"),
        hidden_size=width,
        layers=files.number("n_layer", MOST_PARTS),
        heads=heads,
        head_size=head_size(width, heads, heads),
        ffn_size=files.number_or("n_inner", 4 * width),
        max_positions=files.number("n_positions"),
        eps=files.real("layer_norm_epsilon", 1e-5),
        tied=files.flag("tie_word_embeddings", True),
    )


def gpt2_info(files: Published, config: GPT2Config) -> ModelInfo:
    """Full attention; the ids are those that the files name."""
    ids = files.special_ids(files.own_tokens(), config.vocab_size)
    return ModelInfo(
        family="diffugpt",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.heads,
        head_size=config.head_size,
        max_positions=config.max_positions,
        mask_id=ids.mask_id,
        end_ids=ids.end_ids,
        pad_id=ids.pad_id,
        shift=stated_shift(files),
        runs_layers=False,
    )


def block_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of one block's tensors."""
    d, f = config.hidden_size, config.ffn_size
    linears: dict[str, tuple[int, ...]] = {
        "attn.c_attn": (d, 3 * d),
        "attn.c_proj": (d, d),
        "mlp.c_fc": (d, f),
        "mlp.c_proj": (f, d),
    }
    weights = {f"{name}.weight": shape for name, shape in linears.items()}
    biases = {f"{name}.bias": shape[1:] for name, shape in linears.items()}
    norms = [f"{name}.{part}" for name in ("ln_1", "ln_2") for part in ("weight", "bias")]
    return weights | biases | dict.fromkeys(norms, (d,))


def outer_shapes(config: GPT2Config) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of the tensors outside the blocks."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": table,
        "transformer.wpe.weight": (config.max_positions, config.hidden_size),
        "transformer.ln_f.weight": (config.hidden_size,),
        "transformer.ln_f.bias": (config.hidden_size,),
    }
    return shapes if config.tied else shapes | {"lm_head.weight": table}


def layer_norm(x: Tensor, tensors: Tensors, name: str, eps: float) -> Tensor:
    """The norm called `name`; statistics in fp32 or wider."""
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return F.layer_norm(x, weight.shape, weight, bias, eps)
