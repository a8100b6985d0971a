"""The command of lm-evaluation-harness, with our model registered as `dlm-decode`.

    dlm-decode-lm-eval run --model dlm-decode --tasks gsm8k --apply_chat_template \
        --fewshot_as_multiturn false --model_args pretrained=FOLDER,sampler=threshold,gen_length=256
"""

from __future__ import annotations

import sys

NAME = "dlm-decode"
TARGET = "dlm_decode.eval.harness:DlmDecodeLM"


def register() -> None:
    """Announce the model to lm-eval, which finds models in no other way."""
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def main() -> int:
    """lm-eval's command line; returns the exit status."""
    from dlm_decode.errors import DlmDecodeError

    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError:
        print("dlm-decode: error: needs pip install 'dlm-decode[eval]'", file=sys.stderr)
        return 2
    register()
    try:
        cli_evaluate()
    except DlmDecodeError as error:
        print(f"dlm-decode: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
