"""Two executors of one core each, as processes of their own: an engine each, kept for as long as the executor lives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.fakes.engine_python import write_engine_python
from tests.spark.delta_log import committed_files
from tests.spark.processes import SMALL_JVM, SMALL_SPARK, servers_of
from tests.spark.three_jobs import ROWS
from tests.waiting import wait_until

pytestmark = pytest.mark.long  # two minutes: a cluster of processes

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = (
    "--master local-cluster[2,1,2048] --conf spark.executor.memory=1g "
    "--conf spark.worker.resource.gpu.amount=2 --conf spark.worker.resource.gpu.discoveryScript={script} "
    "--conf spark.executor.resource.gpu.amount=2 --conf spark.task.resource.gpu.amount=1 "
    "--conf 'spark.executor.extraJavaOptions={java}' {small} pyspark-shell"
)
DISCOVERY = """#!/bin/sh
# The first worker that asks has other GPUs than the second.
if mkdir "$0.asked" 2>/dev/null; then addresses='"4", "5"'; else addresses='"6", "7"'; fi
echo "{\\"name\\": \\"gpu\\", \\"addresses\\": [$addresses]}"
"""


def test_two_executors_keep_their_engines_and_a_killed_one_costs_no_row(tmp_path: Path) -> None:
    engine_python = write_engine_python(tmp_path / "python")
    script = tmp_path / "discover"
    script.write_text(DISCOVERY)
    script.chmod(0o755)
    application = subprocess.run(
        [sys.executable, "-m", "tests.spark.three_jobs", str(tmp_path), engine_python],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYSPARK_SUBMIT_ARGS": CLUSTER.format(script=script, java=SMALL_JVM, small=SMALL_SPARK),
            "SPARK_WORKER_DIR": str(tmp_path / "work"),
            "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",  # nobody answers there
        },
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert application.returncode == 0, application.stderr[-4000:]
    first, second, third = (json.loads(line) for line in application.stdout.splitlines())
    assert (first["rows_out"], second["rows_out"], third["rows_out"]) == (ROWS, ROWS, ROWS)
    assert (first["engines"], second["engines"]) == (2, 2)
    assert len(first["servers"]) == 2
    assert second["servers"] == first["servers"], "the second job started engines of its own"
    assert sorted(first["gpus"]) == ["4,5", "6,7"], (
        "an engine takes all GPUs of its executor, not its first task's"
    )
    assert third["is_struck"], "an executor was to be killed with rows completed"
    assert third["rows_error"] == 0
    for number in range(3):
        # Read by pyarrow, past Delta: no file holds a row twice. A killed executor leaves files that are in no commit.
        output = tmp_path / f"out{number}"
        files = committed_files(output) if number == 2 else output
        ids = pq.read_table(files, columns=["id"]).column("id").to_pylist()
        assert sorted(ids) == list(range(ROWS))
    wait_until(lambda: not servers_of(engine_python), 120, "the engine servers end with the application")
    assert "MLflow at http://127.0.0.1:9 failed; the job continues without it" in application.stderr
    assert "each executor runs one task at a time" in application.stderr
