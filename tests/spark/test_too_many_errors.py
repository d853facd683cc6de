"""Too many error rows end a job red, whoever reports them, and a rerun does not turn it green."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipemax_spark.errors import JobError, JobFailedError, OnError
from tests.fakes.engine_python import CUT_OFF, write_engine_python
from tests.spark.conftest import Jobs

MakeJobs = Callable[[], Jobs]


@pytest.fixture
def silent_engine_python(tmp_path: Path) -> str:
    """Of a server whose reports never reach the driver, as behind a firewall."""
    return write_engine_python(tmp_path / "silent", CUT_OFF)


def test_a_job_of_engine_errors_fails_although_no_report_reaches_the_driver(
    jobs: MakeJobs, silent_engine_python: str
) -> None:
    run = jobs()
    run.write_input([(i, "[[error]]") for i in range(1_100)])
    with pytest.raises(JobFailedError, match=r"1,100 of 1,100 rows failed, more than .*engine_error"):
        run.run(engine_python=silent_engine_python)
    with pytest.raises(JobFailedError, match=r"1,100 of 1,100 rows in .* failed, .*--retry-errors"):
        run.run(engine_python=silent_engine_python)
    assert "nothing new to do" in run.printed


@pytest.mark.long  # the first tests show the count
def test_a_table_of_null_prompts_fails_each_time_it_is_run(jobs: MakeJobs) -> None:
    run = jobs()
    run.write_input([(i, None) for i in range(1_500)])
    for _ in range(2):
        with pytest.raises(JobFailedError, match=r"rows (in .* )?failed, more than --max-error-rate 0\.5"):
            run.run(id_columns=("id",))
    summary = run.run(id_columns=("id",), max_error_rate=1.0)
    assert summary is not None
    assert summary.rows_skipped + summary.rows_out == 1_500
    with pytest.raises(
        JobFailedError, match=r"1,500 of 1,500 rows in .* failed, more than --max-error-rate 0\.5"
    ):
        run.run(id_columns=("id",))
    assert "nothing new to do" in run.printed


def test_on_error_fail_is_not_satisfied_with_error_rows_of_an_earlier_run(jobs: MakeJobs) -> None:
    run = jobs()
    run.write_input([(1, "fine"), (2, None)])
    run.run(id_columns=("id",))
    run.write_input([(1, "fine"), (2, None), (3, "fine too")])
    with pytest.raises(JobFailedError, match=r"a row in .* failed with empty_prompt.*--retry-errors"):
        run.run(id_columns=("id",), on_error=OnError.FAIL)
    assert " ".join(run.printed.split()).count("Rows out 1 ") == 1, "the report is printed all the same"


def test_a_collector_port_that_is_taken_is_refused(jobs: MakeJobs) -> None:
    import socket

    run = jobs()
    run.write_input([(1, "a")])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"cannot listen .* --collector-port {port}"):
            run.run(collector_port=port)
    summary = run.run(collector_port=port)
    assert summary is not None
    assert summary.engines == 1, "the engine has reported there"
