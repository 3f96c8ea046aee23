#!/usr/bin/env bash
# Make .venv from the lock files. Safe to repeat: when nothing changed it returns at once.
#   PYTHON=python3.12  interpreter to use       VENV=.venv  where to put the environment
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv}"
STAMP="$VENV/setup-stamp"
CPU_WHEELS=https://download.pytorch.org/whl/cpu

fail() { echo "setup: $*" >&2; exit 1; }

find_python() {
    local candidates=(python3 python3.11 python3.12 python3.13 python) candidate
    if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' &>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with venv and pip (tried: ${candidates[*]});" \
        "install one, or name it: make setup PYTHON=/path/to/python3.11"
}

# --no-deps, because the lock files are complete: resolving would bring back the packages left out on purpose.
# --no-compile, because byte code for all of torch takes longer than compiling what is imported on first use.
install() {
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-compile "$@"
}

# What the environment is made from, and where: a virtual environment does not survive being moved.
current() { echo "$PWD: $(cat pyproject.toml integrations/*/pyproject.toml requirements/*.lock requirements/setup.sh | cksum)"; }

made=""
if [[ -f $STAMP ]] && "$VENV/bin/python" -c '' 2>/dev/null; then made="$(<"$STAMP")"; fi
if [[ $made == "$(current)" ]]; then exit 0; fi

python="$(find_python)"
echo "setup: installing the lock files into $VENV (two to three minutes the first time)"
# The stamp goes first and comes last, so that an interrupted or failed run never counts as done.
case "$made" in
    "$PWD: "*) rm "$STAMP" ;;
    *) "$python" -m venv --clear "$VENV" || fail "cannot make a virtual environment in $VENV" ;;
esac

# On Linux a plain `torch` may be a CUDA build. Ask for the CPU build by name, first where pip looks anyway.
build=""
if [[ $(uname) == Linux ]]; then
    build=+cpu
    torch="$(grep '^torch==' requirements/cpu.lock)$build"
    install "$torch" 2>/dev/null || install "$torch" -i "$CPU_WHEELS" ||
        fail "cannot install $torch, neither from pip's own index nor from $CPU_WHEELS"
fi
vision="$(grep '^torchvision==' requirements/images.lock)$build"
install "$vision" 2>/dev/null || install "$vision" -i "$CPU_WHEELS" --retries 0 2>/dev/null ||
    echo "setup: $vision is not to be had here: models that read images, too, will not start" >&2
for lock in requirements/{cpu,integrations,dev}.lock; do
    install -r "$lock" || fail "cannot install $lock; pip's message is above"
done
install --editable . --editable ./integrations/langchain-blendrag --editable ./integrations/llama-index-llms-blendrag ||
    fail "cannot install the three packages of this repository; pip's message is above"

current >"$STAMP"
echo "setup: $VENV is ready"
