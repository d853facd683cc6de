#!/usr/bin/env bash
# Everything that one GPU can show, in one command, with tables of the results (Markdown):
#
#   tools/gpu_proof.sh [--python PYTHON] [--seconds S] [--out DIR] GROUP_OR_PART ...
#
#   correct:  tests           tests/gpu
#             parity          tokens of PipeMax and of stock vLLM, on one stage and on two (lab/gpu/parity.py)
#             link            sends next to prefetches (lab/gpu/link.py)
#             check-node      pipemax check-node, for four layers of LLaMA-2-70B
#   speed:    transfer        copy rates, overlap, breakdown of offload (lab/bench/transfer.py)
#             stage-of-eight  PipeMax and stock vLLM on one stage of eight (lab/gpu/stage_of_eight.py)
#             stage-of-two    the same on one stage of two, with and without waves (lab/gpu/stage_of_two.py)
#   by name:  tuning          limits of stock vLLM, changed and tuned while it runs (lab/gpu/tuning.py)
#
# All of it ends within S seconds (default 420): a part that would not fit is left out by name, one that takes longer is
# ended. DIR (default gpu-proof) gets each part's output, the figures as JSON, and summary.md. A part that cannot run
# here is skipped, and the summary says why. All but tests, link and transfer need vLLM.
#
# Exit status: 0 if every part that ran passed, 1 if one failed, 2 for wrong arguments, 3 if no part could run.
set -euo pipefail

python=python3
if [ "${1-}" = --python ]; then
    [ $# -ge 2 ] || { echo "--python needs a value" >&2; exit 2; }
    python=$2
    shift 2
fi
python=$(command -v "$python") || { echo "there is no such Python" >&2; exit 2; }
python=$(realpath -s "$python")
arguments=()
while [ $# -gt 0 ]; do
    if [ "$1" = --out ] && [ $# -ge 2 ]; then # a relative DIR is the caller's
        arguments+=(--out "$(realpath -m "$2")")
        shift 2
    else
        arguments+=("$1")
        shift
    fi
done
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/engine:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m lab.gpu.proof "${arguments[@]}"
