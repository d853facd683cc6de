"""Add the columns from which a task makes requests (prompt, sampling and key) to the input's own columns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax.wire import ErrorCode
from pipemax_spark.errors import JobError
from pipemax_spark.executor.conversations import check_conversations
from pipemax_spark.executor.overrides import check_overrides
from pipemax_spark.executor.questions import NULL_PROMPT, Question
from pipemax_spark.executor.requests import (
    ENDINGS_COLUMN,
    FAULT_COLUMN,
    IMAGES_COLUMN,
    KEY_COLUMN,
    MESSAGES_COLUMN,
    NULLS_COLUMN,
    OVERRIDES_COLUMN,
    PROMPT_COLUMN,
)
from pipemax_spark.request.kept_by_json import OPTIONS, has_text, kept_by_json, other_bytes
from pipemax_spark.request.prompts import (
    PromptSource,
    find_field,
    first_null,
    rendered,
    resolve_column,
    resolve_names,
)
from pipemax_spark.request.value_text import ZONE_SETTING
from pipemax_spark.spark.arrow_types import arrow_type
from pipemax_spark.spark.helper_columns import free_name, name_in
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

_REQUEST_COLUMNS = (
    PROMPT_COLUMN,
    MESSAGES_COLUMN,
    IMAGES_COLUMN,
    OVERRIDES_COLUMN,
    ENDINGS_COLUMN,
    FAULT_COLUMN,
    NULLS_COLUMN,
)


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """The columns from which rows become requests."""

    source: PromptSource
    overrides_column: str | None = None
    """Column with a struct of the row's own sampling values."""
    kept: tuple[str, ...] = ()
    """The input's columns that go to the output; empty for all columns."""
    questions: tuple[Question, ...] = ()
    """The questions about each row, whose text follows the prompt."""
    fault_column: str | None = None
    """Column with the errors of rows that cannot be asked, which the input need not have."""

    def add(self, rows: "DataFrame", *, have_keys: bool = False) -> "DataFrame":
        """Return the rows with their request columns. Raise ``JobError`` if a column is missing or of a wrong type.

        With ``have_keys``, the last column is the rows' key, as ``SlicedRows`` reads it.
        """
        names = rows.columns[:-1] if have_keys else rows.columns
        made = self._made_of(rows)
        requests = rows.withColumns({free_name(name, names): column for name, column in made.items()})
        if self.source.is_messages:
            _check_messages(requests)
        return requests

    def columns_read(self, rows: "DataFrame") -> frozenset[str]:
        """Return the names of the rows' columns from which requests are made."""
        made = rows.select(*self._made_of(rows).values())._jdf.queryExecution().analyzed().references()
        named = made.toSeq()
        return frozenset(str(named.apply(place).name()) for place in range(named.size()))

    def time_zone(self, rows: "DataFrame") -> str | None:
        """Return the session's time zone if a prompt or a question of these rows depends on it, else None."""
        endings = (PromptSource(template=question.template) for question in self.questions)
        depend = (source.depends_on_time_zone(rows.schema) for source in (self.source, *endings))
        return _zone_of(rows) if any(depend) else None

    def _made_of(self, rows: "DataFrame") -> "dict[str, Column]":
        """Return the request columns as expressions on these rows."""
        schema, zone = rows.schema, _zone_of(rows)
        name = MESSAGES_COLUMN if self.source.is_messages else PROMPT_COLUMN
        columns = {name: self.source.column(schema, zone)}
        if (images := self.source.images(schema)) is not None:
            columns[IMAGES_COLUMN] = images
        if self.questions:
            columns[ENDINGS_COLUMN] = self._endings(schema, zone)
            columns[NULLS_COLUMN] = self._nulls_of_endings(schema)
        if (fault := self._fault(schema)) is not None:
            columns[FAULT_COLUMN] = fault
        if self.overrides_column is not None:
            columns[OVERRIDES_COLUMN] = _overrides(self.overrides_column, schema)
        return columns

    def add_with_keys(self, rows: "DataFrame") -> "DataFrame":
        """Do the same as ``add``, and add the key by which the spool identifies a row.

        The key is a digest of everything that distinguishes one row's request from another's, whatever the session's
        settings are.
        """
        from pyspark.sql import functions as F  # noqa: N812

        requests = self.add(rows)
        asked = [
            expression
            for name, plain in _request_columns(requests).items()
            for expression in _asked(requests, name, plain)
        ]
        key = F.md5(F.to_json(F.struct(*asked), OPTIONS))
        return requests.withColumn(free_name(KEY_COLUMN, rows.columns), key)

    def _endings(self, schema: "StructType", zone: str) -> "Column":
        from pyspark.sql import functions as F  # noqa: N812

        # A template says itself what stands between prompt and question; a column cannot.
        gap = "\n\n" if self.source.prompt_column is not None else ""
        return F.array(*(rendered(f"{gap}{question.template}", schema, zone) for question in self.questions))

    def _nulls_of_endings(self, schema: "StructType") -> "Column":
        """Return, for each question, the name of a column whose null makes its text null."""
        from pyspark.sql import functions as F  # noqa: N812

        return F.array(*(first_null(question.template, schema) for question in self.questions))

    def _fault(self, schema: "StructType") -> "Column | None":
        """Return the errors of rows that cannot be asked, or None if there can be none."""
        from pyspark.sql import functions as F  # noqa: N812

        faults = []
        if self.fault_column is not None and find_field(self.fault_column, schema) is not None:
            faults.append(F.col(quoted(self.fault_column)))
        if self.source.template is not None:
            name = first_null(self.source.template, schema)
            message = F.concat(F.lit(NULL_PROMPT), name)  # null where no column is
            fault = F.struct(F.lit(ErrorCode.EMPTY_PROMPT.value).alias("code"), message.alias("message"))
            faults.append(F.when(message.isNotNull(), fault))
        return F.coalesce(*faults) if faults else None

    def has_own_max_tokens(self, schema: "StructType") -> bool:
        """Tell whether rows of the input's schema say their own ``max_tokens``."""
        from pyspark.sql.types import StructType

        if self.overrides_column is None:
            return False
        _, kind = resolve_column(self.overrides_column, schema)
        return isinstance(kind, StructType) and "max_tokens" in kind.names

    def output_schema(self, schema: "StructType") -> "StructType":
        """Return the columns of the input's schema that go to the output, in the order in which they are named.

        Raise ``JobError`` if one does not exist.
        """
        names = resolve_names(self.kept, schema) or schema.names
        return type(schema)([schema[name] for name in names])

    def for_output(self, requests: "DataFrame") -> "DataFrame":
        """Drop the input's columns that do not go to the output; helper columns and the key stay."""
        if not self.kept:
            return requests
        added = {*_request_columns(requests), name_in(KEY_COLUMN, requests.columns)}
        helpers = [name for name in requests.columns if name in added]
        return requests.select(*map(quoted, self.output_schema(requests.schema).names), *helpers)


