"""Tell names of tables from paths, and look up a table by its name: how SQL writes it, and which format it has."""

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMATS_BY_SUFFIX = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
COMPRESSION_SUFFIXES = (".gz", ".bz2", ".zst", ".snappy", ".lz4", ".deflate")


def is_path(name: str) -> bool:
    """Tell whether the name is a path rather than a table's name.

    ``catalog.schema.table`` is a table whatever its last part is, because a table may be called ``csv``. Other names
    are paths if they end as a file does: ``rows.csv``, ``rows.csv.gz``, ``rows.2024.csv``.
    """
    if "/" in name or name.startswith("."):
        return True
    suffixes = PurePosixPath(name).suffixes[-2:]
    is_compressed = (
        len(suffixes) == 2 and suffixes[0] in FORMATS_BY_SUFFIX and suffixes[1] in COMPRESSION_SUFFIXES
    )
    parts = name.split(".")
    if len(parts) == 3 and all(re.fullmatch(r"\w+", part) and not part.isdigit() for part in parts):
        return is_compressed
    return is_compressed or PurePosixPath(name).suffix in (*FORMATS_BY_SUFFIX, ".gz")


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
    spark.catalog.refreshTable(sql_name(name))  # a session keeps tables, with credentials that may have ended
    rows = spark.sql(f"DESCRIBE TABLE EXTENDED {sql_name(name)}").collect()
    providers = [row["data_type"].lower() for row in rows if row["col_name"] == "Provider"]
    return providers[-1] if providers else ""  # a column may be called so, too; the table's own comes last
