"""A Spark Connect server, and the calls that the tests make of it from a process of its own.

That process is a client only: a process with a classic session, such as pytest's, cannot have a Connect session too.
"""

import contextlib
import io
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipemax.wire import PACKAGE_VERSION
from pipemax_spark import annotate, annotate_table, compare_prompts, pipemax_udf, register
from pipemax_spark.spark import executor_call
from pipemax_spark.storage.executor_files import files_of
from tests.spark.processes import SMALL_SPARK
from tests.waiting import wait_until

SLOTS = 3
_SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"


@contextmanager
def connect_server(log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the address and the process of a server, whose Python workers have this process's PYTHONPATH."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [
        *(str(Path(sys.executable).with_name("spark-submit")), *shlex.split(SMALL_SPARK)),
        *("--master", f"local[{SLOTS}]", "--conf", f"spark.connect.grpc.binding.port={port}"),
        *("--class", _SERVER, "spark-internal"),
    ]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env=os.environ | {"PYSPARK_PYTHON": sys.executable, "PIPEMAX_LOG_DIR": str(log.parent)},
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: server.poll() is not None or _listens(port), 120, "the Connect server")
        assert server.poll() is None, log.read_text()
        yield f"sc://localhost:{port}", server
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), timeout=1).close()
    except OSError:
        return False
    return True


def open_session(address: str, directory: str | None = None) -> None:
    """Open this process's session; ``directory`` becomes the one in which it works."""
    from pyspark.sql import SparkSession

    if directory is not None:
        os.chdir(directory)
    SparkSession.builder.remote(address).getOrCreate()


def close_session() -> None:
    active_session().stop()


def active_session() -> Any:
    from pyspark.sql import SparkSession

    return SparkSession.active()


def words(spark: Any, num_rows: int) -> Any:
    return spark.range(num_rows, numPartitions=3).selectExpr("id", "concat('word ', id) AS text")


def annotated(spark: Any, num_rows: int, **options: Any) -> list[dict[str, Any]]:
    """The rows of ``annotate()``, in a session of either kind."""
    rows = annotate(words(spark, num_rows), **options).orderBy("id").collect()
    return [row.asDict(recursive=True) for row in rows]


def annotated_remotely(num_rows: int, **options: Any) -> list[dict[str, Any]]:
    return annotated(active_session(), num_rows, **options)


def udf_answers(num_rows: int, **options: Any) -> list[tuple[int, str]]:
    answer = pipemax_udf(**options)
    rows = words(active_session(), num_rows).select("id", answer("text").text).collect()
    return [tuple(row) for row in rows]


def sql_answers(query: str, num_rows: int, **options: Any) -> list[tuple[Any, ...]]:
    """The query's rows; it has the function ``ask`` and the view ``words``."""
    spark = active_session()
    register(spark, "ask", **options)
    words(spark, num_rows).createOrReplaceTempView("words")
    return [tuple(row) for row in spark.sql(query).collect()]


def annotate_with_python(python: str, **options: Any) -> None:
    """Call ``annotate()`` in a session whose tasks run with another Python."""
    spark = active_session()
    spark.conf.set("spark.sql.execution.pyspark.python", python)
    try:
        annotate(words(spark, 1), **options)
    finally:
        spark.conf.unset("spark.sql.execution.pyspark.python")


def annotate_as_version(version: str, **options: Any) -> None:
    """Call ``annotate()`` as a client whose package has this version."""
    executor_call.PACKAGE_VERSION = version
    try:
        annotate(words(active_session(), 1), **options)
    finally:
        executor_call.PACKAGE_VERSION = PACKAGE_VERSION


def run_sql(*statements: str) -> None:
    for statement in statements:
        active_session().sql(statement)


def write_table(path: str, num_rows: int, file_format: str = "delta") -> None:
    words(active_session(), num_rows).write.format(file_format).save(path)


def run_job(**options: Any) -> dict[str, Any]:
    """The summary of a job, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        summary = annotate_table(active_session(), **options)
    assert summary is not None
    return {**asdict(summary), "printed": printed.getvalue()}


def compare(**options: Any) -> None:
    compare_prompts(active_session(), **options)


def file_answers(directory: str, spark: Any = None) -> list[Any]:
    """What the files of a session of either kind answer to the same steps in a directory that does not exist."""
    files = files_of(spark or active_session())
    below, path = f"{directory}/a b", f"{directory}/a b/note.txt"
    answers: list[Any] = [files.exists(path), files.modified_ms(path), files.list(directory)]
    files.write_text(path, "zwölf")
    answers += [files.exists(path), files.read_text(path), files.modified_ms(path) is None]
    answers += [*files.list(directory), *files.list(below)]
    files.write_text(path, "two")
    files.delete_if_empty(below)
    answers += [files.read_text(path), files.qualified(path), files.qualified(f"file://{path}")]
    files.delete(path)
    files.delete(path)
    try:
        files.read_text(path)
    except FileNotFoundError as error:
        answers.append(str(error))
    files.delete_if_empty(below)
    files.write_text(path, "three")
    files.delete(directory)
    return [*answers, files.exists(below), files.exists(directory)]


def run_job_in_mlflow(store: str, **options: Any) -> tuple[str, str | None, str | None]:
    """The id of this process's run, that of the job's, and the id of the run that this names as its parent."""
    import mlflow

    mlflow.set_tracking_uri(store)
    with mlflow.start_run() as run:
        summary = run_job(**{**options, "mlflow_experiment": "pipemax"})
    job_run = mlflow.get_run(summary["mlflow_run_id"])
    return run.info.run_id, job_run.info.run_id, job_run.data.tags.get("mlflow.parentRunId")
