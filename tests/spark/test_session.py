"""``get_session``: what it sets, and what it leaves as it was told."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.spark.session import _check_user
from tests.spark.processes import SMALL_JVM

SETTING = "spark.databricks.delta.snapshotPartitions"
SHOW = f"""
from pathlib import Path
from pipemax_spark.spark.session import get_session
with_delta = get_session("one machine", log_dir=Path())
print("partitions:", with_delta.conf.get("{SETTING}"))
print("rows:", with_delta.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch"))
print("extensions:", with_delta.conf.get("spark.sql.extensions"))
(file := Path("Größe").absolute() / "ä.txt").parent.mkdir()
file.write_text("one")
print("lines:", with_delta.read.text(str(file)).count())
"""


OWN = "--conf spark.sql.execution.arrow.maxRecordsPerBatch=77 --conf spark.sql.extensions=own.Extension"


@pytest.mark.long  # a process
def test_a_session_on_one_machine_reads_a_log_in_few_tasks_keeps_what_the_user_sets_and_reads_umlauts(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        cwd=tmp_path,
        env={
            **os.environ,
            "LC_ALL": "C",
            "PYSPARK_SUBMIT_ARGS": f"--driver-java-options '{SMALL_JVM}' {OWN} pyspark-shell",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "partitions: 4" in done.stdout, done.stderr
    assert "rows: 77" in done.stdout
    assert "lines: 1" in done.stdout, "a path that is no ASCII, under the locale C"
    assert "extensions: own.Extension,io.delta." in done.stdout


def test_a_user_without_an_entry_in_passwd_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1_234_567)
    with pytest.raises(JobError, match=r"the user id 1234567 has no entry in /etc/passwd.*add one"):
        _check_user()


def test_settings_of_the_user_are_kept(spark: Any) -> None:
    assert spark.conf.get(SETTING) == "1"  # of SMALL_SPARK
