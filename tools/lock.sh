#!/usr/bin/env bash
# Resolve the locks anew: tools/lock.sh [UV]. The output names no index, so any mirror serves.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${1:-uv}
compile() {
    "$uv" pip compile pyproject.toml --python-version 3.11 --no-emit-index-url --no-header --no-annotate -q "$@"
}
compile --extra spark --extra mlflow --extra cpu --extra dev --override requirements/overrides.txt -o requirements/cpu.lock
compile --extra gpu -o requirements/gpu.lock
compile --extra spark --extra mlflow -o requirements/spark.lock
wc -l requirements/*.lock
