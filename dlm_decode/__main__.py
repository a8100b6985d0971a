"""`python -m dlm_decode` is the `dlm-decode` command."""

from __future__ import annotations

import sys

from dlm_decode.cli import main

if __name__ == "__main__":
    sys.exit(main())
