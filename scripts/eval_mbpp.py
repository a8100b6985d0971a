"""Evaluate a decoder on MBPP: `dlm-decode eval` with the three-shot protocol.

    python scripts/eval_mbpp.py --model FOLDER --sampler threshold --data DIR --allow-code-execution

Another protocol whose answers are programs can be named first; all options of `dlm-decode eval` are
taken.
"""

from __future__ import annotations

import sys

from dlm_decode.cli import main

DEFAULT = "mbpp-3shot"

if __name__ == "__main__":
    given = sys.argv[1:]
    named = bool(given) and given[0].startswith(("mbpp", "humaneval"))
    sys.exit(main(["eval", *([] if named else [DEFAULT]), *given]))
