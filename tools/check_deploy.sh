#!/usr/bin/env bash
# Build the images of deploy/ over a plain Debian 12, or follow the README's commands in one, and say how long each step took:
# tools/check_deploy.sh images|readme [PYTHON]
# Needs root, mmdebstrap and buildah (Debian has both), `make wheel`, and 45 GB of disk. PYTHON has PySpark (.venv/bin/python).
# images: Debian stands in for CUDA's base image, and PySpark's files for Spark's. So it does not check a GPU, nvcc,
#   Ubuntu 24.04 with its Python 3.12, nor the entrypoint of Spark's image.
# readme: "Two commands" without `make test`, and "Install", each line in an empty environment, as a user without root.
# shellcheck disable=SC2016 # what stands in single quotes is for the shells in the containers
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?images or readme} python=${2:-.venv/bin/python}
work=$(mktemp -d "${TMPDIR:-/tmp}/check-deploy.XXXXXX")
image() { buildah --root "$work/store" --runroot "$work/run" --storage-driver overlay "$@"; }
clean_up() { image rm --all >/dev/null; image rmi --all --force >/dev/null; rm -rf "$work"; }
trap clean_up EXIT

step() {  # step TEXT COMMAND...
    local text=$1 start=$SECONDS
    shift
    "$@" >"$work/log" 2>&1 & # not "$@" || …, in which a function goes on after a command that fails
    wait $! || { tail -n 40 "$work/log"; echo "failed after $((SECONDS - start)) s: $text"; exit 1; }
    echo "$((SECONDS - start)) s: $text"
}

debian() {  # debian TAG: Debian 12, with this machine's certificates
    local container bundle=/etc/ssl/certs/ca-certificates.crt
    container=$(image from scratch)
    mmdebstrap --variant=minbase --include=ca-certificates --format=directory \
        --customize-hook='copy-in /usr/local/share/ca-certificates /usr/local/share' \
        --customize-hook='chroot "$1" update-ca-certificates' bookworm "$(image mount "$container")"
    image config --env PIP_CERT=$bundle --env SSL_CERT_FILE=$bundle "$container"
    image commit --rm "$container" "$1"
}

spark() {  # spark TAG: what apache/spark's images have in /opt, of PySpark's files
    local container pyspark
    pyspark=$("$python" -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent)')
    printf '#!/bin/sh\nexec "$@"\n' >"$work/entrypoint.sh"
    container=$(image from scratch)
    for folder in bin data examples jars sbin; do image copy "$container" "$pyspark/$folder" "/opt/spark/$folder"; done
    image copy "$container" "$pyspark/python/lib" /opt/spark/python/lib
    image copy "$container" "$pyspark" /opt/spark/python/pyspark
    image copy --chmod 755 "$container" "$work/entrypoint.sh" /opt/entrypoint.sh
    image copy "$container" "$work/entrypoint.sh" /opt/decom.sh
    image commit --rm "$container" "$1"
}

build() {  # build DOCKERFILE TAG
    image build --isolation chroot --pull-never --format docker --file "$1" --tag "$2" .
}

default() { sed -n "s/^ARG $2=//p" "deploy/$1.Dockerfile"; }  # default DOCKERFILE ARGUMENT

in_container() {  # in_container CONTAINER SHELL-COMMAND [OPTION...]: as the image's user
    local container=$1 command=$2
    shift 2
    # Spark looks its host name up.
    image run --isolation chroot --hostname localhost "$@" "$container" -- bash -euo pipefail -c "$command"
}

check_images() {
    local engine spark submit
    local no_caches='[ -z "$(ls -A /var/lib/apt/lists; ls -d /var/cache/apt/archives/*.deb /root/.cache /tmp/ivy)" ]'
    engine=$(default spark ENGINE_IMAGE)
    step "Debian in place of $(default engine CUDA_IMAGE)" debian "$(default engine CUDA_IMAGE)"
    step "deploy/engine.Dockerfile" build deploy/engine.Dockerfile "$engine"
    engine=$(image from --pull-never "$engine")
    step "its user is not root, has a home directory and cannot change the environment" in_container "$engine" \
        '[ "$(id -u)" = 185 ] && touch ~/file && [ ! -w /opt/pipemax/engine/bin ]'
    step "it has no package lists, no downloaded packages and no pip cache" in_container "$engine" "$no_caches" --user 0
    step "pipemax doctor finds vLLM and no GPU" in_container "$engine" \
        'pipemax doctor >doctor; cat doctor; [ "$(grep -cE "GPUs +none|vLLM +0" doctor)" = 2 ]'
    step "the engine server starts as far as its --help" in_container "$engine" 'python -m pipemax.serve --help'

    step "PySpark's files in place of $(default spark SPARK_IMAGE)" spark "$(default spark SPARK_IMAGE)"
    step "deploy/spark.Dockerfile" build deploy/spark.Dockerfile pipemax-spark
    spark=$(image from --pull-never pipemax-spark)
    step "its user is not root" in_container "$spark" '[ "$(id -u)" = 185 ] && touch file'
    step "it has none of these, and no Ivy cache" in_container "$spark" "$no_caches" --user 0
    submit="spark-submit --master local[2] --conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension"
    submit+=" --conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog"
    echo 'from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
spark.range(3).write.format("delta").save("table")
assert spark.read.format("delta").load("table").count() == 3' >"$work/table.py"
    step "Spark writes and reads a Delta table" in_container "$spark" "$submit /tmp/table.py" \
        --volume "$work/table.py:/tmp/table.py:ro"
    step "the job's dry run reads a table and counts its tokens" in_container "$spark" \
        "$submit /opt/pipemax/jobs/annotate.py --input /examples/data/debian_packages.parquet --output labelled \
            --id-columns package --template '{summary}' --model /examples/model \
            --engine-python /opt/pipemax/engine/bin/python --dry-run" --volume "$PWD/examples:/examples:ro"
}

commands() {  # commands SECTION: the README's commands under this title
    sed -n "/^## $1\$/,/^## /p" README.md | sed -n 's/^    //p' | sed 's/ *#.*//'
}

check_readme() {
    local container command
    step "a plain Debian 12" debian plain-debian
    container=$(image from --pull-never plain-debian)
    step "what docs/quickstart.md has installed" in_container "$container" 'apt-get update
        apt-get install --yes --no-install-recommends g++ libnuma1 make openjdk-17-jre-headless python3-dev python3-venv
        useradd --create-home reader'
    mkdir "$work/checkout"
    git archive HEAD | tar --extract --directory "$work/checkout"
    image copy --chown reader:reader "$container" "$work/checkout" /home/reader/pipemax >/dev/null
    image config --user reader --workingdir /home/reader/pipemax "$container"
    while read -r command; do
        case $command in
            "make test") ;;
            make*) step "$command" in_container "$container" "$command" </dev/null ;;
            *) step "$command" in_container "$container" "python3 -m venv ~/empty && . ~/empty/bin/activate
                PATH=\$PATH:.venv/bin; $command && { pipemax doctor || true; } && rm -r ~/empty" </dev/null ;;
        esac
    done < <(commands "Two commands"; commands Install)
}
"check_$what"
