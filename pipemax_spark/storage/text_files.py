"""Open JSON and CSV files so that a line which Spark cannot read is known, instead of becoming a row of nulls.

Spark gives the text of such a line in a column of corrupt records, if the schema has one. This module adds it, under a
name of its own; the rows that a job annotates do not have it. What the user says of such lines, by Spark's ``mode`` or
``columnNameOfCorruptRecord``, is what becomes of them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.hadoop import HadoopFiles, options_for_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession
    from pyspark.sql.types import StructType

TEXT_FORMATS = ("csv", "json")
_BAD_LINE, NO_COLUMN = "__pipemax_bad_line", "__pipemax_no_column"
_MODE, _CORRUPT = "mode", "columnNameOfCorruptRecord"
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    # A line is bad or not whichever columns a query needs: with column pruning, Spark would look at these only.
    "csv": {"header": "true", "multiLine": "true", "escape": '"', "columnPruning": "false"},
    "json": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """The files of an input, as lines of text that Spark has tried to read."""

    file_format: str
    path: str
    options: Mapping[str, str]
    """The reader's options: ours, and the user's in their place."""
    lines: "DataFrame"
    """All rows that Spark makes, with the column ``bad_line``."""
    bad_line: str
    """The column that holds the text of a line which is no row, and null for the others."""
    columns: tuple[str, ...]
    """The columns of the rows."""
    user_says: str | None
    """The user's own option about bad lines, with which they are his rows or Spark's business."""

    @property
    def is_multiline(self) -> bool:
        return self.option("multiLine", "false").lower() == "true"

    def option(self, name: str, default: str) -> str:
        """Return an option's value: Spark does not care about the case of its name."""
        return _lower(self.options).get(name.lower(), default)

    @property
    def rows(self) -> "DataFrame":
        """Return the rows, with those of bad lines."""
        return self.lines.select(*map(quoted, self.columns))

    @property
    def good_rows(self) -> "DataFrame":
        """Return the rows without those of bad lines."""
        # Spark refuses a query that needs only the column of corrupt records, so the condition reads the others too.
        others = ", ".join(f"{quoted(name)} IS NULL" for name in self.columns)
        good = self.lines.where(f"{quoted(self.bad_line)} IS NULL AND size(array({others})) > 0")
        return good.select(*map(quoted, self.columns))

    def read_with(self, schema: "StructType") -> "DataFrame":
        """Read the files again, with another schema and every line that Spark can make a row of."""
        options = {**self.options, "mode": "PERMISSIVE"}
        return _reader(self.lines.sparkSession, self.file_format, options, schema).load(self.path)


def open_text_files(
    spark: "SparkSession", file_format: str, path: str, user_options: Mapping[str, str], *, is_pattern: bool
) -> TextFiles:
    """Open the files; only their schema is read."""
    from pyspark.sql.types import StringType, StructField, StructType

    known = _lower(user_options)
    ours = {name: value for name, value in _DEFAULTS[file_format].items() if name.lower() not in known}
    if file_format == "json" and {"encoding", "charset"} & known.keys() and "linesep" not in known:
        ours["lineSep"] = "\n"  # Spark wants it for another encoding than UTF-8
    ours |= options_for_files(path, is_pattern=is_pattern)
    bad_line = known.get(_CORRUPT.lower(), _BAD_LINE)
    options = {
        name: value for name, value in {**ours, **user_options}.items() if name.lower() != _CORRUPT.lower()
    }
    options[_CORRUPT] = bad_line
    inferred = _inferred(spark, file_format, path, options, is_literal=not is_pattern)
    fields = [field for field in inferred.fields if field.name != bad_line]
    columns = tuple(field.name for field in fields)
    if _CORRUPT.lower() in known and (file_format == "csv" or bad_line in inferred.names):
        columns = (*columns, bad_line)
    # A schema of nothing but corrupt records is one that Spark does not read.
    fields = fields or [StructField(NO_COLUMN, StringType())]
    schema = StructType([*fields, StructField(bad_line, StringType())])
    return TextFiles(
        file_format=file_format,
        path=path,
        options=options,
        lines=_reader(spark, file_format, options, schema).load(path),
        bad_line=bad_line,
        columns=columns,
        user_says=next((name for name in (_MODE, _CORRUPT) if name.lower() in known), None),
    )


def _inferred(
    spark: "SparkSession", file_format: str, path: str, options: Mapping[str, str], *, is_literal: bool
) -> "StructType":
    """Return the schema that Spark infers.

    With ``multiLine``, Spark reads files for it by a way that takes their names for patterns, whatever it is told.
    Where a name looks like one, it is inferred from lines of CSV, and from whole JSON files that are read as text.
    """
    is_multiline = _lower(options).get("multiline", "false").lower() == "true"
    entries = HadoopFiles(spark).list(path) if is_literal and is_multiline else []
    names = [re.sub(r"^[a-z][a-z0-9+.-]*:/", "", path), *(entry.name for entry in entries)] if entries else []
    if not any(re.search(r"[:*?\[\]{}\\]", name) for name in names):
        return _reader(spark, file_format, options).load(path).schema
    others = {name: value for name, value in options.items() if name.lower() != "multiline"}
    if file_format == "csv":
        return _reader(spark, file_format, others).load(path).schema
    ours = options_for_files(path, is_pattern=False)
    texts = spark.read.format("text").options(wholetext="true", **ours).load(path)
    return spark.read.options(**others).json(texts.rdd.map(itemgetter(0))).schema


def _lower(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


def _reader(
    spark: "SparkSession", file_format: str, options: Mapping[str, str], schema: "StructType | None" = None
) -> "DataFrameReader":
    reader = spark.read.format(file_format).options(**options)
    return reader if schema is None else reader.schema(schema)
