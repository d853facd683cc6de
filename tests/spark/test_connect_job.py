"""The job over Spark Connect: from a client without a JVM, against a server in a process of its own."""

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark import annotate_table
from pipemax_spark.errors import JobError, JobFailedError
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import expected_text, fake_config
from tests.spark import connect_client
from tests.spark.test_killed_job import rows_in_spool
from tests.waiting import wait_until

pytestmark = pytest.mark.long  # a server of Spark Connect

Server = tuple[str, Path]
"""Its address, and a directory in which its clients work."""
ROWS = 60


@pytest.fixture(scope="module")
def engine_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_engine_python(tmp_path_factory.mktemp("engine") / "python")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with connect_client.connect_server(log) as (address, _):
        yield address, tmp_path_factory.mktemp("client")


@contextmanager
def client_of(server: Server) -> Iterator[ProcessPoolExecutor]:
    """A client process, which has a session."""
    with ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=connect_client.open_session,
        initargs=(server[0], str(server[1])),
    ) as client:
        yield client


@pytest.fixture(scope="module")
def call(server: Server) -> Iterator[Callable[..., Any]]:
    """Calls a function in a client process."""
    with client_of(server) as client:
        yield lambda function, *args, **options: client.submit(function, *args, **options).result()


@pytest.fixture
def options(tmp_path: Path, engine_python: str, call: Callable[..., Any]) -> dict[str, Any]:
    call(connect_client.write_table, str(tmp_path / "in"), ROWS)
    return {
        "input": str(tmp_path / "in"),
        "output": str(tmp_path / "out"),
        "engine": fake_config(),
        "engine_python": engine_python,
        "template": "Say {text}",
        "max_tokens": 16,
        "id_columns": ["id"],
        "log_dir": str(tmp_path / "logs"),
        "mlflow_experiment": "",
    }


def ids(spark: Any, options: dict[str, Any]) -> Counter[int]:
    return Counter(row["id"] for row in spark.read.format("delta").load(options["output"]).collect())


def num_claims(options: dict[str, Any]) -> int:
    commits = Path(options["output"], "_delta_log").glob("*.json")
    return sum("pipemax claim" in commit.read_text() for commit in commits)


def test_a_job_commits_each_row_once_and_a_second_call_finds_nothing(
    call: Callable[..., Any], options: dict[str, Any], spark: Any
) -> None:
    summary = call(connect_client.run_job, **options)
    assert (summary["rows_out"], summary["complete"]) == (ROWS, True)
    rows = spark.read.format("delta").load(options["output"]).orderBy("id").collect()
    assert [(row["id"], row["annotation"]["text"]) for row in rows] == [
        (i, expected_text(f"Say word {i}", 16)) for i in range(ROWS)
    ]
    assert not Path(options["output"], "_pipemax").exists()
    again = call(connect_client.run_job, **options)
    assert (again["rows_out"], again["rows_skipped"], again["complete"]) == (0, ROWS, True)
    assert "nothing new to do" in again["printed"]


def test_what_a_killed_client_left_is_finished_by_the_next_and_each_row_is_there_once(
    server: Server, options: dict[str, Any], call: Callable[..., Any], spark: Any, tmp_path: Path
) -> None:
    num_rows, held = 600, tmp_path / "held"
    held.touch()
    call(connect_client.write_table, str(tmp_path / "many"), num_rows)
    options |= {"input": str(tmp_path / "many"), "engine": fake_config(held_by=str(held), held_row_s=0.5)}
    spooled = Path(options["output"], "_pipemax")
    with client_of(server) as client:
        process = client.submit(os.getpid).result()
        job = client.submit(connect_client.run_job, **options)
        wait_until(lambda: job.done() or rows_in_spool(spooled) > 0, 120, "a row")
        os.kill(process, signal.SIGKILL)
        with pytest.raises(BrokenProcessPool):
            job.result()
    # The server goes on with the dead client's Spark job, which may commit until the next claim, and not after it.
    held.unlink()
    summary = call(connect_client.run_job, **options)
    assert summary["complete"]
    assert summary["rows_out"] + summary["rows_skipped"] == num_rows
    assert ids(spark, options) == Counter(range(num_rows))


