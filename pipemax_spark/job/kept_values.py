"""Check, before the output is claimed, that it keeps the input's values as they are.

A row that the table stores with another value would not be found there again, so each run would annotate it once more.
"""

from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError
from pipemax_spark.job.fit import compared_columns
from pipemax_spark.job.job import JobCall
from pipemax_spark.request.kept_by_json import types_in
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


def check_types_kept(schema: "StructType") -> None:
    """Raise ``JobError`` for a column of nulls without a type, which no file keeps."""
    from pyspark.sql.types import NullType

    for field in schema.fields:
        if any(isinstance(kind, NullType) for kind in types_in(field.dataType)):
            raise JobError(
                f"column {field.name!r} of the input is of type {field.dataType.simpleString()}, which files cannot "
                "keep; cast it to another type, or leave it out"
            )


def check_values_kept(
    call: JobCall, rows: "DataFrame", schema: "StructType", id_columns: "Sequence[str]"
) -> None:
    """Raise ``JobError`` if the table would store a value of these rows as another one.

    ``schema`` has the columns that go to the output. Warn of empty values that become null if no row is matched by
    them. Reads the rows once if the table is partitioned by columns that do not keep all values.
    """
    from pyspark.sql import functions as F  # noqa: N812

    table, options = call.table, call.options
    changes = table.changed_values(schema) if table.exists() else []
    if not changes:
        return
    compared = {name.lower() for name in compared_columns(schema, id_columns, options)}
    kept = rows.select(*map(quoted, schema.names))
    counts = kept.agg(*(F.count_if(F.expr(change.condition)) for change in changes)).collect()[0]
    for change, count in zip(changes, counts, strict=True):
        if not count:
            continue
        facts = (
            f"output {table.name!r} is partitioned by the column {change.column!r}, of which {count:,} rows have "
            f"{change.values}, which is {change.stored} there"
        )
        if not change.become_null or change.column.lower() in compared:
            raise JobError(
                f"{facts}, so a rerun could not find these rows; replace the values, exclude the rows with --where, or "
                "name another output"
            )
        call.terminal.warn(facts)
