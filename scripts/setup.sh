#!/usr/bin/env bash
# Make .venv from the lock files. Safe to repeat: when nothing changed it returns at once.
#   PYTHON=python3.12  interpreter to use       VENV=.venv  where to put the environment
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv}"
STAMP="$VENV/setup-stamp"
INPUTS=(pyproject.toml requirements/cpu.lock requirements/dev.lock scripts/setup.sh)
CPU_WHEELS=https://download.pytorch.org/whl/cpu

fail() { echo "setup: $*" >&2; exit 1; }

suits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python}; do
        if suits "$candidate"; then echo "$candidate"; return; fi
    done
    fail "${PYTHON:-no python3 found that} is not Python 3.11 or newer with the modules venv and pip;" \
         "install one, or name it: make setup PYTHON=/path/to/python3.11"
}

install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-deps "$@"; }

# The stamp names what the environment was made from. It is removed first and written last, so an interrupted
# or failed run never counts as done.
inputs_digest() { "$1" -c 'import hashlib, sys
digest = hashlib.sha256()
for path in sys.argv[1:]:
    digest.update(open(path, "rb").read())
print(digest.hexdigest())' "${INPUTS[@]}"; }

if [[ -f $STAMP && $("$VENV/bin/python" -c 'print("runs")' 2>/dev/null) == runs ]]; then
    if [[ $(<"$STAMP") == "$(inputs_digest "$VENV/bin/python")" ]]; then exit 0; fi
fi

python="$(find_python)"
echo "setup: installing into $VENV from requirements/*.lock (a few minutes the first time)"
if [[ -f $STAMP ]]; then rm "$STAMP"; else "$python" -m venv --clear "$VENV" || fail "cannot make $VENV"; fi

# A plain `torch` is a CUDA build on PyPI. Ask for the CPU build by name, first where pip is set to look.
torch="$(grep '^torch==' requirements/cpu.lock)"
if [[ $(uname) == Linux ]]; then
    install "$torch+cpu" 2>/dev/null || install "$torch+cpu" --index-url "$CPU_WHEELS" \
        || fail "cannot install $torch+cpu, neither from pip's index nor from $CPU_WHEELS"
fi
install -r requirements/cpu.lock || fail "installing requirements/cpu.lock failed (pip's message is above)"
install -r requirements/dev.lock || fail "installing requirements/dev.lock failed (pip's message is above)"
install --editable . || fail "installing blendrag itself failed (pip's message is above)"

inputs_digest "$VENV/bin/python" >"$STAMP"
echo "setup: $VENV is ready"
