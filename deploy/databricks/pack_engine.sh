#!/usr/bin/env bash
# Make the environment of requirements/gpu.lock and pack it: pack_engine.sh LOCK ARCHIVE [DIRECTORY]
# To be run once, on a node of the very runtime that will unpack it (a %sh cell, the web terminal): the environment keeps
# the runtime's own interpreter under it, and its scripts know their directory by its path. PipeMax is not in the archive:
# unpack_engine.sh installs the wheel, so a new wheel needs no new archive.
#   bash pack_engine.sh gpu.lock /Volumes/main/pipemax/files/engine.tar
set -euo pipefail
lock=$1 archive=$2 directory=${3:-/local_disk0/pipemax}

# --clear empties the directory: only one that is an environment already.
[ ! -e "$directory" ] || [ -e "$directory/pyvenv.cfg" ] || { echo "$directory is there and is no Python environment" >&2; exit 1; }
python3 -m venv --clear "$directory"
"$directory/bin/python" -m pip install --quiet uv
# uv stays out of what it is told to install, hence not "sync", which would remove it.
"$directory/bin/uv" pip install --quiet --python "$directory/bin/python" --requirement "$lock"

# Volumes take whole files, written from front to back: first here, then there.
local_archive=$(mktemp)
tar --create --file "$local_archive" --directory "$directory" .
cp "$local_archive" "$archive"
rm "$local_archive"
echo "$archive: $(du --human-readable "$archive" | cut -f1), to be unpacked at $directory"
