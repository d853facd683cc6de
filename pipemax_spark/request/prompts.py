"""Each row's prompt as a Spark expression: a column, a conversation, or a template over columns.

Rendering happens in the JVM. A null in any column of a template makes the prompt null, and the row an error row.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING

from pipemax.wire import PAIR
from pipemax_spark.errors import JobError
from pipemax_spark.request.argument_types import did_you_mean
from pipemax_spark.request.value_text import has_timestamp, text_of, variant_as_json
from pipemax_spark.spark.arrow_types import arrow_type
from pipemax_spark.spark.sql import quoted, split_names

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructField, StructType

_PART = r"(?:`(?:[^`]|``)*`|[^{}.`][^{}.]*)"
_QUOTED_FIELD = re.compile(rf"\{{({_PART}(?:\.{_PART})*)\}}")
_FIELD = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """The source of prompts: one of the first three fields is set, and maybe the images before each prompt's text."""

    prompt_column: str | None = None
    messages_column: str | None = None
    template: str | None = None
    """Text with ``{column}`` in it; ``{a.b}`` is a field of a struct, or a column of that name if there is no such
    field; ``{`any name`}`` is a column, whatever its name; ``{{`` and ``}}`` are braces."""
    image_column: str | None = None
    """A column of images (binary), of their paths or URLs (string), or of arrays of either."""
    query_column: str | None = None
    """With the task ``score``: column of the query that the prompt, a document, is to answer."""

    def __post_init__(self) -> None:
        sources = ("prompt_column", "messages_column", "template")
        named = [name for name in sources if getattr(self, name) is not None]
        if len(named) != 1:
            what = " and ".join(name.replace("_", "-") for name in named) or "none of them"
            raise JobError(
                f"give exactly one of prompt-column, messages-column and template; {what} "
                f"{'were' if len(named) > 1 else 'was'} given"
            )
        if self.query_column is not None and self.messages_column is not None:
            raise JobError(
                "query-column is given next to messages-column; messages hold the query themselves"
            )
        if self.image_column is not None and self.is_messages:
            raise JobError(
                "image-column goes with a prompt-column or a template; the images of conversations are parts of their "
                "messages"
            )

    @property
    def is_messages(self) -> bool:
        return self.messages_column is not None or self.query_column is not None

    def column(self, schema: "StructType", zone: str) -> "Column":
        """Return the prompt as a string column, or as array<struct<role, content>> for messages.

        Timestamps are written in the time zone ``zone``.

        Raise ``JobError`` for unknown columns and for columns of a type that cannot be a prompt.
        """
        from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

        if self.messages_column is not None:
            return _messages(self.messages_column, schema, zone)
        if self.prompt_column is not None:
            prompt = _text_column("prompt-column", self.prompt_column, schema, zone)
        else:
            prompt = _concatenated(parse_template(self.template or "", schema), zone)
        if self.query_column is None:
            return prompt
        query = _text_column("query-column", self.query_column, schema, zone)
        pair = F.array(*(_message(role, text) for role, text in zip(PAIR, (query, prompt), strict=True)))
        # Null if one is missing: such a row has an empty prompt.
        return F.when(query.isNotNull() & prompt.isNotNull(), pair)

    def images(self, schema: "StructType") -> "Column | None":
        """Return the column of images, or None if there is none.

        Raise ``JobError`` for an unknown column or one of another type.
        """
        from pyspark.sql import functions as F  # noqa: N812
        from pyspark.sql.types import ArrayType, BinaryType, StringType

        if self.image_column is None:
            return None
        expression, kind = resolve_column(self.image_column, schema)
        one = kind.elementType if isinstance(kind, ArrayType) else kind
        if not isinstance(one, BinaryType | StringType):
            raise JobError(
                f"image-column {self.image_column!r} is of type {kind.simpleString()}, must be binary or string, or an "
                "array of them"
            )
        return F.col(expression)

    def has_images(self, schema: "StructType") -> bool:
        """Tell whether rows may have images."""
        if self.messages_column is not None:
            return _has_parts(_message_type(self.messages_column, schema)[1])
        return self.image_column is not None

    def depends_on_time_zone(self, schema: "StructType") -> bool:
        """Tell whether a prompt contains a timestamp, which is written in the session's time zone."""
        return any(has_timestamp(kind) for kind in self._types_read(schema))

    def _types_read(self, schema: "StructType") -> list["DataType"]:
        """Return the types of all values that are turned into text."""
        if self.messages_column is not None:
            message = _message_type(self.messages_column, schema)[1]
            return [message["role"].dataType, message["content"].dataType]
        names = template_names(self.template or "")
        names += [name for name in (self.prompt_column, self.query_column) if name is not None]
        return [resolve_column(name, schema)[1] for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatePart:
    """Literal text, or a column as a Spark expression."""

    text: str = ""
    column: str | None = None
    kind: "DataType | None" = dataclass_field(default=None, compare=False)
    """The column's type."""


def parse_template(template: str, schema: "StructType", *, needs_column: bool = True) -> list[TemplatePart]:
    """Return the template's parts in order. ``JobError`` names the brace or the column that is wrong."""
    parts: list[TemplatePart] = []
    try:
        for text, name in _pieces(template):
            if name is not None:
                column, kind = _template_column(name, schema)
                parts.append(TemplatePart(column=column, kind=kind))
            elif text:
                parts.append(TemplatePart(text=text))
    except JobError as error:
        raise JobError(f"template {template!r}: {error}") from error
    except ValueError as error:  # a single brace
        raise JobError(
            f"template {template!r}: {error}; write {{{{ and }}}} for braces that are text"
        ) from error
    if needs_column and not any(part.column for part in parts):
        raise JobError(
            f"template {template!r} names no column, so every prompt would be the same; write {{column}}"
        )
    return parts


def template_names(template: str) -> list[str]:
    """Return the names in the template's braces. Raise ``ValueError`` for a single brace."""
    return [name for _, name in _pieces(template) if name is not None]


def _pieces(template: str) -> Iterator[tuple[str, str | None]]:
    """Yield the template's texts and names of columns in order, as (text, None) or ("", name).

    Texts are cut at doubled braces. Raise ``ValueError`` for a single brace.
    """
    place = 0
    while place < len(template):
        brace = next((i for i in range(place, len(template)) if template[i] in "{}"), len(template))
        if template[brace : brace + 2] in ("{{", "}}"):
            end = brace + 2
            yield template[place : brace + 1], None
        elif brace > place:
            end = brace
            yield template[place:brace], None
        else:
            match = _QUOTED_FIELD.match(template, place) or _FIELD.match(template, place)
            if match is None:
                raise ValueError(f"Single '{template[place]}' encountered in format string")
            end = match.end()
            yield "", match[1]
        place = end


def _template_column(name: str, schema: "StructType") -> "tuple[str, DataType]":
    if _found(name, schema) is None and (mark := re.search("[!:]", name)) is not None:
        raise JobError(
            f"{{{name[: mark.start()]}…}} has a format or conversion, but only a column's name may stand in braces; "
            "write {{ and }} for braces that are text"
        )
    return resolve_column(name, schema)


def _text_column(option: str, name: str, schema: "StructType", zone: str) -> "Column":
    expression, kind = resolve_column(name, schema)
    if kind.typeName() in ("array", "map", "struct"):
        raise JobError(
            f"{option} {name!r} is of type {kind.simpleString()}, not text; for conversations give --messages-column, "
            "for fields a --template"
        )
    return as_text(expression, kind, zone)


def as_text(expression: str, kind: "DataType", zone: str) -> "Column":
    """Return a column's text. Raise ``JobError`` by its name if there is none."""
    from pyspark.sql import functions as F  # noqa: N812

    try:
        return text_of(F.col(expression), kind, zone)
    except JobError as error:
        raise JobError(f"column {expression.replace('`', '')!r}: {error}") from error


def _message(role: str, text: "Column") -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return F.struct(F.lit(role).alias("role"), text.alias("content"))


def rendered(template: str, schema: "StructType", zone: str) -> "Column":
    """Return a template's text as a string column; the template need not name a column."""
    return _concatenated(parse_template(template, schema, needs_column=False), zone)


def first_null(template: str, schema: "StructType") -> "Column":
    """Return the name of the template's first column that is null, or null if none is."""
    from pyspark.sql import functions as F  # noqa: N812

    parts = parse_template(template, schema, needs_column=False)
    columns = [part.column for part in parts if part.column is not None]
    names = [F.when(F.col(column).isNull(), F.lit(column.replace("`", ""))) for column in columns]
    return F.coalesce(*names, F.lit(None).cast("string"))


def _concatenated(parts: "Sequence[TemplatePart]", zone: str) -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return F.concat(
        *(
            F.lit(part.text)
            if part.column is None or part.kind is None
            else as_text(part.column, part.kind, zone)
            for part in parts
        )
    )


def resolve_column(name: str, schema: "StructType") -> tuple[str, "DataType"]:
    """Return (expression, type) of a column or, for ``a.b``, of a struct's field; like Spark, ignore case.

    ``a.b`` is a column of that name if no struct ``a`` has a field ``b``, and so is a name in backticks in any case.
    ``JobError`` names the columns that exist, and the one that was probably meant.
    """
    from pyspark.sql.types import StructType

    if (column := _found(name, schema)) is not None:
        return column
    first, dot, rest = name.partition(".")
    outer = find_field(first, schema) if dot else None
    if outer is not None and isinstance(outer.dataType, StructType):
        return resolve_column(rest, outer.dataType)
    hint = did_you_mean(name, schema.names)
    raise JobError(f"there is no column {name!r}.{hint} The columns are: {', '.join(schema.names)}")


def _found(name: str, schema: "StructType") -> "tuple[str, DataType] | None":
    from pyspark.sql.types import StructType

    if "`" in name and (inside := _on_path(split_names(name, "."), schema)) is not None:
        return inside
    for match in re.finditer(r"\.", name):
        outer = find_field(name[: match.start()], schema)
        if outer is None or not isinstance(outer.dataType, StructType):
            continue
        if (inner := _found(name[match.end() :], outer.dataType)) is not None:
            return f"{quoted(outer.name)}.{inner[0]}", inner[1]
    column = find_field(name, schema)
    return None if column is None else (quoted(column.name), column.dataType)


def _on_path(names: Sequence[str], schema: "StructType") -> "tuple[str, DataType] | None":
    """Return the field to which these names lead, one in the other; None if there is none."""
    from pyspark.sql.types import StructType

    first, *rest = names
    if (column := find_field(first, schema)) is None:
        return None
    if not rest:
        return quoted(column.name), column.dataType
    inner = _on_path(rest, column.dataType) if isinstance(column.dataType, StructType) else None
    return None if inner is None else (f"{quoted(column.name)}.{inner[0]}", inner[1])


def resolve_names(names: Sequence[str], schema: "StructType") -> list[str]:
    """Return the names that these top-level columns have in the schema. Raise ``JobError`` if one does not exist."""
    resolved = []
    for name in names:
        column = find_field(name, schema)
        if column is None and len(path := split_names(name, ".")) == 1:
            column = find_field(path[0], schema)
        if column is None:
            resolve_column(name, schema)
            raise JobError(f"{name!r} is a field of a struct; name a column of the table itself")
        resolved.append(column.name)
    return resolved


def find_field(name: str, schema: "StructType") -> "StructField | None":
    """Return the field with exactly this name, otherwise the single field that differs only in case, otherwise None."""
    exact = [column for column in schema.fields if column.name == name]
    same = exact or [column for column in schema.fields if column.name.lower() == name.lower()]
    return same[0] if len(same) == 1 else None


def _messages(name: str, schema: "StructType", zone: str) -> "Column":
    """Return the conversations with all their fields; ``executor.conversations`` reads them."""
    from pyspark.sql import functions as F  # noqa: N812

    expression, message_type = _message_type(name, schema)
    for field in message_type.fields:
        if not _is_variant(field):
            _check_passable(name, field)
    if _has_parts(message_type) and not any(map(_is_variant, message_type.fields)):
        return F.col(expression)
    return F.transform(
        F.col(expression),
        lambda message: F.struct(*(_field(message, field, zone) for field in message_type.fields)),
    )


def _field(message: "Column", field: "StructField", zone: str) -> "Column":
    """Return a message's field as the tasks read it: role and content as text, a variant as JSON text."""
    from pyspark.sql.types import ArrayType

    value = message[field.name]
    if field.name in ("role", "content") and not isinstance(field.dataType, ArrayType):
        try:
            value = text_of(value, field.dataType, zone)
        except JobError as error:
            raise JobError(f"the {field.name} of messages: {error}") from error
    elif _is_variant(field):
        value = variant_as_json(value)
    return value.alias(field.name)


def _is_variant(field: "StructField") -> bool:
    return field.name == "tool_calls" and field.dataType.typeName() == "variant"


def _check_passable(column: str, field: "StructField") -> None:
    """Raise ``JobError`` for a field of messages whose type does not reach the tasks."""
    try:
        arrow_type(field.dataType)
    except JobError:
        raise JobError(
            f"the field {field.name!r} of messages-column {column!r} is of type {field.dataType.simpleString()}, which "
            "cannot be passed on to the chat template; leave it out"
        ) from None


def _has_parts(message: "StructType") -> bool:
    from pyspark.sql.types import ArrayType

    return isinstance(message["content"].dataType, ArrayType)


def _message_type(name: str, schema: "StructType") -> tuple[str, "StructType"]:
    """Return a messages column as an expression, and the struct type of one message."""
    from pyspark.sql.types import ArrayType, StructType

    expression, kind = resolve_column(name, schema)
    message = kind.elementType if isinstance(kind, ArrayType) else None
    if not isinstance(message, StructType) or not {"role", "content"} <= set(message.names):
        raise JobError(
            f"messages-column {name!r} is of type {kind.simpleString()}, must be array<struct<role:string,"
            "content:string>>"
        )
    content = message["content"].dataType
    if isinstance(content, ArrayType) and not _is_part(content.elementType):
        raise JobError(
            f"the content of messages-column {name!r} is of type {content.simpleString()}, must be string, or an array "
            "of structs with text, and with image_url or image"
        )
    return expression, message


def _is_part(kind: "DataType") -> bool:
    from pyspark.sql.types import StructType

    return isinstance(kind, StructType) and not {"text", "image_url", "image"}.isdisjoint(kind.names)
