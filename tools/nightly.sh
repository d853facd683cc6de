#!/usr/bin/env bash
# One of seven slices of what is too long for `make test`: called by `make nightly`. tools/nightly.sh BIN DAY
# DAY is any number, such as the day of the year. A slice has 25 minutes. The last line says which it was.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$1
slice=$((10#${2:-$(date +%j)} % 7))
case $slice in
    0) name="environments, cluster, Connect, notebooks" tests=(tests/spark/test_two_environments.py
        tests/spark/test_cluster.py tests/spark/test_connect.py tests/spark/test_notebooks.py tests/spark/test_yarn.py) ;;
    1) name="parity of other engines" tests=(tests/parity/test_parity.py) ;;
    2) name="engines: failed starts, images, pooling, replicas" tests=(tests/engine) ;;
    3) name="parity over a GPU's path, FP8, the check of a node" tests=(tests/parity/test_gpu_path.py
        tests/parity/test_fp8_kv.py tests/parity/test_node_check.py) ;;
    4) name="parity of other families" tests=(tests/parity/test_families.py) ;;
    5) name="long jobs, A to I" tests=(tests/serve tests/unit tests/spark/test_[a-i]*.py) ;;
    6) name="long jobs, J to Z" tests=(tests/spark/faults tests/spark/test_[j-z]*.py) ;;
esac
begin=$SECONDS
timeout 1500 "$bin/python" -m pytest -q -n 2 --dist loadscope --no-loadscope-reorder -m "long or parity_full" "${tests[@]}"
status=$?
echo "nightly slice $slice of 0 to 6 ($name): status $status after $((SECONDS - begin)) s"
exit $status
