#!/usr/bin/env bash
# Cluster init script: the engine's environment from PIPEMAX_ENGINE_ARCHIVE onto this node's own disk, where vLLM's
# thousands of files are imported in seconds instead of minutes, and PIPEMAX_WHEEL, the wheel that the job also has, into it.
set -euo pipefail
directory=${PIPEMAX_ENGINE_DIRECTORY:-/local_disk0/pipemax}
archive=${PIPEMAX_ENGINE_ARCHIVE:?name the archive in the cluster\'s environment variables}
wheel=${PIPEMAX_WHEEL:?name the wheel in the cluster\'s environment variables}
for file in "$archive" "$wheel"; do
    [ -r "$file" ] || { echo "$file is not there, or this cluster may not read it" >&2; exit 1; }
done
mkdir -p "$directory"
tar --extract --file "$archive" --directory "$directory"
"$directory/bin/python" -m pip install --quiet --no-index --no-deps --force-reinstall "$wheel"
"$directory/bin/python" -c 'import pipemax.serve.main'
