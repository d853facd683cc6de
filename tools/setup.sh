#!/usr/bin/env bash
# Make the environment: called by `make setup` with PYTHON, VENV, LOCK and UV_VERSION. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf '\n%s\n' "$1" >&2; exit 1; }

command -v "$PYTHON" >/dev/null || fail "Python 3.11 or newer is needed and '$PYTHON' is not on PATH.
Name another one: make setup PYTHON=/path/to/python3"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed; '$PYTHON' is $("$PYTHON" --version). Name another: make setup PYTHON=…"
java=${JAVA_HOME:+$JAVA_HOME/bin/}java
command -v "$java" >/dev/null || fail "Java 17 is needed (Spark runs on it) and '$java' was not found.
On Debian or Ubuntu: apt-get install openjdk-17-jre-headless; or set JAVA_HOME."
java_major=$("$java" -version 2>&1 | sed -nE 's/.*version "([0-9]+).*/\1/p' | head -1)
[ "${java_major:-0}" -ge 17 ] || fail "Java 17 or newer is needed; '$java' is version ${java_major:-unknown}. Set JAVA_HOME."

command -v g++ >/dev/null || fail "g++ is needed (vLLM for CPUs compiles what a model runs). On Debian or Ubuntu: apt-get install g++."
"$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || fail "libnuma is needed (vLLM for CPUs is linked with it).
On Debian or Ubuntu: apt-get install libnuma1."

mkdir -p logs
log=logs/setup.log
cat <<TEXT
Setting up $VENV (once; a few minutes on a fast line):
  $(grep -cE '^[a-z0-9]' "$LOCK") pinned Python packages from $LOCK, 6.9 GB on disk, most of it torch's CUDA libraries
  Delta Lake's jars for Spark, 87 MB
Details go to $log.
TEXT

step() {  # step TEXT COMMAND...
    printf '  %-48s' "$1"
    local start=$SECONDS
    shift
    if "$@" >>"$log" 2>&1; then
        printf 'done in %d s\n' $((SECONDS - start))
    else
        printf 'failed\n'
        tail -n 20 "$log" >&2
        fail "The last lines of $log stand above."
    fi
}

make_venv() {
    "$PYTHON" -m venv "$VENV" && "$VENV/bin/python" -m pip install -q --disable-pip-version-check "uv==$UV_VERSION"
}
install_lock() { "$VENV/bin/uv" pip sync --python "$VENV/bin/python" "$LOCK"; }
install_project() {
    "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps --no-build-isolation --editable .
}

: >"$log"
[ -x "$VENV/bin/uv" ] || step "a Python environment" make_venv
step "the packages of the lock" install_lock
step "this project, editable" install_project
step "Delta's jars, and Spark's settings for them" "$VENV/bin/python" tools/configure_spark.py
