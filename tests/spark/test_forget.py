"""``pipemax forget``: afterwards no file that a job has written holds the row."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from pipemax_spark.engines.stop import stop_engines
from pipemax_spark.errors import JobError, NewSpec
from pipemax_spark.request.prompts import PromptSource
from pipemax_spark.rows.workdir import work_base
from pipemax_spark.storage.tables import DeltaTable
from tests.spark.conftest import Jobs
from tests.spark.processes import SMALL_SPARK
from tests.spark.spark_work import set_to
from tests.spark.test_killed_job import kill_when, rows_in_spool, start_job

MARK = "kumquat-4711"
ROWS = [(f"{MARK} id", f"{MARK} text", "no"), *((f"id {i}", f"word {i}", "yes") for i in range(8))]
"""Few enough for a page to show them all."""
MORE = [(f"id {i}", f"word {i}", "yes") for i in range(8, 600)]
SCHEMA = "id string, text string, label string"
DAYS_AGO_S = 10 * 86_400


def files_with_mark(directory: Path) -> Iterator[str]:
    """The files that hold the mark, also within compressed Parquet."""
    for file in (file for file in directory.rglob("*") if file.is_file()):
        is_in = MARK.encode() in file.read_bytes()
        if not is_in and file.suffix == ".parquet" and file.stat().st_size > 0:
            with contextlib.suppress(pa.ArrowInvalid):  # a killed job was writing it
                is_in = MARK in str(pq.ParquetFile(file).read().to_pylist())
        if is_in:
            yield str(file.relative_to(directory))


def forget(run: Jobs, *arguments: str) -> str:
    """Run the command as a process of its own, and return what it printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from pipemax_spark.cli import pipemax; pipemax()", "forget"),
            *(
                "--output",
                run.output,
                "--id-columns",
                "id",
                "--log-dir",
                str(run.defaults.log_dir),
                *arguments,
            ),
        ],
        env={**os.environ, "PYSPARK_SUBMIT_ARGS": f"{SMALL_SPARK} pyspark-shell"},
        cwd=run.directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def with_event_log(directory: Path) -> dict[str, str]:
    """Settings of the environment with which Spark writes its events to ``directory``, uncompressed."""
    conf = Path(pyspark.__file__).parent / "conf"
    own = directory.parent / "conf"
    shutil.copytree(conf, own)
    directory.mkdir()
    lines = {"enabled": "true", "dir": directory.as_uri(), "compress": "false", "rolling.enabled": "false"}
    with (own / "spark-defaults.conf").open("a") as file:
        file.writelines(f"spark.eventLog.{name} {value}\n" for name, value in lines.items())
    return {"SPARK_CONF_DIR": str(own)}


def remove_history(run: Jobs) -> None:
    """VACUUM with no retention, and let Delta clean up its log, whose commits are made to look old."""
    table = DeltaTable(run.spark, run.output)
    kept = {
        "delta.logRetentionDuration": "interval 0 days",
        "delta.deletedFileRetentionDuration": "interval 0 seconds",
        "delta.checkpointInterval": "1",
    }
    for file in Path(run.output, "_delta_log").glob("*.*"):
        seconds = file.stat().st_mtime - DAYS_AGO_S
        os.utime(file, (seconds, seconds))
    table.set_properties(kept)
    with set_to(run.spark, {"spark.databricks.delta.retentionDurationCheck.enabled": "false"}):
        run.spark.sql(f"VACUUM {table.sql_name} RETAIN 0 HOURS").collect()
    table.set_properties({"a": "b"})


