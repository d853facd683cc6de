#!/usr/bin/env bash
# The pure tests on machines unlike this one, one after the other: called by `make test-elsewhere`.
# tools/test_elsewhere.sh BIN PYTEST-ARGUMENTS. Ends with a table, and with status 1 if any was red.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$1
shift
logs=logs/elsewhere table="" status=0 busy=()
mkdir -p "$logs"
trap '[ ${#busy[@]} = 0 ] || kill "${busy[@]}"' EXIT

run() {  # NAME COMMAND...
    local name=$1 log begin=$SECONDS result
    log="$logs/${name// /-}.log"
    shift
    if "$@" >"$log" 2>&1; then result=green; else result=RED status=1; fi
    grep -E '^(FAILED|ERROR) ' "$log"
    table+=$(printf '%-16s %-6s %5d s  %s' "$name" "$result" $((SECONDS - begin)) "$(tail -n 1 "$log")")$'\n'
    echo "$name: $result, see $log"
}

tests=("$bin/python" -m pytest -q -n 2 "$@")
run "with AMX" env PIPEMAX_TEST_AMX=1 "$bin/python" -m pytest -q -n 2 tests/unit/vllm_ext
cores=$(taskset -cp $$)
cores=${cores##*: }
run "one core" taskset -c "${cores%%[,-]*}" "${tests[@]}"
run "in Kolkata" env TZ=Asia/Kolkata "${tests[@]}"
run "locale C" env LANG=C LC_ALL=C "${tests[@]}"
run "without HOME" env -u HOME "${tests[@]}"
if [ "$(id -u)" = 0 ]; then
    # It reads all that root reads, for Pythons in root's home are common, and writes nothing of root's.
    run "another user" setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_read_search \
        --ambient-caps=+dac_read_search env HOME=/nonexistent "${tests[@]}"
else
    table+="another user     left out: only root can become one"$'\n'
fi
for _ in $(seq "$(nproc)"); do
    timeout 3600 sh -c 'while :; do :; done' &  # an hour, should nothing end them
    busy+=($!)
done
run "busy cores" "${tests[@]}"
printf '\n%s' "$table"
exit $status
