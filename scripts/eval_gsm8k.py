"""Evaluate a decoder on GSM8K: `dlm-decode eval` with the fixed five-shot protocol.

    python scripts/eval_gsm8k.py --model FOLDER --sampler threshold --cache dual --data DIR

Another GSM8K protocol can be named first; all options of `dlm-decode eval` are taken.
"""

from __future__ import annotations

import sys

from dlm_decode.cli import main

DEFAULT = "gsm8k-5shot-fixed"

if __name__ == "__main__":
    given = sys.argv[1:]
    named = bool(given) and given[0].startswith("gsm8k")
    sys.exit(main(["eval", *([] if named else [DEFAULT]), *given]))
