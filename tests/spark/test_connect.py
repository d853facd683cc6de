"""``annotate()`` and the UDF over Spark Connect, and what is refused there."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.errors import JobError
from tests.fakes.engine_python import write_engine_python
from tests.fakes.settings import expected_text, fake_config
from tests.spark import connect_client
from tests.spark.processes import servers_of
from tests.waiting import wait_until

pytestmark = pytest.mark.long  # a server of Spark Connect

ROWS = 60
SCHEMA = {"type": "object", "properties": {"label": {"enum": ["a", "b"]}}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("connect")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with connect_client.connect_server(directory / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def call(server: tuple[str, Any]) -> Iterator[Callable[..., Any]]:
    """Calls a function in the client process, which has the session."""
    with ProcessPoolExecutor(
        max_workers=1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=connect_client.open_session,
        initargs=(server[0],),
    ) as client:
        yield lambda function, *args, **options: client.submit(function, *args, **options).result()


@pytest.fixture(scope="module")
def options(directory: Path) -> dict[str, Any]:
    engine_python = write_engine_python(directory / "python")
    return {"engine": fake_config(model="connect"), "engine_python": engine_python, "max_tokens": 16}


def test_annotate_returns_the_rows_that_a_classic_session_gets(
    call: Callable[..., Any], options: dict[str, Any], spark: Any, engine_python: str
) -> None:
    options = {**options, "template": "Say {text}", "response_format": SCHEMA, "max_tokens": 32}
    over_connect = call(connect_client.annotated_remotely, ROWS, **options)
    assert {row["annotation"]["parsed"]["label"] for row in over_connect} == {"a", "b"}
    classic = connect_client.annotated(spark, ROWS, **{**options, "engine_python": engine_python})
    for row in [*over_connect, *classic]:
        del row["annotation"]["run_id"], row["annotation"]["completed_at"]
    assert over_connect == classic


def test_the_udf_answers_in_a_dataframe_and_in_sql(call: Callable[..., Any], options: dict[str, Any]) -> None:
    expected = [(i, expected_text(f"word {i}", 16)) for i in range(ROWS)]
    assert call(connect_client.udf_answers, ROWS, **options) == expected
    query = "SELECT id, a.text FROM (SELECT id, ask(text) AS a FROM words) WHERE a.error IS NULL"
    assert call(connect_client.sql_answers, query, ROWS, **options) == expected


def test_a_call_that_resumes_takes_the_completions_of_the_call_before(
    call: Callable[..., Any], options: dict[str, Any], directory: Path
) -> None:
    options = {**options, "prompt_column": "text", "work_dir": str(directory / "work"), "resume": "nightly"}
    first = call(connect_client.annotated_remotely, ROWS, **options)
    second = call(connect_client.annotated_remotely, ROWS + 5, **options)
    assert [row["annotation"]["completed_at"] for row in first] == [
        row["annotation"]["completed_at"] for row in second[:ROWS]
    ]
    assert second[-1]["annotation"]["text"] == expected_text(f"word {ROWS + 4}", 16)
    partitions = [path.name for path in directory.glob("work/pipemax/annotate/nightly-*/of-*")]
    assert partitions == [f"of-{2 * connect_client.SLOTS}"], "two for each slot of the server"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"engine": {"model": "fake", "polcy": 1}}, "unknown field 'polcy'"),
        ({"work_dir": "oddfs://x/y"}, "work_dir='oddfs://x/y' cannot be written to"),
    ],
)
def test_a_wrong_call_is_refused_before_any_row(
    call: Callable[..., Any], options: dict[str, Any], wrong: dict[str, Any], told: str
) -> None:
    with pytest.raises(JobError, match=told):
        call(connect_client.annotated_remotely, 1, **{**options, "prompt_column": "text", **wrong})


def test_a_package_that_is_missing_on_the_server_is_named(
    call: Callable[..., Any], options: dict[str, Any], directory: Path
) -> None:
    bare = directory / "bare-python"
    packages = Path(pytest.__file__).parents[1]
    # Without site, the files that put this repository on the path are not read.
    bare.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    options = {**options, "prompt_column": "text", "max_tokens": 9}
    with pytest.raises(JobError, match="tasks has no module 'pipemax_spark'; install pipemax-spark"):
        call(connect_client.annotate_with_python, str(bare), **options)


def test_another_version_of_the_package_on_the_server_is_refused(
    call: Callable[..., Any], options: dict[str, Any]
) -> None:
    options = {**options, "prompt_column": "text", "max_tokens": 9}
    with pytest.raises(JobError, match=r"this side has 0\.0\.1; install the same version in both"):
        call(connect_client.annotate_as_version, "0.0.1", **options)


def test_what_needs_the_driver_refuses_a_connect_session_and_names_what_works(
    call: Callable[..., Any],
) -> None:
    with pytest.raises(JobError, match=r"Spark Connect session.*annotate_table\(\), annotate\(\)"):
        call(connect_client.compare, input="in", model="fake", templates=["{text}", "Say {text}"])


@pytest.mark.parametrize("variable", [{"SPARK_REMOTE": "sc://nowhere:1"}, {"SPARK_API_MODE": "connect"}])
def test_the_command_refuses_to_make_a_connect_session(variable: dict[str, str], tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-c", "from pipemax_spark.cli import main; main()"),
        *("--input", "in", "--output", str(tmp_path / "out"), "--model", "fake", "--prompt-column", "text"),
    ]
    ended = subprocess.run(
        command, env=os.environ | variable, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ended.returncode == 2
    assert "Spark Connect" in ended.stderr
    assert next(iter(variable)) in ended.stderr


def test_the_engine_outlives_its_client_and_ends_with_the_server(
    call: Callable[..., Any], options: dict[str, Any], server: tuple[str, subprocess.Popen[bytes]]
) -> None:
    call(connect_client.udf_answers, 1, **options)
    call(connect_client.close_session)
    assert servers_of(options["engine_python"]), "other clients use it"
    server[1].kill()
    wait_until(lambda: not servers_of(options["engine_python"]), 120, "the engine's end")
