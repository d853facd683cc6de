"""``get_session``: what it sets, and what it leaves as it was told."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.spark.processes import SMALL_JVM

SETTING = "spark.databricks.delta.snapshotPartitions"
SHOW = f"""
from pathlib import Path
from pipemax_spark.spark_session import get_session
with_delta = get_session("one machine", log_dir=Path())
print("partitions:", with_delta.conf.get("{SETTING}"))
print("rows:", with_delta.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch"))
print("extensions:", with_delta.conf.get("spark.sql.extensions"))
"""


OWN = "--conf spark.sql.execution.arrow.maxRecordsPerBatch=77 --conf spark.sql.extensions=own.Extension"


def test_on_one_machine_delta_reads_a_log_in_few_tasks_and_what_the_user_sets_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        cwd=tmp_path,
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": f"--driver-java-options '{SMALL_JVM}' {OWN} pyspark-shell"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "partitions: 4" in done.stdout, done.stderr
    assert "rows: 77" in done.stdout
    assert "extensions: own.Extension,io.delta." in done.stdout


def test_settings_of_the_user_are_kept(spark: Any) -> None:
    assert spark.conf.get(SETTING) == "1"  # of SMALL_SPARK
