"""Find rows that Spark's readers of CSV and JSON swallow without marking a line as corrupt.

A quote that is never closed makes the rest of a CSV file one value, and one that is closed rows later makes those rows
one value. All CSV files in a directory are read by the columns of one of them. Of two JSON objects on a line, or in a
file that is read with ``multiLine``, only the first becomes a row.
"""

import codecs
import csv
import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from pipemax_spark.errors import JobError
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.text_files import TextFiles

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_PADDING = "__pipemax_padding"
_MOST_DROPPED = 1_000
"""Records with an open quote that can be left out: they are named in the query."""
_END_BYTES = 65_536
_READERS = 8
"""Files whose beginning and end are read at a time."""
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Swallowed:
    """Records that hold more than a row."""

    count: int = 0
    unit: str = ""
    kind: str = ""
    first: str = ""
    keys: tuple[str, ...] = ()
    """Of CSV records, which are left out as a whole: the hashes of their rows."""

    def without(self, rows: "DataFrame") -> "DataFrame":
        """Return the rows without those of these records."""
        return rows.where(~_key(rows.columns).isin(*self.keys))


def swallowed_rows(files: TextFiles, *, has_long_values: bool) -> Swallowed:
    """Find such records; ``has_long_values`` tells whether any value of a CSV file has a line break.

    A CSV file is read a second time only if a value has a line break, or if its last line has a quote that is not
    closed. JSON files are read a second time as text.
    """
    if files.file_format == "json":
        return _joined_values(files)
    reader = _csv_reader(files)
    if reader is None or not files.columns:
        return Swallowed()
    ends = _ends(files)
    _check_headers(files, reader, ends)
    if not files.is_multiline:  # no value has a line break
        return Swallowed()
    if not has_long_values and not any(reader.is_open(_last_line(end)) for _, _, end in ends):
        return Swallowed()
    return _open_quotes(files, reader)


def _joined_values(files: TextFiles) -> Swallowed:
    """Find text behind the JSON value of a line or, with ``multiLine``, of a file."""
    from pyspark.sql import functions as F  # noqa: N812

    spark = files.lines.sparkSession
    options = {
        name: value for name, value in files.options.items() if name.lower() not in ("multiline", "mode")
    }
    whole = {"wholetext": "true"} if files.is_multiline else {}
    text = spark.read.format("text").options(**options, **whole).load(files.path)
    goes_on = text.where(F.col("value").rlike(r"[}\]][\s,]*[^\s,\]}]"))
    # A comma behind an object is one of an array whose brackets are on lines of their own.
    value = F.regexp_replace("value", r"^[\s\uFEFF]+|[\s,]+$", "")
    values = F.from_json(F.concat(F.lit("["), value, F.lit("]")), "array<string>", options)
    of_object = F.from_json(value, f"{_PADDING} string, {quoted(files.bad_line)} string", options)
    is_read = of_object[files.bad_line].isNull() | F.from_json(value, "array<string>", options).isNotNull()
    is_one = F.coalesce(F.size(values) == 1, F.lit(False))
    joined = goes_on.where((value != "") & ~is_one & is_read)
    count, first = joined.agg(F.count(F.lit(1)), F.min(F.substring("value", 1, _SHOWN_CHARS))).collect()[0]
    where = "file" if files.is_multiline else "line"
    kind = "with more text behind the JSON value, where Spark reads no further"
    if files.is_multiline:
        kind += " (if each line is a value, leave multiLine out)"
    return Swallowed(count=int(count), unit=where, kind=kind, first=first or "")


@dataclass(frozen=True, slots=True)
class _CsvReader:
    """Python's reader of CSV, which is strict, with the settings of Spark's."""

    separator: str
    quote: str
    escape: str

    def fault(self, record: str) -> str | None:
        """Return what is wrong with the quotes of a record, or None."""
        try:
            for _ in self._records(record):
                pass
        except csv.Error as error:
            return str(error)
        return None

    def _records(self, text: str) -> Iterator[list[str]]:
        csv.field_size_limit(sys.maxsize)
        is_doubled = self.escape == self.quote
        return csv.reader(
            io.StringIO(text, newline=""),
            delimiter=self.separator,
            quotechar=self.quote,
            doublequote=is_doubled,
            escapechar=None if is_doubled else self.escape,
            strict=True,
        )

    def first(self, text: str) -> tuple[str, ...]:
        """Return the fields of the first record, in small letters."""
        try:
            record = next(self._records(text), [])
        except csv.Error:
            return ()
        return tuple(field.strip().lower() for field in record)

    def is_open(self, record: str) -> bool:
        """Tell whether a quoted field runs to the record's end."""
        return self.quote in record and "unexpected end" in (self.fault(record) or "")

    def has_swallowed(self, record: str) -> bool:
        """Tell whether a quoted field runs to the record's end, or is closed somewhere it cannot be, lines later."""
        if self.quote not in record:
            return False
        fault = self.fault(record) or ""
        return "unexpected end" in fault or ("expected after" in fault and "\n" in record.strip())