def _zone_of(rows: "DataFrame") -> str:
    return str(rows.sparkSession.conf.get(ZONE_SETTING))


def without_request_columns(requests: "DataFrame") -> "DataFrame":
    """Keep the input's own columns, and the key if there is one."""
    return requests.drop(*_request_columns(requests))


def _request_columns(requests: "DataFrame") -> dict[str, str]:
    """Return the rows' request columns by the names that they have, each with its plain name."""
    names = {name_in(plain, requests.columns): plain for plain in _REQUEST_COLUMNS}
    return {name: names[name] for name in requests.columns if name in names}


def without_input_columns(requests: "DataFrame") -> "DataFrame":
    """Keep the columns from which tasks make requests, by their plain names."""
    return requests.select(
        *(requests[name].alias(plain) for name, plain in _request_columns(requests).items())
    )


def prompt_text(requests: "DataFrame") -> "Column":
    """Return a column with the prompt as plain text, for measuring, not for sending.

    The messages of a conversation are joined by line breaks.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import ArrayType

    if (prompt := name_in(PROMPT_COLUMN, requests.columns)) in requests.columns:
        return requests[prompt]
    messages = name_in(MESSAGES_COLUMN, requests.columns)
    content = F.transform(requests[messages], lambda message: message["content"])
    message = requests.schema[messages].dataType.elementType["content"].dataType  # type: ignore[attr-defined]
    if isinstance(message, ArrayType):
        has_text = "text" in message.elementType.names  # type: ignore[attr-defined]
        content = F.transform(F.flatten(content), lambda part: part["text"] if has_text else F.lit(None))
    return F.array_join(content, "\n")


def _check_messages(requests: "DataFrame") -> None:
    """Raise ``JobError`` if the messages are of a type that the tasks cannot read."""
    messages = name_in(MESSAGES_COLUMN, requests.columns)
    try:
        check_conversations(arrow_type(requests.schema[messages].dataType))
    except JobError as error:
        raise JobError(f"messages-column: {error}") from error


def _asked(requests: "DataFrame", name: str, plain: str) -> "list[Column]":
    """Return what a request column adds to a row's key: digests in place of images, which may be large."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import ArrayType, BinaryType

    kind = requests.schema[name].dataType
    if isinstance(kind, BinaryType):
        return [F.md5(requests[name]).alias(plain)]
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, BinaryType):
        return [F.transform(requests[name], F.md5).alias(plain)]
    asked = [F.expr(kept_by_json(quoted(name), kind, are_ids=False)).alias(plain)]
    if has_text(kind):  # null, and so no part of the key, for all texts that are UTF-8
        asked.append(F.expr(other_bytes(quoted(name))).alias(f"{plain} bytes"))
    return asked


def _overrides(name: str, schema: "StructType") -> "Column":
    """Return the overrides as they are: the tasks convert them (``executor.overrides``), without Spark's casts."""
    from pyspark.sql import functions as F  # noqa: N812

    expression, kind = resolve_column(name, schema)
    try:
        check_overrides(arrow_type(kind))
    except JobError as error:
        raise JobError(f"overrides-column {name!r}: {error}") from error
    return F.col(expression)
