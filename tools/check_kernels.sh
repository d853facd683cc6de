#!/usr/bin/env bash
# The KV kernels' tests under compute-sanitizer, for machines with a GPU: tools/check_kernels.sh [PYTHON]
# memcheck finds accesses outside of an allocation, racecheck hazards in shared memory (the kernels have none),
# initcheck reads of device memory that nobody wrote.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python}
sanitizer=$(command -v compute-sanitizer || true)
if [ -z "$sanitizer" ]; then
    echo "compute-sanitizer is not on PATH: it comes with the CUDA toolkit, not with the driver" >&2
    exit 1
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch finds no CUDA GPU here: there is nothing to check" >&2
    exit 1
fi
for tool in memcheck racecheck initcheck; do
    echo "== $tool"
    "$sanitizer" --tool "$tool" --error-exitcode 1 --target-processes all \
        "$python" -m pytest -q tests/gpu/test_kernels.py
done
