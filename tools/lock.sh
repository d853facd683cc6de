#!/usr/bin/env bash
# Resolve the locks again: tools/lock.sh [UV]. The output names no index, so any mirror serves.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${1:-uv}
compile() {
    "$uv" pip compile pyproject.toml --python-version 3.11 --no-emit-index-url --no-header --no-annotate -q "$@"
}
compile --extra spark --extra mlflow --extra cpu --extra dev --override requirements/overrides.txt -o requirements/cpu.lock
# make test-python: what the pure tests need, with another Python.
"$uv" pip compile pyproject.toml --python-version 3.12 --no-emit-index-url --no-header --no-annotate -q \
    --extra spark --extra mlflow --extra engine --extra dev -o requirements/python-3.12.lock
# For Python 3.12, which Databricks' runtimes and Ubuntu 24.04 have: what vLLM asks for there serves Python 3.11 too.
"$uv" pip compile pyproject.toml --python-version 3.12 --no-emit-index-url --no-header --no-annotate -q \
    --extra gpu -o requirements/gpu.lock
compile --extra spark --extra mlflow --extra metrics -o requirements/spark.lock

# make test-versions: what tasks and driver need, the tools of the tests, and a pyarrow of that release's time.
compile_version() {  # compile_version SPARK DELTA PYARROW
    printf '%s\n' "pyspark==$1" "delta-spark==$2" "pyarrow==$3.*" 'pandas>=2.2,<3' \
        'cachetools>=5' 'hypothesis>=6.120' 'pydantic>=2.10' 'pytest>=8.3' 'pytest-timeout>=2.3' |
        compile - -o "requirements/versions-${1%.*}.lock"
}
compile_version 4.0.1 4.0.1 18
compile_version 4.1.1 4.3.1 21
compile_version 4.2.0 4.4.0 25

# make peers: what PipeMax is compared with, on the same vLLM and Spark. Ray asks for a package that has pre-releases only.
printf '%s\n' 'ray[llm]==2.60.0' 'distribatch==0.1.0a1' 'opentelemetry-exporter-prometheus>=0.60b0' |
    compile - --extra spark --extra cpu --constraint requirements/cpu.lock --override requirements/overrides.txt \
        --override requirements/peers-overrides.txt -o requirements/peers.lock
# make llama: a server that the nightly tests of endpoints ask, built from its sources, and what converts the demo model for it.
printf '%s\n' 'llama-cpp-python[server]==0.3.36' 'gguf==0.19.0' |
    "$uv" pip compile - --python-version 3.11 --no-emit-index-url --no-header --no-annotate -q -o requirements/llama.lock
# make test-versions: orchestrators and a server of S3, each in an environment of its own. dbt 1.12 needs a package that has no wheel.
for lock in 'airflow apache-airflow>=3.3,<4' 'dbt dbt-databricks>=1.10 dbt-core>=1.10,<1.12' \
    'moto moto[s3,server]>=5.2'; do
    # shellcheck disable=SC2086 # a name, and the packages
    set -- $lock
    name=$1
    shift
    printf '%s\n' "$@" | "$uv" pip compile - --python-version 3.11 --no-emit-index-url --no-header --no-annotate -q \
        --only-binary dbt-core -o "requirements/$name.lock"
done
wc -l requirements/*.lock
