"""Check, before any engine works, whether an existing output table accepts the rows to come, and keeps their values.

The table's NOT NULL columns, string lengths and CHECK constraints are known, and so is the value of a column that the
input lacks: a default or null. Delta does not show how it generates a column, so rules on generated and identity
columns, and rules on the answers, are left to Delta, which then refuses the commit. A row that the table stores with
another value would not be found there again, so each run would annotate it once more.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError
from pipemax_spark.job.job import JobCall
from pipemax_spark.options import JobOptions
from pipemax_spark.request.kept_by_json import types_in
from pipemax_spark.request.prompts import find_field
from pipemax_spark.rows.annotated import ANNOTATION, output_schema
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

_CONSTRAINT = "delta.constraints."
_STRING_TYPE, _DEFAULT = "__CHAR_VARCHAR_TYPE_STRING", "CURRENT_DEFAULT"
"""Spark's names of a column's metadata: its ``varchar(n)`` or ``char(n)``, and its default as SQL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    condition: str
    """SQL that is true for a row that fits."""
    name: str
    """The rule's name in messages."""


def compared_columns(
    input_schema: "StructType", id_columns: Sequence[str], options: JobOptions
) -> Sequence[str]:
    """Return the input's columns by which rows are matched with the output's."""
    return input_schema.names if options.redo_changed or not id_columns else id_columns


def check_columns_fit(call: JobCall, input_schema: "StructType", id_columns: Sequence[str]) -> None:
    """Raise ``JobError`` if the table cannot accept or match rows of this schema; warn of rules on the answers."""
    table, options = call.table, call.options
    known, answers = (
        table.read().schema,
        output_schema(input_schema, options),
    )
    for column in (ANNOTATION, *(question.name for question in options.ask)):
        held = find_field(column, known)
        if held is None:
            continue
        for name, of_table, of_answers in _conflicts(column, held.dataType, answers[column].dataType):
            raise JobError(
                f"output {table.name!r} has a column {name!r} of type {of_table.simpleString()}, which must be of "
                f"type {of_answers.simpleString()}; drop it, or name another output"
            )
    compared = compared_columns(input_schema, id_columns, options)
    _check_no_padding(table, known, [input_schema[name] for name in compared])
    _check_not_null(table, known, input_schema)
    if not (rules := _rules(known, table.properties())):
        return
    rows, annotated = (_completed(table.no_rows(schema), table) for schema in (input_schema, answers))
    for rule in rules:
        if _is_broken(rows, rule) is None and _is_broken(annotated, rule) is not None:
            call.terminal.warn(
                f"the {rule.name} of {table.name} depends on the answers: a row that breaks it ends the job when its "
                "chunk is committed"
            )


def check_rows_fit(table: OutputTable, rows: "DataFrame") -> None:
    """Raise ``JobError`` if a row breaks a rule of the table. Reads the rows once if the table has rules for them."""
    from pyspark.sql import functions as F  # noqa: N812

    rules = _rules(table.read().schema, table.properties())
    if not rules:
        return
    rows = _completed(rows, table)
    broken = [(rule, column) for rule in rules if (column := _is_broken(rows, rule)) is not None]
    if not broken:
        return
    counts = rows.agg(*(F.count_if(column) for _, column in broken)).collect()[0]
    broken_rules = [
        f"{rule.name}: {count:,}" for (rule, _), count in zip(broken, counts, strict=True) if count
    ]
    if broken_rules:
        raise JobError(
            f"output {table.name!r} would reject some of the rows to annotate; rows that break its rules, by rule: "
            f"{'; '.join(broken_rules)}. Exclude them with --where, fix them, or change the rule. Nothing was annotated"
        )


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
    call: JobCall, rows: "DataFrame", schema: "StructType", id_columns: Sequence[str]
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