@pytest.mark.long
def test_after_it_no_file_holds_the_row_whatever_sink_it_was_in(
    tracked_run: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tracked_run
    events = run.directory / "events"
    for name, value in with_event_log(events).items():
        monkeypatch.setenv(name, value)
    run.write_input(ROWS, SCHEMA)
    generation = replace(run.defaults.generation, choice=("yes", "no"))
    run.run(id_columns=("id",), gold_column="label", generation=generation)
    stop_engines(run.spark, force=True)  # the next one is waited for
    # A cascade's closed epoch, and a run under another spec that was killed.
    table = DeltaTable(run.spark, run.output)
    work = f"{work_base(None, table.location())}/{table.table_id()}"
    epoch = Path(work, "cascade", "0123456789abcdef", "1")
    table.read().write.format("delta").save(str(epoch / "answers"))
    (epoch / "closed").touch()
    run.write_input([*ROWS, *MORE], SCHEMA)
    held = run.directory / "held"
    held.touch()
    options = replace(run.defaults, source=PromptSource(template="Shout {text}"))
    fake = f"held_by: '{held}', held_row_s: 0.5"
    job = start_job(options, "--id-columns", "id", "--new-spec", commit_every="1h", fake=fake)
    kill_when(lambda: rows_in_spool(Path(run.output, "_pipemax")) > 0, job, run.defaults)
    Path(run.defaults.log_dir, "annotate.log").write_text(f"ids are not unique: id='{MARK} id'\nanother\n")
    shutil.rmtree(run.defaults.input)

    before = {*files_with_mark(run.directory)}
    for part in ("report.html", "mlflow/artifacts", "/rows/", "/cascade/", "annotate.log", "_delta_log"):
        assert any(part in file for file in before), (part, before)
    ids = run.directory / "ids.txt"
    ids.write_text(f"{MARK} id\n")
    counted = forget(run, "--ids", str(ids))
    assert "1 rows of" in counted
    assert "nothing was changed" in counted
    assert {*files_with_mark(run.directory)} == before | {"ids.txt"}
    done = forget(run, "--ids", str(ids), "--yes")
    assert "forgotten" in done
    ids.unlink()
    assert len(run.rows()) == len(ROWS) - 1
    assert run.spark.read.format("delta").load(str(epoch / "answers")).count() == len(ROWS)
    left = {*files_with_mark(run.directory)}
    assert all(file.startswith("out/") and "_pipemax" not in file for file in left), left
    remove_history(run)
    assert not [*files_with_mark(run.directory)]
    assert events.exists()
    assert [*events.iterdir()], "the jobs' events were logged"


@pytest.mark.long
def test_it_refuses_a_cascade_that_is_under_way_and_what_is_no_output(run: Jobs) -> None:
    from pipemax_spark.job.forget import ForgetOptions
    from pipemax_spark.job.forget import forget as forget_rows

    def forgotten(output: str = run.output, **changes: Any) -> int:
        options = ForgetOptions(**{"output": output, "id_columns": ("id",), "where": "id = 1"} | changes)
        with run.terminal() as terminal:
            return forget_rows(run.spark, options, terminal)

    run.write_input([(1, "one"), (2, "two")])
    with pytest.raises(JobError, match="is not the output of a job"):
        forgotten()
    run.run(id_columns=("id",))
    with pytest.raises(JobError, match="is not a condition on the output"):
        forgotten(where="no_column = 1")
    ids = run.directory / "ids"
    ids.write_text("1\none\n")
    with pytest.raises(JobError, match="1 ids that are no values of id bigint"):
        forgotten(where=None, ids=str(ids))
    table = DeltaTable(run.spark, run.output)
    epoch = f"{work_base(None, table.location())}/{table.table_id()}/cascade/0123456789abcdef/1"
    table.read().write.format("delta").save(f"{epoch}/rows")
    with pytest.raises(JobError, match="a cascade over these rows is under way"):
        forgotten(is_confirmed=True)
    Path(epoch, "closed").touch()
    run.run(id_columns=("id",), new_spec=NewSpec.STACK, source=PromptSource(template="Shout {text}"))
    assert forgotten(is_confirmed=True) == 2
    assert [row["id"] for row in run.rows()] == [2, 2]
    assert (
        json.loads(Path(run.directory, "runs").glob("*/summary.json").__next__().read_text())["rows_out"] == 2
    )