def test_a_claim_fences_off_a_clients_commit_that_is_under_way(
    server: Server, options: dict[str, Any], call: Callable[..., Any], spark: Any, tmp_path: Path
) -> None:
    held = tmp_path / "held"
    held.touch()
    # Two rows are two tasks, and leave a slot for the other client.
    options |= {"engine": fake_config(held_by=str(held), held_row_s=3_600.0), "limit": 2}
    with client_of(server) as client, client_of(server) as other:
        first = client.submit(connect_client.run_job, **options)
        begun = Path(options["output"], "_pipemax")
        wait_until(lambda: first.done() or any(begun.glob("*/*/chunks/0.json")), 120, "the first chunk")
        second = other.submit(connect_client.run_job, **options, work_dir=str(tmp_path / "elsewhere"))
        wait_until(lambda: second.done() or num_claims(options) == 12, 120, "the second job's claim")
        held.unlink()
        assert second.result()["rows_out"] == 2
        with pytest.raises(JobFailedError, match=r"was taken over by run \S+ while this run"):
            first.result()
    assert sorted(ids(spark, options).values()) == [1, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": "/no/such/table"},
        {"input": "no_such_table"},
        {"template": "Say {txt}"},
        {"id_columns": ["nr"]},
        {"where": "nr > 1"},
        {"model": "fake", "engine": {"model": "fake", "polcy": 1}},
    ],
    ids=lambda wrong: f"{[*wrong][-1]}-{[*wrong.values()][-1]}",
)
def test_a_wrong_call_gets_the_sentence_of_a_classic_session(
    call: Callable[..., Any], options: dict[str, Any], spark: Any, wrong: dict[str, Any]
) -> None:
    with pytest.raises(JobError) as over_connect:
        call(connect_client.run_job, **{**options, **wrong})
    with pytest.raises(JobError) as classic:
        annotate_table(spark, **{**options, **wrong})
    assert str(over_connect.value) == str(classic.value)
    assert not Path(options["output"]).exists()


def test_a_condition_with_other_rows_each_time_is_refused(
    call: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.raises(
        JobError, match=r"selects different rows each time it is evaluated, by \(rand\(\) > 0\.5\)"
    ):
        call(connect_client.run_job, **options, where="rand() > 0.5")


def test_a_row_that_fails_ends_the_job_that_is_to_fail_on_errors(
    call: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.raises(JobFailedError, match=r"engine_error.*the fake failed this row, as it was told"):
        call(connect_client.run_job, **{**options, "template": "{text} [[error]]", "on_error": "fail"})


def test_tables_have_names_in_the_servers_catalog(
    call: Callable[..., Any], options: dict[str, Any], spark: Any, tmp_path: Path
) -> None:
    call(
        connect_client.run_sql,
        f"CREATE DATABASE named LOCATION '{tmp_path}/named'",
        f"CREATE TABLE named.words USING delta AS SELECT * FROM delta.`{options['input']}`",
        f"CREATE VIEW named.some AS SELECT * FROM delta.`{options['input']}`",
    )
    named = {**options, "input": "named.words", "output": "named.answers"}
    assert call(connect_client.run_job, **named)["rows_out"] == ROWS
    assert call(connect_client.run_job, **named)["rows_skipped"] == ROWS
    assert ids(spark, {"output": str(tmp_path / "named" / "answers")}) == Counter(range(ROWS))
    with pytest.raises(JobError, match=r"input 'named\.some' is not a Delta table, and over Spark Connect"):
        call(connect_client.run_job, **{**named, "input": "named.some"})


def test_rows_that_fail_end_the_job_with_the_sentence_of_a_classic_session(
    call: Callable[..., Any], options: dict[str, Any], spark: Any, tmp_path: Path
) -> None:
    said = []
    for run in (
        lambda **given: call(connect_client.run_job, **given),
        lambda **given: annotate_table(spark, **given),
    ):
        output = str(tmp_path / f"out-{len(said)}")
        with pytest.raises(JobFailedError) as failed:
            run(**{**options, "output": output, "template": "{text} [[error]]"})
        said.append(str(failed.value).replace(output, "OUT"))
    assert "the fake failed this row" in said[0]
    assert said[0] == said[1]


def test_an_option_that_a_client_cannot_have_is_refused_by_its_name(
    call: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.raises(JobError, match="over Spark Connect the job has no incremental yet: it "):
        call(connect_client.run_job, **options, incremental=True)


def test_an_input_that_is_no_delta_table_is_refused(
    call: Callable[..., Any], options: dict[str, Any], tmp_path: Path
) -> None:
    call(connect_client.write_table, str(tmp_path / "plain"), 3, "parquet")
    with pytest.raises(
        JobError, match="holds no Delta table, and over Spark Connect the job reads nothing else"
    ):
        call(connect_client.run_job, **{**options, "input": str(tmp_path / "plain")})


def test_a_client_sees_files_as_the_driver_does(call: Callable[..., Any], spark: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "work")
    assert call(connect_client.file_answers, directory) == connect_client.file_answers(directory, spark)


def test_the_run_is_the_child_of_the_clients_mlflow_run(
    call: Callable[..., Any], options: dict[str, Any], tmp_path: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    parent, child, named = call(connect_client.run_job_in_mlflow, store, **options)
    assert named == parent
    assert child is not None
