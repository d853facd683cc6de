#!/usr/bin/env bash
# The tests of the UDF, of annotate() and of the job on each Spark of tools/make_versions.sh, with the engine's side in BIN,
# and those of Iceberg tables where Iceberg has a release for that Spark.
# tools/test_versions.sh BIN DIRECTORY [PYTEST ARGUMENTS]: ends with the first release that fails.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIPEMAX_TEST_ENGINE_PYTHON=$PWD/$1/python
repository=$PWD directory=$2
shift 2
# The tests without the packages next to them: what is imported is the wheel that each environment has.
ln -sfn "$repository/tests" "$directory/tests"
cd "$directory"
job=tests/spark/test_job.py
is_whole=
[ $# -gt 0 ] || is_whole=yes
[ $# -gt 0 ] || set -- tests/spark/test_udf.py tests/spark/test_functions.py tests/spark/test_annotate.py tests/spark/test_quality.py \
    $job::test_every_row_is_answered_once_and_a_rerun_does_only_what_is_new \
    tests/spark/test_retry_errors.py::test_only_error_rows_that_were_retried_leave_the_table_and_in_one_commit_with_their_outcome
for environment in "$PWD"/[0-9]*.[0-9]*; do
    "$environment/bin/python" - <<'PYTHON'
import pipemax_spark, pyarrow, pyspark
print(f"\nSpark {pyspark.__version__}, pyarrow {pyarrow.__version__}: {pipemax_spark.__file__}", flush=True)
PYTHON
    env -u PYTHONPATH "$environment/bin/python" -m pytest -c "$repository/pyproject.toml" --rootdir "$repository" "$@"
    if [ -z "$is_whole" ] || ! ls "$environment"/ivy/jars/*iceberg-spark-runtime* >/dev/null 2>&1; then continue; fi
    env -u PYTHONPATH "$environment/bin/python" -m pytest -c "$repository/pyproject.toml" --rootdir "$repository" \
        -m iceberg tests/spark/iceberg
done
[ -z "$is_whole" ] || (cd "$repository" && "$PIPEMAX_TEST_ENGINE_PYTHON" -m pytest -m long tests/spark/test_orchestrators.py)
