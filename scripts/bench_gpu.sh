#!/usr/bin/env bash
# Measures one GPU in under five minutes: a random model of LLaDA-8B's shape is made on the device, and one
# table compares each measured figure with its floor. Options: see scripts/bench_gpu.py; --smoke tries it
# out on a CPU with a tiny model. PYTHON names an interpreter with a CUDA build of torch (2.11 or newer).
# Beside torch it needs numpy, einops and safetensors; where nothing can be installed, put them into the
# folder build/deps first (pip install --target build/deps einops safetensors).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
export PYTHONPATH="build/deps${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import torch, numpy, einops, safetensors'; then
  echo "bench_gpu.sh: $python lacks a package; see the top of this script" >&2
  exit 2
fi
exec "$python" scripts/bench_gpu.py "$@"
