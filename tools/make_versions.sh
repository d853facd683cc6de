#!/usr/bin/env bash
# Thin environments for other Spark releases, one for each requirements/versions-*.lock, and for orchestrators and moto's
# S3: called by `make test-versions`.
# tools/make_versions.sh BIN DIRECTORY: with uv and hatchling in BIN; safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/$1
mkdir -p "$2"
directory=$(cd "$2" && pwd)

rm -f "$directory"/dist/pipemax_spark-*.whl
"$bin/python" -m hatchling build -t wheel -d "$directory/dist" >/dev/null 2>&1
for lock in requirements/versions-*.lock; do
    name=$(basename "$lock" .lock)
    environment=$directory/${name#versions-}
    echo "$environment: from $lock"
    [ -x "$environment/bin/python" ] || "$bin/uv" venv -q --python "$bin/python" "$environment"
    "$bin/uv" pip sync -q --python "$environment/bin/python" "$lock"
    "$bin/uv" pip install -q --no-deps --python "$environment/bin/python" "$directory"/dist/pipemax_spark-*.whl
    [ "$environment/ready" -nt tools/configure_spark.py ] ||
        "$environment/bin/python" tools/configure_spark.py --iceberg >"$environment/jars.log" 2>&1 ||
        { tail -n 20 "$environment/jars.log"; exit 1; }
    touch "$environment/ready"
done
for name in airflow dbt moto; do
    environment=$directory/$name
    echo "$environment: from requirements/$name.lock"
    [ -x "$environment/bin/python" ] || "$bin/uv" venv -q --python "$bin/python" "$environment"
    "$bin/uv" pip sync -q --python "$environment/bin/python" "requirements/$name.lock"
done
echo "$directory/rest-catalog: Iceberg's REST server"
"$bin/python" tools/make_rest_catalog.py "$directory/rest-catalog" >"$directory/rest-catalog.log" 2>&1 ||
    { tail -n 20 "$directory/rest-catalog.log"; exit 1; }
