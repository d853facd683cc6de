"""Tell the Arrow type in which a task sees a column."""

import inspect
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipemax_spark.errors import JobError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


def arrow_type(kind: "DataType") -> pa.DataType:
    """Return the type's Arrow type, with UTC as the time zone of timestamps. Raise ``JobError`` if there is none."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_type

    # Spark 4.2 asks for the time zone; earlier versions have no such argument.
    zone: dict[str, Any] = (
        {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_type).parameters else {}
    )
    try:
        return to_arrow_type(kind, **zone)
    except PySparkException as error:
        raise JobError(f"type {kind.simpleString()} cannot be passed to Python") from error
