"""A tiny random model with a tokenizer, for the evaluation's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from dlm_decode.models.llada import LLaDA
from dlm_decode.models.loading import save_model
from dlm_decode.models.published import Published
from dlm_decode.models.toy import random_llada, randomise

TOKENIZER = Path(__file__).resolve().parents[2] / "dlm_decode" / "assets" / "tiny-ar"


def write_model(folder: Path) -> Path:
    """A random LLaDA with the bundled tokenizer; skips the test where that is not there."""
    if not TOKENIZER.is_dir():
        pytest.skip("the bundled tokenizer is not there")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = dict(random_llada(vocab=448, layers=1, hidden=16, heads=2).published)
    config |= {"mask_token_id": tokenizer.mask_token_id, "eos_token_id": tokenizer.eos_token_id}
    config |= {"pad_token_id": tokenizer.eos_token_id}
    made = LLaDA.from_published(Published(config), device="cpu", dtype=torch.float32)
    save_model(randomise(made, 3), folder, tokenizer)
    return folder
