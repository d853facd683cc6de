"""Users' columns of conversations become those of requests, with every field of a message."""

import json
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax.generation import Sampling
from pipemax.serve.rows.arrow_rows import requests_of
from pipemax_spark.errors import JobError
from pipemax_spark.executor.conversations import messages_of
from pipemax_spark.executor.requests import request_batch


def fields(kind: pa.DataType, value: Any, name: str = "extra") -> Any:
    """The further fields of a message with one, or the row's error."""
    message = pa.struct([("role", pa.string()), ("content", pa.string()), (name, kind)])
    turns = pa.array([[{"role": "user", "content": "x", name: value}]], pa.list_(message))
    messages, (fault,) = messages_of(turns)
    if fault is not None:
        assert (messages.to_pylist(), fault.code) == ([None], "invalid_prompt")
        return fault.message
    (turn,) = messages.to_pylist()[0]
    return None if turn["fields"] is None else json.loads(turn["fields"])[name]


CALLS = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
ARROW_CALLS = pa.list_(
    pa.struct(
        [
            ("id", pa.string()),
            ("type", pa.string()),
            ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
        ]
    )
)


@pytest.mark.parametrize(
    ("kind", "value", "travels"),
    [
        (pa.string(), "Ada", "Ada"),
        (pa.string(), None, None),
        (pa.int64(), 3, 3),
        (pa.bool_(), False, False),
        (pa.float64(), 0.5, 0.5),
        (pa.decimal128(20, 10), Decimal(0), 0),
        (pa.decimal128(20, 2), Decimal("1.50"), 1.5),
        (pa.date32(), date(2026, 1, 2), "2026-01-02"),
        (
            pa.timestamp("us", tz="Europe/Berlin"),
            datetime(2026, 1, 2, tzinfo=UTC),
            "2026-01-02T00:00:00+00:00",
        ),
        (pa.timestamp("us"), datetime(2026, 1, 2), "2026-01-02T00:00:00"),
        (pa.list_(pa.string()), [], None),
        (pa.list_(pa.string()), ["a", None], ["a", None]),
        (pa.map_(pa.string(), pa.int32()), [("a", 1)], {"a": 1}),
        (pa.map_(pa.string(), pa.int32()), [], None),
        (pa.struct([("a", pa.int32()), ("b", pa.int32())]), {"a": 1, "b": None}, {"a": 1}),
        (ARROW_CALLS, CALLS, CALLS),
    ],
)
def test_a_field_of_any_type_travels_as_json(kind: pa.DataType, value: Any, travels: Any) -> None:
    assert fields(kind, value) == travels


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.binary(), b"x"),
        (pa.float64(), float("nan")),
        (pa.duration("us"), timedelta(1)),
        (pa.list_(pa.binary()), [b"x"]),
    ],
)
def test_a_field_that_json_cannot_hold_is_its_row_s_error_by_name(kind: pa.DataType, value: Any) -> None:
    assert "the field 'extra' of a message cannot be passed on" in fields(kind, value)


def test_tool_calls_may_be_json_text_where_their_arguments_differ() -> None:
    assert fields(pa.string(), json.dumps(CALLS), "tool_calls") == CALLS
    assert fields(pa.string(), "", "tool_calls") is None
    assert "'tool_calls' of a message is a text, but no JSON array" in fields(
        pa.string(), "f()", "tool_calls"
    )


def test_nulls_are_kept_where_the_user_has_written_them() -> None:
    written = [{"function": {"name": "f", "arguments": {"unit": None}}}]
    assert fields(pa.string(), json.dumps(written), "tool_calls") == written


def test_bytes_that_are_no_utf8_are_their_row_s_error() -> None:
    texts = pa.Array.from_buffers(pa.string(), 2, pa.array([b"h\xff", b"fine"], pa.binary()).buffers())
    turns = pa.StructArray.from_arrays([pa.array(["user", "user"]), texts], names=["role", "content"])
    messages, (fault, none) = messages_of(pa.ListArray.from_arrays(pa.array([0, 1, 2]), turns))
    assert fault is not None
    assert (fault.code, none) == ("invalid_prompt", None)
    assert "not UTF-8" in fault.message
    assert messages.to_pylist()[1][0]["content"] == "fine"


def test_a_part_with_a_text_and_an_image_is_an_error_not_half_a_part() -> None:
    turns = [{"role": "user", "content": [{"text": "caption", "image": b"x"}]}]
    _, (fault,) = messages_of(pa.array([turns]))
    assert fault is not None
    assert "a text and an image" in fault.message


MESSAGE = {"role": pa.string(), "content": pa.string()}


def part(**fields: pa.DataType) -> dict[str, pa.DataType]:
    return {"content": pa.list_(pa.struct([*fields.items()]))}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"role": pa.int32()}, "the role of a message is of the type int32"),
        ({"content": pa.int64()}, "the content of a message is of the type int64"),
        ({"content": pa.binary()}, "the content of a message is of the type binary"),
        (part(text=pa.int64()), "the parts of a message are of the type"),
        (part(image=pa.string()), "the parts of a message are of the type"),
        (part(image_url=pa.struct([("url", pa.int32())])), "the parts of a message are of the type"),
        (part(text=pa.string(), type=pa.int32()), "the parts of a message are of the type"),
        (part(sound=pa.string()), "the parts of a message are of the type"),
    ],
)
def test_a_column_of_a_type_that_holds_no_conversation_is_refused(
    changes: dict[str, pa.DataType], told: str
) -> None:
    kind = pa.list_(pa.struct([*(MESSAGE | changes).items()]))
    with pytest.raises(JobError, match=told):
        messages_of(pa.nulls(1, kind))


_TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)
_PARTS = st.lists(
    _TEXTS.map(lambda text: {"type": "text", "text": text, "image_url": None, "image": None})
    | _TEXTS.map(lambda source: {"type": None, "text": None, "image_url": source, "image": None})
    | st.just({"type": None, "text": None, "image_url": None, "image": b"x"}),
    max_size=3,
)
_TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "tool"]),
            "content": st.none() | _PARTS,
            "name": st.none() | _TEXTS,
            "tool_call_id": st.none() | _TEXTS,
        }
    ),
    max_size=3,
)


@given(st.lists(st.none() | _TURNS, min_size=1, max_size=5))
def test_a_row_s_request_is_the_same_alone_and_in_any_table(rows: list[Any]) -> None:
    def requests(conversations: list[Any]) -> list[Any]:
        # pyarrow takes the types from the values, so a row alone may have other ones than in a table.
        try:
            column = pa.array(conversations)
            batch = request_batch(0, len(conversations), messages=column)
        except JobError:
            return ["refused"] * len(conversations)
        made, faults = requests_of(batch, job=Sampling(seed=3, temperature=0.5), system=None, id_prefix="")
        found = {int(one.request_id): replace(one, request_id="") for one in made}
        return [found.get(row, dict(faults).get(row)) for row in range(len(conversations))]

    together = requests(rows)
    if together[0] == "refused":  # no row of this table has a part or a turn, which Spark's types would show
        return
    for row, conversation in enumerate(rows):
        alone = requests([conversation])
        assert alone in ([together[row]], ["refused"])
