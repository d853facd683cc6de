#!/usr/bin/env bash
# Remove what the other commands of the Makefile made: tools/clean.sh VENV DEMO. Called by `make clean`.
# A directory that a caller can name goes only where a file in it shows that we made it.
set -euo pipefail
cd "$(dirname "$0")/.."

remove_ours() {  # remove_ours DIRECTORY MARKER
    [ -e "$1" ] || return 0
    if [ -e "$1/$2" ]; then
        rm -rf "$1"
    else
        echo "left alone: $1, which has no $2 in it and so may be yours"
    fi
}

remove_ours "$1" pyvenv.cfg
remove_ours "$2" .pipemax-demo
# Of this checkout, and ignored by git.
rm -rf .venv-versions .venv-peers .venv-llama logs dist .mypy_cache .ruff_cache .import_linter_cache .hypothesis spark-warehouse
find . -name __pycache__ -prune -exec rm -rf {} +
