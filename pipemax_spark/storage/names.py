"""Look up a table by its name: how SQL writes it, and which format the table has."""

from typing import TYPE_CHECKING

from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def sql_name(name: str) -> str:
    """Return a table's name for SQL; one that is quoted stays as it is."""
    return name if "`" in name else ".".join(quoted(part) for part in name.split("."))


def exists(spark: "SparkSession", name: str) -> bool:
    """Tell whether there is a table or a view with this name."""
    from pyspark.errors import UnsupportedOperationException

    try:
        return spark.catalog.tableExists(name)
    except UnsupportedOperationException:  # the catalog has no such table, and knows no views
        return False


def provider_of(spark: "SparkSession", name: str) -> str | None:
    """Return the format of the table with this name, in lower case; empty for a view, None if there is neither."""
    if not exists(spark, name):
        return None
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {sql_name(name)}").collect()
    providers = [row["data_type"].lower() for row in rows if row["col_name"] == "Provider"]
    return providers[-1] if providers else ""  # a column may be called so, too; the table's own comes last
