"""Count the lines of JSON and CSV files that are no rows, in the pass that counts the rows, and say what to do.

Without this a torn line would be a row of nulls, and the fields beyond a CSV's header, or text in another encoding than
UTF-8, would be cut or replaced without a word. What Spark's readers themselves take in silence is ``swallowed``'s.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING, Self, TypeVar

from pipemax_spark.errors import JobError, cause_of, read_choice
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.swallowed import Swallowed, swallowed_rows
from pipemax_spark.storage.text_files import NO_COLUMN, TextFiles

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_T = TypeVar("_T")
_SHOWN_CHARS = 200
_REPLACED = "\ufffd"
"""U+FFFD: decoders put it in the place of bytes that are not of the encoding."""
_UNREADABLE = ("MALFORMED_RECORD", "MALFORMED_CSV", "FAILED_READ_FILE")
_PLACE, _IS_ROW, _IS_REPLACED, _IS_LONG = (
    f"__pipemax_{name}" for name in ("place", "row", "replaced", "long")
)
_ENCODING = "--input-option encoding=ISO-8859-1 (or what they are written in)"


class BadLines(StrEnum):
    """What becomes of a line of a text file that is no row."""

    FAIL = "fail"
    """The job ends before anything is written."""
    DROP = "drop"
    """The line is left out, and counted."""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read the value from text. Raise ``JobError`` if the text is neither."""
        meanings = "'fail' (end before anything is written) or 'drop' (leave such lines out)"
        return read_choice(cls, "bad-lines", text, meanings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    rows: int | None
    """Rows that the condition selects; None if it can only be used in a filter."""
    bad: int
    replaced: int
    """Rows with a U+FFFD in a text."""
    has_long_values: bool
    """Whether a value has a line break."""
    first: str
    """The first bad line, or its beginning."""


def checked_rows(
    files: TextFiles,
    *,
    where: str | None,
    bad_lines: BadLines,
    warn: Callable[[str], None],
    shows_values: bool = True,
) -> "tuple[DataFrame, int | None]":
    """Return the files' rows, and how many of them ``where`` selects, or None if that takes another pass.

    Raise ``JobError`` for lines that are no rows, unless they are dropped; ``warn`` of those, and of text that was
    written in another encoding.
    """
    if files.user_says is not None and bad_lines is BadLines.DROP:
        raise JobError(
            f"--bad-lines drop and --input-option {files.user_says}=… both say what becomes of bad lines; give one"
        )
    counted = unless_unreadable(files.path, lambda: _count(files, where))
    if counted.replaced or _REPLACED in "".join(files.columns):
        has = "with" if counted.replaced else "under a header with"
        warn(
            f"{_number(counted.replaced, 'row')} of {files.path} {has} U+FFFD, which stands for bytes that are not "
            f"UTF-8: give {_ENCODING}"
        )
    if files.user_says is not None:
        if counted.bad:
            warn(
                f"{counted.bad:,} lines of {files.path} are no {files.file_format}, and rows by {files.user_says}"
            )
        return files.rows, counted.rows
    swallowed = unless_unreadable(
        files.path, lambda: swallowed_rows(files, has_long_values=counted.has_long_values)
    )
    faults = _faults_text(files, counted, swallowed, shows_values=shows_values)
    if not faults:
        return files.rows, counted.rows
    if bad_lines is BadLines.FAIL:
        raise JobError(
            f"input {files.path!r} has {faults}. Mend the files, or give --bad-lines drop to leave such lines out"
        )
    warn(f"left out of {files.path}: {faults}")
    rows = files.good_rows if files.columns else files.rows.limit(0)
    if swallowed.keys:
        return swallowed.without(rows), None
    return rows, counted.rows


def unless_unreadable(path: str, read: Callable[[], _T]) -> _T:
    """Return what ``read`` returns. Raise ``JobError`` if Spark cannot read a file at all."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        return read()
    except (Py4JJavaError, PySparkException) as error:
        if not any(code in str(error) for code in _UNREADABLE):
            raise
        raise JobError(f"input {path!r} cannot be read: {cause_of(error)}") from error


def _count(files: TextFiles, where: str | None) -> _Counted:
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F  # noqa: N812

    bad = F.col(quoted(files.bad_line))
    is_row = F.lit(True) if files.user_says is not None else bad.isNull()
    texts = _texts(files)
    flags = {
        _IS_REPLACED: _any(F.contains(text, F.lit(_REPLACED)) for text in texts),
        _IS_LONG: _any(F.contains(text, F.lit("\n")) for text in texts)
        if files.file_format == "csv"
        else F.lit(False),
        # The first line, if one file is read; Spark starts with the largest.
        _PLACE: F.monotonically_increasing_id(),
    }
    shown = F.substring(bad, 1, _SHOWN_CHARS)

    def counts(condition: "Column") -> "DataFrame":
        lines = files.lines.select(
            bad.isNotNull().alias(files.bad_line),
            shown.alias("first"),
            (is_row & F.coalesce(condition, F.lit(False))).alias(_IS_ROW),
            *(flag.alias(name) for name, flag in flags.items()),
        )
        return lines.agg(
            F.count_if(_IS_ROW),
            F.count_if(quoted(files.bad_line)),
            F.count_if(F.col(_IS_REPLACED) & ~F.col(quoted(files.bad_line))),
            F.coalesce(F.max(_IS_LONG), F.lit(False)),
            F.min_by("first", F.when(F.col(quoted(files.bad_line)), F.col(_PLACE))),
        )

    knows_rows = True
    try:
        counting = counts(F.lit(True) if where is None else F.expr(where))
    except AnalysisException:  # a subquery, which is only taken in a filter
        knows_rows, counting = False, counts(F.lit(True))
    rows, num_bad, replaced, is_long, first = counting.collect()[0]
    return _Counted(
        rows=int(rows) if knows_rows else None,
        bad=int(num_bad),
        replaced=int(replaced),
        has_long_values=bool(is_long),
        first=first or "",
    )


def _texts(files: TextFiles) -> "list[Column]":
    """Return the rows' texts: columns, and what is nested as JSON."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import ArrayType, MapType, StringType, StructType

    fields = [files.lines.schema[name] for name in files.columns if name != files.bad_line]
    nested = [
        F.col(quoted(field.name))
        for field in fields
        if isinstance(field.dataType, ArrayType | MapType | StructType)
    ]
    texts = [F.col(quoted(field.name)) for field in fields if isinstance(field.dataType, StringType)]
    if not fields:  # Spark refuses a query that needs only the column of corrupt records
        return [F.col(NO_COLUMN)]
    return [*texts, F.to_json(F.struct(*nested))] if nested else texts


def _any(conditions: "Iterable[Column]") -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return reduce(
        lambda one, other: one | other,
        (F.coalesce(condition, F.lit(False)) for condition in conditions),
        F.lit(False),
    )


def _faults_text(files: TextFiles, counted: _Counted, swallowed: Swallowed, *, shows_values: bool) -> str:
    """Say how many lines are bad, the first of them, and what their kind asks for; '' if there are none."""
    parts = []
    if counted.bad:
        unit = "file" if files.file_format == "json" and files.is_multiline else "line"
        is_csv = files.file_format == "csv"
        kind = (
            "with more or fewer fields than the header" if is_csv else "that cannot be read as a JSON object"
        )
        first = _first(counted.first) if shows_values else ""
        parts.append(f"{_number(counted.bad, unit)} {kind}{first}{_hint(files, counted.first)}")
    if swallowed.count:
        first = _first(swallowed.first) if shows_values else ""
        parts.append(f"{_number(swallowed.count, swallowed.unit)} {swallowed.kind}{first}")
    return ", and ".join(parts)


def _number(count: int, unit: str) -> str:
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def _first(text: str) -> str:
    return f": {text[:_SHOWN_CHARS]!r}"


def _hint(files: TextFiles, first: str) -> str:
    if _REPLACED in first:
        return f" (they are not UTF-8: give {_ENCODING})"
    begins = first.strip()
    spans_lines = begins == "{" or begins.startswith("[") or begins.endswith(("{", "[", ","))
    if files.file_format == "json" and not files.is_multiline and spans_lines:
        return " (for JSON over several lines give --input-option multiLine=true)"
    return ""
