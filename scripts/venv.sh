# Sourced by run.sh, test.sh and test_extras.sh from the repository's root: `set_up_venv [EXTRAS]` makes
# the folder VENV (.venv unless set) hold this checkout with the versions of constraints.txt. Nothing is
# installed again until these files change. PYTHON names the interpreter to use; pip's own configuration
# says where packages come from.

VENV="${VENV:-.venv}"

set_up_venv() {
  local extra="${1:-}" stamp wanted python
  stamp="$VENV/installed-${extra:-plain}"
  if [[ ! -x $VENV/bin/python ]] || ! "$VENV/bin/python" -c '' 2>/dev/null; then
    python="$(find_python)"
    echo "making $VENV with $python" >&2
    "$python" -m venv --clear "$VENV"
  fi
  wanted="$(install_key)"
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
    echo "installing into $VENV (the first time takes minutes)" >&2
    install_torch
    "$VENV/bin/python" -m pip install --quiet -c constraints.txt -e ".${extra:+[$extra]}"
    echo "$wanted" >"$stamp"
  fi
}

find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "no Python 3.10 or newer found: install one, or name it in PYTHON" >&2
  return 1
}

# A digest of all that decides what gets installed, the folder included: it cannot be moved.
install_key() {
  "$VENV/bin/python" - <<'END'
import hashlib, os, pathlib, sys

text = "".join(pathlib.Path(name).read_text() for name in ("pyproject.toml", "constraints.txt"))
print(hashlib.sha256(f"{sys.version}{os.getcwd()}{text}".encode()).hexdigest())
END
}

# Without a GPU the CPU build is taken where one can be had: from pip's configured places, or else from
# PyTorch's index. The build on PyPI, several times as large, runs without a GPU too.
install_torch() {
  local version pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --quiet)
  version="$(sed -n 's/^torch==//p' constraints.txt)"
  if [[ "$(uname -s)" == Linux ]] && ! has_gpu; then
    "${pip[@]}" --no-deps "torch==$version+cpu" 2>/dev/null && return
    "${pip[@]}" --no-deps --retries 0 --timeout 15 \
      --index-url https://download.pytorch.org/whl/cpu "torch==$version+cpu" 2>/dev/null && return
  fi
  "${pip[@]}" -c constraints.txt "torch==$version"
}

has_gpu() {
  command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU
}
