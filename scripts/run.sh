#!/usr/bin/env bash
# Sets up .venv and decodes a few prompts with the bundled model: text, forwards, tokens per forward.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
set_up_venv
export HF_HUB_OFFLINE=1
exec "$VENV/bin/python" scripts/demo.py "$@"
