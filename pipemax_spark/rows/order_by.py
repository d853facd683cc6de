"""Read ``--order-by``: which rows are annotated first, as the items of a SQL ORDER BY over the input's columns.

Spark's parser reads it. Nulls come last in either direction, because a row without a priority is no urgent one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError, first_line
from pipemax_spark.rows.volatile import VolatileQuery, Volatility

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_NULLS_FIRST = re.compile(r"\bnulls\s+first\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderKey:
    """One item of the order."""

    sql: str
    """The expression on the input's columns."""
    is_descending: bool

    @property
    def value(self) -> "Column":
        from pyspark.sql import functions as F  # noqa: N812

        return F.expr(self.sql)

    def sorting(self, column: "Column") -> "Column":
        """Return the sort expression for a column that holds the values of this item."""
        return column.desc_nulls_last() if self.is_descending else column.asc_nulls_last()


def order_of(spark: "SparkSession", order_by: str | None) -> list[OrderKey]:
    """Return the items of an order; none for None. Raise ``JobError`` for a text that is no order."""
    from pyspark.errors import PySparkException

    if order_by is None:
        return []
    if _NULLS_FIRST.search(order_by):
        raise JobError(f"--order-by {order_by!r}: nulls always come last; leave NULLS FIRST out")
    parser: Any = spark._jsparkSession.sessionState().sqlParser()
    try:
        plan = parser.parsePlan(f"SELECT * FROM input ORDER BY {order_by}")
    except PySparkException as error:
        raise JobError(f"--order-by {order_by!r} is not an order: {first_line(error)}") from error
    if plan.getClass().getSimpleName() != "Sort":
        raise JobError(f"--order-by {order_by!r} holds more than an order; write it as in priority DESC, id")
    items = [plan.order().apply(place) for place in range(plan.order().size())]
    keys = []
    for item in items:
        sql = item.child().sql()
        if not _reads_back(parser, sql, item.child()):
            raise JobError(
                f"--order-by {order_by!r}: {sql} is no plain expression on a row's columns; make it a column of a "
                "view, and order by that"
            )
        is_descending = item.direction().getClass().getSimpleName().startswith("Descending")
        keys.append(OrderKey(sql=sql, is_descending=is_descending))
    return keys


def check_order(rows: "DataFrame", order_by: str, *, name: str) -> None:
    """Raise ``JobError`` unless the rows of input ``name`` can be put into this order, the same one each time."""
    from pyspark.errors import PySparkException

    keys = order_of(rows.sparkSession, order_by)
    for key in keys:
        try:
            values = rows.select(key.value.alias("value"))
            rows.orderBy(key.sorting(key.value))
        except PySparkException as error:
            raise JobError(
                f"--order-by {order_by!r} is not an order of the rows of input {name!r}: {first_line(error)}"
            ) from error
        # What needs other rows (an aggregate, a window, a generator, a query) is no plain projection of the rows.
        plan = values._jdf.queryExecution().analyzed()
        is_plain = plan.getClass().getSimpleName() == "Project" and plan.subqueries().isEmpty()
        if not is_plain or not plan.child().fastEquals(rows._jdf.queryExecution().analyzed()):
            raise JobError(
                f"--order-by {order_by!r}: {key.sql} depends on more than the row itself; make it a column of a table"
            )
        volatile = VolatileQuery(values).columns().get("value")
        if volatile is not None and volatile.kind is Volatility.RANDOM:
            raise JobError(
                f"--order-by {order_by!r}: {key.sql} has another value each time that it is read, by {volatile.sql}"
            )
        if plan.references().isEmpty():
            raise JobError(
                f"--order-by {order_by!r}: {key.sql} is the same for all rows; name a column of the input"
            )


def first_rows(rows: "DataFrame", keys: Sequence[OrderKey], limit: int) -> "DataFrame":
    """Return the first ``limit`` rows in this order, or any if there are no keys."""
    return rows.orderBy(*(key.sorting(key.value) for key in keys)).limit(limit) if keys else rows.limit(limit)


def _reads_back(parser: Any, sql: str, expression: Any) -> bool:
    """Tell whether the SQL text of a parsed expression stands for the same expression."""
    from pyspark.errors import PySparkException

    try:
        return bool(parser.parseExpression(sql).equals(expression))
    except PySparkException:
        return False
