"""Rows, lines and answers that nobody would write: each ends as a request, a value or its own error.

Seeded, 10,000 of each kind, in the very functions that tasks and the engine server call.
"""

import json
import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from pipemax.answers.validity import fault_of, vote_of
from pipemax.generation import GenerationRequest, RequestError, Sampling
from pipemax.serve.rows.arrow_rows import requests_of
from pipemax.wire import OVERRIDES_TYPE, ErrorCode
from pipemax_spark.executor.conversations import FIELDS
from pipemax_spark.executor.openai_batch import parsed_lines
from pipemax_spark.executor.requests import request_batch
from pipemax_spark.executor.response_format import compile_schema
from pipemax_spark.executor.task import parsed_texts

COUNT = 10_000
ODD_BYTES = [
    *(b"\xff", b"\xc3", b"\xed\xa0\xbc", b"\x00", b"\xf0\x9f\x98\x80", b"\xef\xbb\xbf", b"\xe2\x80\xa8"),
    *(b"fine", b"", b" ", b"n/a", b"4", b"-1", b"1e999", b'"', b"\\ud83c", b"</s>"),
    *(b"[" * 2_000, b"{" * 50, b"9" * 5_000),
]
ODD_NUMBERS = [0, 1, -1, 4.0, 2**31, 2**63, -(2**63), 10**400, 1e308, 1e-320, 0.1, True, False]
ODD_JSON = [
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "null", "[]", "{}", '""', "true", "-0"),
    *('"\\ud83c"', '"\\udc00\\ud83c"', '"\\u0000"'),
    *("1" * 5_000, "[" * 5_000, '{"a":' * 3_000),
    *("[" * 400 + "]" * 400, '{"next":' * 300 + "null" + "}" * 300),
]


def some_bytes(rng: random.Random) -> bytes:
    return b"".join(rng.choices(ODD_BYTES, k=rng.randint(0, 3)))


def column(values: list[bytes | None]) -> pa.Array:
    """Text as Spark hands it over: bytes that nobody has checked."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


def optional(rng: random.Random, value: Any) -> Any:
    return None if rng.random() < 0.1 else value


def some_json(rng: random.Random, depth: int = 0) -> str:
    """A text that may be JSON."""
    match rng.randint(0, 9):
        case 0 | 1 if depth < 3:
            parts = (
                f"{some_json(rng, depth + 3)}:{some_json(rng, depth + 1)}" for _ in range(rng.randint(0, 3))
            )
            return "{" + ",".join(parts) + "}"
        case 2 if depth < 3:
            return "[" + ",".join(some_json(rng, depth + 1) for _ in range(rng.randint(0, 3))) + "]"
        case 3:
            return str(rng.choice(ODD_NUMBERS)) if rng.random() < 0.9 else ""
        case 4 | 5:
            return json.dumps(rng.choice(["text", "map", "x", "next", "n", "a", "\ud83c", "é", ""]))
        case _:
            return rng.choice(ODD_JSON)


def checked(error: RequestError) -> None:
    error.message.encode()
    assert ErrorCode(error.code)
    assert error.message


def column_of_options(rng: random.Random, kind: pa.DataType, rows: int) -> pa.Array:
    if pa.types.is_string(kind):
        return column([optional(rng, some_bytes(rng)) for _ in range(rows)])
    if pa.types.is_boolean(kind):
        return pa.array([optional(rng, rng.random() < 0.5) for _ in range(rows)], kind)
    if pa.types.is_list(kind) and pa.types.is_integer(kind.value_type):
        return pa.array([optional(rng, [4, -1, 2**31 - 1][: rng.randint(0, 3)]) for _ in range(rows)], kind)
    if pa.types.is_list(kind):
        texts = column([some_bytes(rng) for _ in range(rows)])
        return pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), texts)
    if pa.types.is_decimal(kind):
        return pa.array(
            [optional(rng, Decimal(rng.choice(["0", "4.50", "1E+20"]))) for _ in range(rows)], kind
        )
    if pa.types.is_floating(kind):
        numbers = [0.5, 4.0, float("nan"), float("inf"), -1.0, 2.0**62, 1e300]
        return pa.array([optional(rng, rng.choice(numbers)) for _ in range(rows)], kind)
    return pa.array([optional(rng, rng.choice([0, 4, -1, 2**31, 2**63 - 1])) for _ in range(rows)], kind)


_WHOLE = [pa.int64(), pa.float64(), pa.string(), pa.decimal128(38, 2)]


def types_of_options(wanted: pa.DataType) -> list[pa.DataType]:
    """Types of columns that may hold a setting's values."""
    if pa.types.is_list(wanted):
        return [*types_of_options(wanted.value_type)[-1:], pa.list_(wanted.value_type)]
    if pa.types.is_integer(wanted):
        return _WHOLE
    return [pa.float64(), pa.string()] if pa.types.is_floating(wanted) else [wanted, pa.string()]


OPTION_TYPES = {option.name: types_of_options(option.type) for option in OVERRIDES_TYPE}


def some_options(rng: random.Random, rows: int) -> pa.Array:
    names = rng.sample(OVERRIDES_TYPE.names, rng.randint(1, 4))
    return pa.StructArray.from_arrays(
        [column_of_options(rng, rng.choice(OPTION_TYPES[name]), rows) for name in names], names=names
    )