def _csv_reader(files: TextFiles) -> _CsvReader | None:
    """Return the reader, or None for settings that Python's does not have."""
    separator = files.option("sep", files.option("delimiter", ",")).replace("\\t", "\t")
    quote, escape = files.option("quote", '"'), files.option("escape", "\\")
    if any(len(text) != 1 for text in (separator, quote, escape)):
        return None
    return _CsvReader(separator, quote, escape)


def _ends(files: TextFiles) -> list[tuple[str, str, str]]:
    """Return each file's URI and its first and last characters; none of compressed files."""
    storage = HadoopFiles(files.lines.sparkSession)
    encoding = files.option("encoding", files.option("charset", "UTF-8"))
    try:
        codecs.lookup(encoding)
    except LookupError:  # an encoding that only Java knows
        return []
    with ThreadPoolExecutor(_READERS) as readers:
        ends_by_uri = readers.map(lambda uri: (uri, storage.ends(uri, _END_BYTES)), files.lines.inputFiles())
        return [
            (uri, *(end.decode(encoding, errors="replace").removeprefix("\ufeff") for end in ends))
            for uri, ends in ends_by_uri
            if ends is not None
        ]


def _last_line(end: str) -> str:
    """Return the last line of a file that does not end with a line break."""
    return end.replace("\r", "\n").rpartition("\n")[2]


def _check_headers(files: TextFiles, reader: _CsvReader, ends: list[tuple[str, str, str]]) -> None:
    """Raise ``JobError`` for files with other headers: Spark reads all of them by the columns of one."""
    if files.option("header", "false").lower() != "true" or "enforceschema" in map(str.lower, files.options):
        return
    headers = {uri: header for uri, begins, _ in ends if (header := reader.first(begins))}
    firsts = {header: uri for uri, header in reversed(headers.items())}
    if len(firsts) > 1:
        (one, of_one), (other, of_other), *_ = sorted(firsts.items(), key=lambda item: item[1])
        raise JobError(
            f"the CSV files of input {files.path!r} have different headers: {of_one} has {', '.join(one)}, and "
            f"{of_other} has {', '.join(other)}. Give them the same columns in the same order, or read them one by one"
        )


def _open_quotes(files: TextFiles, reader: _CsvReader) -> Swallowed:
    """Read the files with one more column than they have, so that Spark gives the text of each record."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import StringType, StructField, StructType

    schema = files.lines.schema
    fields = [field for field in schema.fields if field.name != files.bad_line]
    padded = StructType([*fields, StructField(_PADDING, StringType()), schema[files.bad_line]])
    records = files.read_with(padded)
    text = F.col(quoted(files.bad_line))
    records = records.where(F.contains(text, F.lit(reader.quote)))
    wanted = records.select(text.alias("record"), _key([field.name for field in fields]).alias("key"))

    def faulty(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Keep the records whose quotes are wrong."""
        for batch in batches:
            records = batch.column("record").to_pylist()
            kept = batch.filter(pa.array(map(reader.has_swallowed, records), pa.bool_()))
            # A record may hold the rest of its file.
            shown = pc.utf8_slice_codeunits(kept.column("record"), 0, _SHOWN_CHARS)
            yield pa.RecordBatch.from_arrays([shown, kept.column("key")], names=["record", "key"])

    rows = wanted.mapInArrow(faulty, "record string, key string").limit(_MOST_DROPPED + 1).collect()
    if len(rows) > _MOST_DROPPED:
        raise JobError(
            f"input {files.path!r} has more than {_MOST_DROPPED:,} records whose quotes are not closed; give "
            "--input-option quote= or escape= as the files have them"
        )
    return Swallowed(
        count=len(rows),
        unit="record",
        kind="with a quote that is not closed, so that what follows became part of a value",
        first=min((row["record"] for row in rows), default=""),
        keys=tuple(sorted({row["key"] for row in rows})),
    )


def _key(columns: list[str]) -> "Column":
    """Return a hash of the values of a CSV file's row."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.sha2(F.to_json(F.struct(*map(quoted, columns))), 256)
