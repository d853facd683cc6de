"""An executor of 16 cores: how many of its tasks annotate at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import expected_text
from tests.spark.large_executor import ROWS
from tests.spark.processes import SMALL_JVM, SMALL_SPARK

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = (
    "--master local-cluster[1,16,1024] --conf spark.executor.memory=1g "
    f"--conf 'spark.executor.extraJavaOptions={SMALL_JVM}' {SMALL_SPARK} pyspark-shell"
)


@pytest.mark.long
def test_eight_tasks_annotate_at_once_on_sixteen_cores_without_spark_task_cpus(tmp_path: Path) -> None:
    application = subprocess.run(
        [
            *(sys.executable, "-m", "tests.spark.large_executor", str(tmp_path)),
            write_engine_python(tmp_path / "python"),
        ],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYSPARK_SUBMIT_ARGS": CLUSTER,
            "SPARK_WORKER_DIR": str(tmp_path / "work"),
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert application.returncode == 0, application.stderr[-4000:]
    report = json.loads(application.stdout.splitlines()[-1])
    assert report["slots"] == {"total": 8, "per_executor": 8}
    assert report["active_tasks"] == 8
    assert report["other_slots"] == 16, "other stages use all cores"
    texts = [expected_text(f"row {row}") for row in range(ROWS)]
    assert report["answers"] == sorted([text, text] for text in texts)
