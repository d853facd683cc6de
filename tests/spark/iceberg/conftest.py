"""Iceberg catalogs in local directories, for the environments of other Spark releases (``make test-versions``)."""

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.storage.iceberg import IcebergTable
from tests.spark.conftest import Jobs
from tests.waiting import wait_until

REST_SERVER = Path(__file__).resolve().parents[3] / ".venv-versions" / "rest-catalog"
SCHEMA = "id long, run string"
_CATALOG = "org.apache.iceberg.spark.SparkCatalog"


@pytest.fixture(scope="session", params=["files", "sqlite", "rest"])
def catalog(
    request: pytest.FixtureRequest, spark: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The name of a catalog: of Hadoop's files, of a database, and of a server, which the lakes' catalogs are like."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    name = f"ice_{directory.name}"  # Spark keeps a catalog for as long as its session
    settings = {"": _CATALOG, ".warehouse": str(directory)}
    with ExitStack() as stack:
        match request.param:
            case "sqlite":
                settings |= {".type": "jdbc", ".uri": f"jdbc:sqlite:{directory}/catalog.db"}
            case "rest":
                settings |= {".type": "rest", ".uri": stack.enter_context(rest_server(directory))}
            case _:
                settings |= {".type": "hadoop"}
        for key, value in settings.items():
            spark.conf.set(f"spark.sql.catalog.{name}{key}", value)
        spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {name}.db")
        yield name


@contextmanager
def rest_server(directory: Path, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """Start Iceberg's own REST server over a database in this directory; yield its address."""
    if not (REST_SERVER / "ready").exists():
        pytest.skip(f"{REST_SERVER} is made by make test-versions")
    port = free_port()
    environ = {
        **os.environ,
        "CATALOG_WAREHOUSE": str(directory),
        "CATALOG_URI": f"jdbc:sqlite:{directory}/catalog.db",
        "CATALOG_REST_PORT": str(port),
        **(settings or {}),
    }
    command = ["java", "-cp", f"{REST_SERVER}/*", "org.apache.iceberg.rest.RESTCatalogServer"]
    with serving(command, port, directory / "server.log", env=environ) as address:
        yield address


@contextmanager
def serving(command: Sequence[Any], port: int, log_file: Path, **options: Any) -> Iterator[str]:
    """Start a server that listens at this port; yield its address. ``options`` are those of ``Popen``."""
    with log_file.open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, **options)
    try:
        wait_until(lambda: listens(port) or server.poll() is not None, 120, f"{command[0]} listens")
        assert server.poll() is None, log_file.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def name(catalog: str, spark: Any) -> Iterator[str]:
    """The name of a table that does not exist yet."""
    table = f"{catalog}.db.answers"
    yield table
    spark.sql(f"DROP TABLE IF EXISTS {table}")


@pytest.fixture
def table(spark: Any, name: str) -> IcebergTable:
    made = IcebergTable(spark, name)
    made.create(spark.createDataFrame([], SCHEMA).schema)
    return made


class IcebergJobs(Jobs):
    """Jobs whose output is an Iceberg table."""

    def __init__(self, jobs: Jobs, output: str) -> None:
        self.spark, self.directory, self.output, self.printed = jobs.spark, jobs.directory, output, ""
        self.defaults = replace(jobs.defaults, output=output)

    def rows(self) -> list[dict[str, Any]]:
        rows = IcebergTable(self.spark, self.output).read().collect()
        return [row.asDict(recursive=True) for row in rows]


@pytest.fixture
def run(run: Jobs, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IcebergJobs:
    monkeypatch.chdir(tmp_path)  # a job whose output has no path keeps its records in the working directory
    return IcebergJobs(run, name)
