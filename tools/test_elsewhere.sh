#!/usr/bin/env bash
# The pure tests on machines unlike this one, one after the other: called by `make test-elsewhere`.
# tools/test_elsewhere.sh BIN PYTEST-ARGUMENTS. Ends with a table, and with status 1 if any was red.
# With DAY=N only one of the seven runs: N is any number, such as the day of the year.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
bin=$1
shift
logs=logs/elsewhere table="" status=0 busy=() number=0
mkdir -p "$logs"
trap '[ ${#busy[@]} = 0 ] || kill "${busy[@]}"' EXIT

turn() {  # Whether the next of the seven is to run.
    number=$((number + 1))
    [ -z "${DAY:-}" ] || [ $((10#$DAY % 7 + 1)) = $number ]
}

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
turn && run "with AMX" env PIPEMAX_TEST_AMX=1 "$bin/python" -m pytest -q -n 2 tests/unit/vllm_ext
cores=$(taskset -cp $$)
cores=${cores##*: }
turn && run "one core" taskset -c "${cores%%[,-]*}" "${tests[@]}"
turn && run "in Kolkata" env TZ=Asia/Kolkata "${tests[@]}"
turn && run "locale C" env LANG=C LC_ALL=C "${tests[@]}"
turn && run "without HOME" env -u HOME "${tests[@]}"
if ! turn; then :; elif [ "$(id -u)" = 0 ]; then
    # It reads all that root reads, for Pythons in root's home are common, and writes nothing of root's.
    run "another user" setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_read_search \
        --ambient-caps=+dac_read_search env HOME=/nonexistent "${tests[@]}"
else
    table+="another user     left out: only root can become one"$'\n'
fi
if turn; then
    for _ in $(seq "$(nproc)"); do
        timeout 3600 sh -c 'while :; do :; done' &  # an hour, should nothing end them
        busy+=($!)
    done
    run "busy cores" "${tests[@]}"
fi
printf '\n%s' "$table"
exit $status