def some_conversations(rng: random.Random, rows: int) -> pa.Array:
    texts = {
        name: column([optional(rng, some_bytes(rng)) for _ in range(rows)]) for name in ("role", "content")
    }
    for name in ("tool_calls", FIELDS):
        read = [optional(rng, some_json(rng).encode(errors="replace")) for _ in range(rows)]
        texts[name] = column(read)
    texts["weight"] = pa.array([optional(rng, rng.choice([0.5, float("nan")])) for _ in range(rows)])
    texts["raw"] = pa.array([None if rng.random() < 0.9 else b"\xff" for _ in range(rows)], pa.binary())
    if rng.random() < 0.5:
        del texts[FIELDS]
    turns = pa.StructArray.from_arrays([*texts.values()], names=[*texts])
    return pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), turns)


def test_no_row_raises_on_its_way_to_the_engine() -> None:
    rng = random.Random(0)
    size, kinds = 100, set()
    for number in range(COUNT // size):
        texts = (
            {} if number % 2 else {"prompt": column([optional(rng, some_bytes(rng)) for _ in range(size)])}
        )
        if number % 2:
            texts["messages"] = some_conversations(rng, size)
        elif number % 4 == 0:
            paths = column([some_bytes(rng) for _ in range(size)])
            offsets = pa.array(
                [None if rng.random() < 0.1 else row for row in range(size)] + [size], pa.int32()
            )
            texts["images"] = rng.choice([paths, pa.ListArray.from_arrays(offsets, paths)])
        batch = request_batch(0, size, overrides=some_options(rng, size), **texts)
        requests, faults = requests_of(
            batch, job=Sampling(seed=1, temperature=0.5), system=None, id_prefix=""
        )
        assert sorted([*(int(each.request_id) for each in requests), *(row for row, _ in faults)]) == list(
            range(size)
        )
        for _, fault in faults:
            checked(fault)
            kinds.add(fault.code)
        assert all(isinstance(each, GenerationRequest) for each in requests)
    assert kinds == {"invalid_prompt", "invalid_parameter", "invalid_image"}


def test_no_line_of_a_batch_file_raises() -> None:
    rng = random.Random(0)
    good = {
        "custom_id": "ID",
        "body": {"messages": [{"role": "user", "content": "CONTENT"}], "max_tokens": 7},
    }
    lines: list[bytes | None] = []
    for number in range(COUNT):
        text = json.dumps(good)
        if rng.random() < 0.9:
            text = text.replace('"CONTENT"', some_json(rng)).replace("ID", f"r{number}")
        if rng.random() < 0.3:
            text = text.replace("7", some_json(rng))
        if rng.random() < 0.2:
            text = text.replace('"max_tokens"', some_json(rng))
        line = text.encode(errors="replace")
        if rng.random() < 0.2:
            place = rng.randrange(len(line))
            line = line[:place] + some_bytes(rng) + line[place + rng.randint(0, 2) :]
        lines.append(line)
    (batch,) = parsed_lines(iter([pa.RecordBatch.from_arrays([column(lines)], ["value"])]))
    rows = batch.to_pylist()
    assert len(rows) == COUNT
    for row in rows:
        assert row["fault"] is not None or row["custom_id"]
        if row["row_fault"] is not None:
            checked(RequestError(**row["row_fault"]))
    good_rows = [row for row in rows if row["fault"] is None and row["row_fault"] is None]
    assert 0 < len(good_rows) < COUNT
    columns = {name: batch.column(name) for name in ("messages", "overrides")}
    _, faults = requests_of(
        request_batch(0, COUNT, **columns, fault=batch.column("row_fault")),
        job=Sampling(),
        system=None,
        id_prefix="",
    )
    for _, fault in faults:
        checked(fault)


SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "text": {"type": "string", "pattern": "^[a-z]*$"},
            "map": {"type": "object", "additionalProperties": {"type": "number"}},
            "x": {"type": "number", "multipleOf": 0.5},
            "n": {"type": "integer", "multipleOf": 3},
            "next": {"$ref": "#"},
        },
    },
    {"type": "array", "items": {"$ref": "#"}},
    {
        "type": "object",
        "additionalProperties": {"type": "string", "x-spark-type": "timestamp", "format": "date-time"},
    },
    {"enum": ["text", "map", 1, None]},
    {},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_no_answer_raises_where_it_is_parsed_or_judged(schema: dict[str, Any]) -> None:
    rng = random.Random(0)
    texts = [some_json(rng) for _ in range(COUNT // len(SCHEMAS))]
    texts += ['{"x": 1e999}', '{"n": 1e999}', "[" * 400 + "]" * 400, "[" * 5_000]
    parser = compile_schema(schema)
    values, faults = parsed_texts(parser, pa.array(texts))
    assert (len(values), values.type) == (len(texts), parser.arrow_type)
    for fault in faults:
        if fault is not None:
            checked(fault)
            assert fault.code == ErrorCode.RESPONSE_FORMAT
    sampling = Sampling(response_format=json.dumps(schema))
    for text in texts:
        told = fault_of(text, "stop", sampling)
        if told is None:
            vote_of(text, sampling)
        else:
            told.encode()
