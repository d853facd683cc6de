#!/usr/bin/env bash
# The demo job: tools/annotate_demo.sh BIN OUTPUT_DIR. Called by `make annotate`.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1 demo=$2
export PIPEMAX_LOG_DIR="$PWD/logs"
mkdir -p "$PIPEMAX_LOG_DIR" "$demo"
touch "$demo/.pipemax-demo" # `make clean` removes only what has this file
cat <<TEXT
Annotating 2,223 Debian packages with the section of the archive that each is in. The model has 4M parameters and knows
this one task: trained on other packages, it gives 82 % of the sections as Debian does ("truth"). It says nothing of how
well a model of your choice would answer, nor how fast. Logs: logs/
TEXT
# Spark's launcher and the JVM print their notices to standard error; the job reports on standard output.
PATH="$PWD/$bin:$PATH" spark-submit --master 'local[2]' jobs/annotate.py \
    --input examples/data/debian_packages.parquet --output "$demo/annotated" --id-columns package \
    --template 'Package: {package}\nSummary: {summary}\nDescription: {description}' \
    --model examples/model --engine conf/engines/demo.yaml --max-tokens 24 \
    --response-format examples/section.schema.json --gold-column section --logprobs \
    --summary "$demo/summary.json" 2>>"$PIPEMAX_LOG_DIR/spark-submit.log" ||
    { code=$?; echo "Spark's own output: logs/spark-submit.log and logs/spark.log"; exit $code; }
