"""Write a trained model as a checkpoint folder in its published layout, in fp16, with the
tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from dlm_decode.training.data import Corpus
from dlm_decode.training.models import (
    LLADA_NAMES,
    LLAMA_NAMES,
    TinyTransformer,
    export_tensors,
    llada_config,
    llama_config,
)

MAX_LENGTH = 256


def export_causal(model: TinyTransformer, corpus: Corpus, folder: Path) -> None:
    """A folder that `LlamaForCausalLM.from_pretrained` loads."""
    config = llama_config(model.config, eos_id=corpus.eos_id, max_length=MAX_LENGTH)
    _write(model, LLAMA_NAMES, config, corpus.tokenizer, folder)
    generation = {"eos_token_id": corpus.eos_id, "pad_token_id": corpus.eos_id, "do_sample": False}
    _write_json(folder / "generation_config.json", generation)


def export_diffusion(model: TinyTransformer, corpus: Corpus, folder: Path) -> None:
    """A folder in the LLaDA layout."""
    config = llada_config(
        model.config, eos_id=corpus.eos_id, mask_id=corpus.mask_id, max_length=MAX_LENGTH
    )
    _write(model, LLADA_NAMES, config, corpus.tokenizer, folder)


def _write(
    model: TinyTransformer,
    names: dict[str, Any],
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.to(torch.float16) for name, t in export_tensors(model, names).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    tokenizer.save_pretrained(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
