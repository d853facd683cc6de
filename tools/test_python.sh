#!/usr/bin/env bash
# The pure tests with another Python, without torch and vLLM: called by `make test-python`.
# tools/test_python.sh UV PYTHON ENVIRONMENT PYTEST-ARGUMENTS: safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$1 python=$2 environment=$3
shift 3
command -v "$python" >/dev/null || {
    echo "'$python' is not on PATH. Name another one: make test-python OTHER_PYTHON=/path/to/python3.12"
    exit 1
}
[ -x "$environment/bin/python" ] || "$uv" venv -q --python "$python" "$environment"
"$uv" pip sync -q --python "$environment/bin/python" requirements/python-3.12.lock
"$uv" pip install -q --python "$environment/bin/python" --no-deps --no-build-isolation --editable .
"$environment/bin/python" --version
"$environment/bin/python" -m pytest -q -n 2 "$@"
