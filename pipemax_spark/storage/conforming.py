"""Give rows the shape of a table: struct fields by name, null where the rows lack one."""

from typing import TYPE_CHECKING

from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType


def conformed(column: "Column", kind: "DataType", wanted: "DataType") -> "Column":
    """Return the column as a value of type ``wanted``: struct fields by their names, null where one is missing.

    A Delta append does this by itself; a merge, and an append to Iceberg, do not.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import StructType

    if kind == wanted or not isinstance(kind, StructType) or not isinstance(wanted, StructType):
        return column
    known = {field.name: field.dataType for field in kind.fields}
    fields = [
        conformed(column[field.name], known[field.name], field.dataType).alias(field.name)
        if field.name in known
        else F.lit(None).cast(field.dataType).alias(field.name)
        for field in wanted.fields
    ]
    return F.when(column.isNotNull(), F.struct(*fields))


def conformed_rows(rows: "DataFrame", schema: "StructType") -> "DataFrame":
    """Return the rows with their structs in the shape that a table of this schema has; columns stay as they are."""
    from pyspark.sql import functions as F  # noqa: N812

    wanted = {field.name.lower(): field.dataType for field in schema.fields}
    columns = [
        conformed(F.col(quoted(field.name)), field.dataType, wanted[field.name.lower()]).alias(field.name)
        if field.name.lower() in wanted
        else F.col(quoted(field.name))
        for field in rows.schema.fields
    ]
    return rows.select(*columns)
