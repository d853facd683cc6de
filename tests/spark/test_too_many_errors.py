"""Too many error rows end a job red, whoever reports them, and a rerun does not turn it green."""

import re
import shutil
from pathlib import Path

import pytest
from pyspark.sql import functions as F  # noqa: N812

from pipemax_spark.errors import JobError, JobFailedError, OnError
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.tables import DeltaTable
from tests.fakes.engine_python import CUT_OFF, write_engine_python
from tests.spark.conftest import Jobs


@pytest.fixture
def silent_engine_python(tmp_path: Path) -> str:
    """Of a server whose reports never reach the driver, as behind a firewall."""
    return write_engine_python(tmp_path / "silent", CUT_OFF)


@pytest.mark.long  # two jobs
def test_a_job_of_engine_errors_fails_although_no_report_reaches_the_driver(
    run: Jobs, silent_engine_python: str
) -> None:
    run.write_input([(i, "[[error]]") for i in range(1_100)])
    with pytest.raises(JobFailedError, match=r"1,100 of 1,100 rows failed, more than .*engine_error"):
        run.run(engine_python=silent_engine_python)
    with pytest.raises(JobFailedError, match=r"1,100 of 1,100 rows in .* failed, .*--retry-errors"):
        run.run(engine_python=silent_engine_python)
    assert "nothing new to do" in run.printed


@pytest.mark.long
def test_a_run_is_judged_by_its_own_share_and_a_rerun_judges_the_last_one_again(run: Jobs) -> None:
    """The record is the table itself: between the runs, the driver's and the work directories go."""

    def ends(rows: int) -> str | None:
        """Run the job on a table of so many rows, whose last 300 have no prompt; return why it fails."""
        run.write_input([(i, None if i >= 2_000 else f"row {i % 50}") for i in range(rows)])
        for directory in (run.directory / "runs", Path(run.output, "_pipemax")):
            shutil.rmtree(directory, ignore_errors=True)
        try:
            run.run(id_columns=("id",))
        except JobFailedError as error:
            return str(error)
        return None

    assert ends(2_000) is None
    bad_night = ends(2_300)
    assert bad_night is not None
    assert bad_night.startswith(
        "300 of 300 rows failed, more than --max-error-rate 0.5 allows. empty_prompt: 300"
    )
    again = ends(2_300)
    assert "nothing new to do" in run.printed
    assert re.match(r"300 of 300 rows in \S+, written by run \S+, failed, .*--retry-errors", again)


@pytest.mark.long  # a variant of the share
def test_rows_that_a_run_has_recovered_from_a_dead_one_count_as_its_own(run: Jobs) -> None:
    """They are committed by this run, and name the dead one."""
    run.write_input([(i, f"row {i}") for i in range(40)])
    run.run(id_columns=("id",), where="id < 10")
    table = DeltaTable(run.spark, run.output)
    done = table.read()
    rows = run.spark.range(10, 40).crossJoin(done.limit(1).drop("id")).select(*done.columns)
    failed = F.struct(F.lit("engine_error").alias("code"), F.lit("refused").alias("message"))
    annotation = F.col("annotation").withField("run_id", F.lit("19990101T000000-dead"))
    rows = rows.withColumn("annotation", annotation.withField("error", failed))
    claim = Claim.take(table, done.first()["annotation"]["run_id"])
    table.append(rows, claim.recovery(0, dead_run_id="19990101T000000-dead"))
    with pytest.raises(
        JobFailedError, match=r"30 of 30 rows in \S+, written by run 19990101T000000-dead, failed"
    ):
        run.run(id_columns=("id",))
    assert "nothing new to do" in run.printed


@pytest.mark.long  # a variant of the share
def test_on_error_fail_is_not_satisfied_with_error_rows_of_an_earlier_run(run: Jobs) -> None:
    run.write_input([(1, "fine"), (2, None)])
    run.run(id_columns=("id",))
    run.write_input([(1, "fine"), (2, None), (3, "fine too")])
    with pytest.raises(JobFailedError, match=r"a row in .* failed with empty_prompt.*--retry-errors"):
        run.run(id_columns=("id",), on_error=OnError.FAIL)
    assert " ".join(run.printed.split()).count("Done 1 row in ") == 1, "the report is printed all the same"


@pytest.mark.long  # a whole job after the refusal
def test_a_collector_port_that_is_taken_is_refused(run: Jobs) -> None:
    import socket

    run.write_input([(1, "a")])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"cannot listen .* --collector-port {port}"):
            run.run(collector_port=port)
    summary = run.run(collector_port=port)
    assert summary.engines == 1, "the engine has reported there"
