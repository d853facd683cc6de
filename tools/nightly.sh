#!/usr/bin/env bash
# One of seven slices of what is too long for `make test`: called by `make nightly`. tools/nightly.sh BIN DAY
# DAY is any number, such as the day of the year. A slice has 25 minutes. The last line says which it was.
# After 19 of them no test begins (tests/conftest.py): what was left comes early in one of the next two weeks.
# A slice has a part with engines of vLLM, which one worker runs, and a part through Spark for the other one.
# shellcheck disable=SC2010,SC2017,SC2086,SC2207 # the names of tests have no spaces, and a share is to be rounded down
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
bin=$1
day=$((10#${2:-$(date +%j)}))
slice=$((day % 7)) share="" then=() seconds=1140

spark() {  # The files of Spark's tests with these first letters, without those of slices 0 and 5.
    ls tests/spark/test_[$1]*.py | grep -vE 'test_(cluster|connect|connect_job|notebooks|two_environments|yarn)\.py|test_cascade_'
}

case $slice in
    0) name="endpoints; environments, cluster, Connect, notebooks, YARN; advisories" then=("$bin/python" tools/audit.py "$bin/uv")
        tests=(tests/endpoints tests/spark/test_two_environments.py
        tests/spark/test_cluster.py tests/spark/test_connect*.py tests/spark/test_notebooks.py tests/spark/test_yarn.py) ;;
    1) name="parity of other engines, and of waves; Spark A to G" tests=(tests/parity/test_parity.py
        tests/parity/test_waves.py $(spark a-g)) ;;
    2) name="engines: failed starts, images, pooling, replicas; Spark H to K" tests=(tests/engine $(spark h-k)) ;;
    3) name="parity over a GPU's path, FP8, the check of a node; Spark L to O; units" tests=(
        tests/parity/test_gpu_path.py tests/parity/test_fp8_kv.py tests/parity/test_node_check.py
        tests/serve tests/unit tests/property $(spark l-o)) ;;
    4) name="parity of other families; Spark P to S" tests=(tests/parity/test_families.py $(spark p-s)) ;;
    5) name="two kinds of engines with every load; Spark T to Z, phases of cascades" tests=(tests/parity/test_full.py
        $(spark t-z) tests/spark/test_cascade_*.py) ;;
    6) name="two kinds of engines with every load; struck jobs" seconds=800 tests=(tests/parity/test_full.py tests/spark/faults)
        then=("$bin/python" -m tests.spark.faults.random_kills --strikes 10 --seed "$day") ;;
esac
# Struck jobs ask faulty endpoints every second week.
[ "$slice" != 6 ] || [ $((day / 7 % 2)) = 0 ] || then+=(--endpoint)
# Of test_full's thirteen kinds two a night, and all of them in four weeks.
[ "$slice" -lt 5 ] || share=$(((day / 7 * 2 + slice - 5) % 7))
PIPEMAX_NIGHT_ENDS=$(($(date +%s) + seconds))
export PIPEMAX_NIGHT=$day PIPEMAX_NIGHT_ENDS PIPEMAX_KINDS=$share
begin=$SECONDS
timeout 1500 "$bin/python" -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder --durations 15 \
    -m "long or parity_full or hypothesis" "${tests[@]}"
status=$?
if [ ${#then[@]} != 0 ]; then
    timeout $((1500 - SECONDS + begin)) "${then[@]}" || status=$?
fi
echo "nightly slice $slice of 0 to 6 ($name): status $status after $((SECONDS - begin)) s"
exit $status
