"""Refuse an input whose rows are other ones each time they are read: each run would annotate them again."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError
from pipemax_spark.request.columns import RequestColumns
from pipemax_spark.rows.volatile import VolatileQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_REMEDY = "write the view's rows to a table and annotate that"


def check_steady(
    rows: "DataFrame",
    *,
    name: str,
    where: str | None,
    id_columns: Iterable[str],
    requests: RequestColumns,
) -> None:
    """Raise ``JobError`` if the rows of input ``name``, selected by ``where``, do not stay the same.

    With ids, only the ids and what goes into the requests matter. Without ids, a row is matched by all that it holds.
    """
    query = VolatileQuery(rows)
    if where is not None and (expr := query.predicate()) is not None:
        raise JobError(
            f"--where {where!r} selects different rows each time it is evaluated, by {expr.sql}, so a rerun could not "
            "tell which rows are left; use --limit, or a condition on the rows' values"
        )
    ids = set(id_columns)
    columns = query.columns()
    if not ids:
        for column, expr in columns.items():
            raise JobError(
                f"column {column!r} of input {name!r} is made by {expr.sql}, which gives another value each time the "
                "input is read, so each run would annotate its rows again. Give --id-columns without it, or "
                f"{_REMEDY}"
            )
        if (expr := query.selecting()) is not None:
            raise JobError(
                f"input {name!r} selects its rows by {expr.sql}, so these are other rows each time it is read. Give "
                f"--id-columns, or {_REMEDY}"
            )
        return
    asked = requests.columns_read(rows) if columns else frozenset[str]()
    for column, expr in columns.items():
        if column in ids or column in asked:
            role = "is an id column" if column in ids else "goes into the requests"
            raise JobError(
                f"column {column!r} of input {name!r} {role}, and it is made by {expr.sql}, which gives another value "
                f"each time the input is read. Take another column, or {_REMEDY}"
            )
