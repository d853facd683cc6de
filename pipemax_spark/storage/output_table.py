"""An output table of either format, both of which answer the same questions, and which format a name stands for."""

from typing import TYPE_CHECKING, TypeAlias

from pipemax_spark.errors import JobError
from pipemax_spark.spark.session import is_connect
from pipemax_spark.storage.iceberg import IcebergTable
from pipemax_spark.storage.iceberg_catalog import is_in_iceberg_catalog
from pipemax_spark.storage.names import is_path, provider_of
from pipemax_spark.storage.tables import DeltaTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


OutputTable: TypeAlias = DeltaTable | IcebergTable
"""A table that may not exist yet."""


def open_table(spark: "SparkSession", name: str) -> OutputTable:
    """Return the table: an Iceberg table if it is one or will be made in an Iceberg catalog, else a Delta table."""
    from pyspark.errors import PySparkException

    if is_path(name):
        return DeltaTable(spark, name)
    try:
        provider = provider_of(spark, name)
        if is_connect(spark):
            _refuse_iceberg(name, provider)
            return DeltaTable(spark, name)
        is_iceberg = is_in_iceberg_catalog(spark, name) if provider is None else provider == "iceberg"
    except PySparkException:  # no name of a table: the first question to the table says so
        is_iceberg = False
    return IcebergTable(spark, name) if is_iceberg else DeltaTable(spark, name)


def _refuse_iceberg(name: str, provider: str | None) -> None:
    """Raise ``JobError`` for an Iceberg table: its commits are fenced in the driver's JVM."""
    if provider == "iceberg":
        raise JobError(
            f"{name!r} is an Iceberg table, which a job over Spark Connect neither reads nor writes; run it in a "
            "classic session, or take a Delta table"
        )
