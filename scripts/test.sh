#!/usr/bin/env bash
# Sets up .venv with the test extras, then runs linter, type checker and the whole test suite with
# coverage. Arguments go to pytest, and then nothing but pytest runs: bash scripts/test.sh -k cli
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
set_up_venv test
export HF_HUB_OFFLINE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the models of the tests are too small to share out

python="$VENV/bin/python"
if [[ $# -gt 0 ]]; then
  exec "$python" -m pytest "$@"
fi
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
exec "$python" -m pytest -n auto --maxprocesses 4 --dist worksteal --cov --cov-report=term
