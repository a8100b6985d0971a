"""Verifiers and drafters by name, as the command line gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from dlm_decode.bridge.drafters import Drafter
from dlm_decode.bridge.drafters.baselines import NullDrafter, PromptLookup, RandomDrafter
from dlm_decode.bridge.drafters.diffusion import DiffusionDrafter
from dlm_decode.bridge.retokenize import EncodePrompt, Retokenized
from dlm_decode.bridge.verifier import Verifier
from dlm_decode.chat import chat_text, text_ids
from dlm_decode.errors import CheckpointError, RequestError
from dlm_decode.machine import usable_device

WITHOUT_MODEL = ("null", "random", "prompt_lookup")


def bundled_verifier_path() -> Path:
    """The folder of the tiny AR model that comes with the package."""
    return Path(str(files("dlm_decode") / "assets" / "tiny-ar"))


def load_verifier(
    name_or_path: str | Path | None = None,
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> tuple[Verifier, Any]:
    """A causal LM and its tokenizer, from a folder or hub id; None is the bundled one, in fp32.

    `gguf_file` names a GGUF file in that folder (needs the extra `smollm`). Raises
    `CheckpointError` where transformers cannot load it, `OptionError` for a device that is not
    there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, bundled = usable_device(device), name_or_path is None
    source = str(bundled_verifier_path() if name_or_path is None else name_or_path)
    extra: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    wanted = torch.float32 if dtype is None and (bundled or gguf_file) else dtype or "auto"
    if not Path(source).is_dir() and "/" not in source:
        raise CheckpointError(
            f"no causal LM could be loaded from {source!r}: it is no folder, and no hub id "
            "(owner/name) either"
        )
    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted, **extra)
            tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"no causal LM could be loaded from {source!r}: {error}") from error
    return Verifier(model.eval().to(place)), tokenizer


def load_drafter(
    name_or_path: str | Path | None,
    verifier: Verifier,
    verifier_tokenizer: Any,
    *,
    settings: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Drafter:
    """One of `WITHOUT_MODEL`, or a diffusion LM (None: the bundled one) with `settings`.

    Where the tokenizers differ, the draft crosses through text.
    """
    if name_or_path in WITHOUT_MODEL:
        kinds: dict[str, Drafter] = {
            "null": NullDrafter(),
            "random": RandomDrafter(verifier.vocab_size),
            "prompt_lookup": PromptLookup(),
        }
        return kinds[str(name_or_path)]
    from dlm_decode.api import load

    loaded = load(name_or_path, device=device)
    drafter = DiffusionDrafter(loaded, **(settings or {}))
    if _same_ids(loaded.tokenizer, verifier_tokenizer):
        return drafter
    return Retokenized(
        drafter,
        verifier_tokenizer,
        loaded.tokenizer,  # type: ignore[arg-type]
        end_ids=loaded.model.info.end_ids,
        encode_prompt=encode_as_chat(loaded.tokenizer),
    )


def encode_chat(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text` as one user message where there is a chat template, else as it is."""
    if not text.strip():
        raise RequestError("the prompt is empty: give at least one word")
    if tokenizer.chat_template:
        return text_ids(tokenizer, chat_text(tokenizer, [{"role": "user", "content": text}]))
    return text_ids(tokenizer, text, special=True)


def encode_as_chat(tokenizer: Any) -> EncodePrompt:
    """How the drafter reads a verifier's prompt: its last lines, as a user message of its own.

    Role names that the verifier's template leaves in the text are dropped.
    """

    def encode(text: str) -> list[int]:
        lines = [line for line in text.split("\n") if line not in ("user", "assistant", "system")]
        return encode_chat(tokenizer, "\n".join(lines).strip() or text)

    return encode


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers, which would stand among our own lines."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _same_ids(a: Any, b: Any) -> bool:
    return a is not None and b is not None and a.get_vocab() == b.get_vocab()
