"""Iceberg catalogs in local directories, for the environments of other Spark releases (``make test-versions``)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.storage.iceberg import IcebergTable
from tests.spark.conftest import Jobs

SCHEMA = "id long, run string"
_CATALOG = "org.apache.iceberg.spark.SparkCatalog"


@pytest.fixture(scope="session", params=["files", "sqlite"])
def catalog(request: pytest.FixtureRequest, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a catalog: of Hadoop's files, and of a database, which the lakes' catalogs are like."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    name = f"ice_{directory.name}"  # Spark keeps a catalog for as long as its session
    settings = {"": _CATALOG, ".warehouse": str(directory)}
    if request.param == "sqlite":
        settings |= {".type": "jdbc", ".uri": f"jdbc:sqlite:{directory}/catalog.db"}
    else:
        settings |= {".type": "hadoop"}
    for key, value in settings.items():
        spark.conf.set(f"spark.sql.catalog.{name}{key}", value)
    spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {name}.db")
    return name


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
