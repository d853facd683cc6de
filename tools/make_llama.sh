#!/usr/bin/env bash
# llama-cpp-python's server and the demo model for it, in .venv-llama: called by `make llama`, for the tests of endpoints.
# tools/make_llama.sh BIN DIRECTORY: with uv in BIN. It compiles llama.cpp, which takes g++ and minutes.
# Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
directory=$2
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-1}"

echo "$directory: llama-cpp-python from $(basename requirements/llama.lock), compiled on $CMAKE_BUILD_PARALLEL_LEVEL core(s)"
[ -x "$directory/bin/python" ] || "$bin/uv" venv -q --python "$bin/python" "$directory"
"$bin/uv" pip sync -q --python "$directory/bin/python" requirements/llama.lock
"$directory/bin/python" -m tests.endpoints.to_gguf examples/model "$directory/demo.gguf"
"$directory/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
