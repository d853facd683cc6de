"""Convert users' columns of images and of conversations into those of a request.

An image is its bytes (binary) or where it is (string); a row has one, or an array of them. A conversation's content is
text, or an array of parts as OpenAI writes them: structs with ``text``, and with ``image_url`` (a string, or a struct
with ``url``) or ``image`` (binary).
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipemax.wire import IMAGE_TYPE, MESSAGE_TYPE
from pipemax_spark.errors import JobError

_PART_TYPES = ("text", "image_url", "input_text", "input_image")
"""What ``type`` of a part may say."""


def images_of(column: pa.Array) -> pa.ListArray:
    """Return each row's images. A null is an image that is missing; an empty array has none.

    Raise ``JobError`` for a column of another type.
    """
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        # A null array is one missing image too: a row that lost its images must not be answered without them.
        lengths = pc.fill_null(pc.list_value_length(column), 1).cast(pa.int32())
        if column.null_count:
            taken = [[None] if row is None else row for row in column.to_pylist()]
            column = pa.array(taken, pa.list_(kind.value_type))
        images = _images(column.flatten(), kind)
    else:
        lengths = pa.repeat(pa.scalar(1, pa.int32()), len(column))
        images = _images(column, kind)
    ends = pc.cumulative_sum(lengths).cast(pa.int32())
    return pa.ListArray.from_arrays(pa.concat_arrays([pa.array([0], pa.int32()), ends]), images)


def messages_of(column: pa.Array) -> pa.Array:
    """Return conversations as requests have them. Raise ``JobError`` for a column of another type."""
    kind = column.type
    wanted = pa.list_(MESSAGE_TYPE)
    if kind == wanted:
        return column
    if pa.types.is_null(kind):
        return pa.nulls(len(column), wanted)
    message = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    names = [field.name for field in message] if message is not None and pa.types.is_struct(message) else []
    if not {"role", "content"} <= set(names):
        raise JobError(f"a conversation is of the type {kind}; give array<struct<role, content>>")
    assert message is not None
    if pa.types.is_list(message.field("content").type):
        _check_part(message.field("content").type.value_type)
    return pa.array(
        [None if row is None else [_message(turn) for turn in row] for row in column.to_pylist()], wanted
    )


def is_image(kind: pa.DataType) -> bool:
    """Tell whether a column of this type can hold images."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    return any(check(kind) for check in checks)


def _images(values: pa.Array, kind: pa.DataType) -> pa.StructArray:
    nulls = pa.nulls(len(values), pa.binary()), pa.nulls(len(values), pa.string())
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        columns = [values.cast(pa.binary()), nulls[1]]
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        columns = [nulls[0], values.cast(pa.string())]
    elif pa.types.is_null(values.type):
        columns = [*nulls]
    else:
        raise JobError(f"images are of the type {kind}; give binary or string, or an array of them")
    return pa.StructArray.from_arrays(columns, fields=list(IMAGE_TYPE))


def _check_part(kind: pa.DataType) -> None:
    names = [field.name for field in kind] if pa.types.is_struct(kind) else []
    if not {"text", "image_url", "image"} & set(names):
        raise JobError(
            f"the parts of a message are of the type {kind}; give structs with text, and with image_url or image"
        )


def _message(turn: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if turn is None:
        return None
    content = turn["content"]
    if isinstance(content, list):
        return {"role": turn["role"], "content": None, "parts": [_part(part) for part in content]}
    return {"role": turn["role"], "content": content, "parts": None}


def _part(part: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a part as a request has it; one of another type has neither text nor image, which is its row's error."""
    if part is None or part.get("type") not in (None, *_PART_TYPES):
        return None
    url = part.get("image_url")
    source = url.get("url") if isinstance(url, Mapping) else url
    image = {"content": part.get("image"), "source": source}
    has_image = image["content"] is not None or source is not None
    return {"text": None if has_image else part.get("text"), "image": image if has_image else None}
