#!/usr/bin/env bash
# Runs the tests that need optional extras (lm-evaluation-harness, Ray, matplotlib, peft, Triton), in an environment of
# their own, build/extras. Arguments go to pytest. DLM_DATA names the benchmark data; DLM_PARITY_DOCUMENTS
# is how many documents of each task are compared with lm-evaluation-harness's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=build/extras
source scripts/venv.sh
set_up_venv test,eval,distributed,plot,lora
export HF_HUB_OFFLINE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Builds of torch for GPUs bring a Triton of their own, which constraints.txt must not contradict.
if ! "$VENV/bin/python" -c 'import triton' 2>/dev/null; then
  "$VENV/bin/python" -m pip install --quiet --no-deps triton==3.6.0 ||
    echo "Triton could not be installed here: its tests are left out" >&2
fi

exec "$VENV/bin/python" -m pytest -q \
  tests/unit/test_eval_harness.py tests/unit/test_eval_pool.py tests/unit/test_eval_plots.py \
  tests/unit/test_kernels.py tests/unit/test_adapters.py "$@"