def _conflicts(
    name: str, of_table: "DataType", of_answers: "DataType"
) -> "Iterator[tuple[str, DataType, DataType]]":
    """Yield the fields, by path, whose types are incompatible."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    match of_table, of_answers:
        case StructType(), StructType():
            for field in of_answers.fields:
                if (same := find_field(field.name, of_table)) is not None:
                    yield from _conflicts(f"{name}.{field.name}", same.dataType, field.dataType)
        case (ArrayType(), ArrayType()) | (MapType(), MapType()):
            return  # Delta merges the structs in these as well
        case _ if of_table != of_answers:
            yield name, of_table, of_answers


def _check_no_padding(table: OutputTable, known: "StructType", compared: "Sequence[StructField]") -> None:
    """Raise ``JobError`` for ``char(n)``: Delta pads it with blanks, so a rerun could not match the value."""
    for field in compared:
        same = find_field(field.name, known)
        kind = "" if same is None else str(same.metadata.get(_STRING_TYPE, ""))
        if re.search(r"\bchar\(", kind) and kind != field.metadata.get(_STRING_TYPE):
            raise JobError(
                f"column {field.name!r} of output {table.name!r} is {kind}, which pads values with blanks, so rows "
                "could not be matched by it; make it string or varchar, or give --id-columns without it"
            )


def _check_not_null(table: OutputTable, known: "StructType", input_schema: "StructType") -> None:
    missing = [
        name
        for field in known.fields
        if field.name != ANNOTATION
        and _DEFAULT not in field.metadata
        and find_field(field.name, input_schema) is None
        for name, _ in _not_null(field, "", "")
    ]
    if missing and not table.fills_columns:
        raise JobError(
            f"output {table.name!r} has a NOT NULL column {missing[0]!r}, which the input's rows lack: add it to the "
            "input (or to --select), or drop the NOT NULL constraint"
        )


def _rules(schema: "StructType", properties: Mapping[str, str]) -> list[_Rule]:
    rules = []
    for field in schema.fields:
        rules += [
            _Rule(condition=f"{column} IS NOT NULL", name=f"column {name!r} is NOT NULL")
            for name, column in _not_null(field, "", "")
        ]
        kind, name = str(field.metadata.get(_STRING_TYPE, "")), quoted(field.name)
        if limit := re.fullmatch(r"(?:var)?char\((\d+)\)", kind):
            condition = f"{name} IS NULL OR length({name}) <= {limit[1]}"
            rules.append(_Rule(condition=condition, name=f"column {field.name!r} is {kind}"))
    rules += [
        _Rule(condition=text, name=f"CHECK constraint {property_name.removeprefix(_CONSTRAINT)!r} ({text})")
        for property_name, text in properties.items()
        if property_name.startswith(_CONSTRAINT)
    ]
    return rules


def _not_null(field: "StructField", outer: str, outer_column: str) -> Iterator[tuple[str, str]]:
    """Yield (path, SQL expression) of this column and the fields of its structs, of those that are NOT NULL.

    To Delta, a struct that is null breaks the NOT NULL of its fields.
    """
    from pyspark.sql.types import StructType

    name, column = f"{outer}{field.name}", f"{outer_column}{quoted(field.name)}"
    if not field.nullable:
        yield name, column
    if isinstance(field.dataType, StructType):
        for inner in field.dataType.fields:
            yield from _not_null(inner, f"{name}.", f"{column}.")


def _completed(rows: "DataFrame", table: OutputTable) -> "DataFrame":
    """Add the table's columns that the rows lack, with the values that Delta will fill in, as far as they are known."""
    from pyspark.sql import functions as F  # noqa: N812

    missing = {
        field.name: F.expr(field.metadata.get(_DEFAULT, "NULL")).cast(field.dataType)
        for field in table.read().schema.fields
        if (_DEFAULT in field.metadata or not table.fills_columns)
        and field.name != ANNOTATION
        and find_field(field.name, rows.schema) is None
    }
    return rows.withColumns(missing) if missing else rows


def _is_broken(rows: "DataFrame", rule: _Rule) -> "Column | None":
    """Return a condition that is true for a row that breaks the rule; None if the rule needs columns to come."""
    from pyspark.errors import AnalysisException
    from pyspark.logger import PySparkLogger
    from pyspark.sql import functions as F  # noqa: N812

    # To Delta, a condition that is null is broken too.
    column = ~F.coalesce(F.expr(rule.condition), F.lit(False))
    # PySpark logs what it cannot resolve to standard error, as an error. If this created that logger with another
    # class, every error in the session's SQL would be a TypeError from then on.
    pyspark_logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    was_disabled, pyspark_logger.disabled = pyspark_logger.disabled, True
    try:
        _ = rows.select(column).schema
    except AnalysisException:
        return None
    finally:
        pyspark_logger.disabled = was_disabled
    return column
