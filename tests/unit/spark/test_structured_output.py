"""What users give as a response format, as a JSON schema, and the type that comes back from it."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa
import pytest
from pydantic import BaseModel
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pipemax.serve.schema_checks import check_response_format
from pipemax_spark.errors import JobError
from pipemax_spark.executor.json_values import Parser
from pipemax_spark.executor.response_format import compile_schema, load_schema, parse
from pipemax_spark.request.formats import response_schema

SCHEMA = {"type": "object", "properties": {"label": {"enum": ["a", "b"]}}}
ORDER = (
    StructType()
    .add("paid", BooleanType())
    .add("tiny", ByteType())
    .add("small", ShortType())
    .add("count", IntegerType(), nullable=False)
    .add("id", LongType())
    .add("share", FloatType())
    .add("price", DecimalType(10, 2))
    .add("day", DateType())
    .add("at", TimestampType())
    .add("by_shop", MapType(StringType(), DoubleType(), valueContainsNull=False))
    .add("lines", ArrayType(StructType().add("text", StringType(), nullable=False).add("n", IntegerType())))
    .add("counts", ArrayType(IntegerType(), containsNull=False))
)
OUTPUT = {
    "paid": True,
    "tiny": -128,
    "small": 32767,
    "count": 2**31 - 1,
    "id": 2**63 - 1,
    "share": 0.5,
    "price": "-12345678.9",
    "day": "2026-02-28",
    "at": "2026-02-28T12:00:00.25+02:00",
    "by_shop": {"x": 1},
    "lines": [{"text": "one", "n": None}],
    "counts": [1, 2],
}


def parser_of(given: Any) -> Parser:
    schema = response_schema(given)
    return compile_schema(load_schema(schema))


def test_the_schema_of_a_spark_type_gives_that_type_back() -> None:
    parser = parser_of(ORDER)
    assert from_arrow_type(parser.arrow_type) == ORDER
    [value] = pa.array([parse(json.dumps(OUTPUT), parser)], parser.arrow_type).to_pylist()
    assert value == {
        **OUTPUT,
        "price": Decimal("-12345678.90"),
        "day": date(2026, 2, 28),
        "at": datetime(2026, 2, 28, 10, 0, 0, 250_000, tzinfo=UTC),
        "by_shop": [("x", 1.0)],
    }


def test_the_engine_can_enforce_the_schema_of_every_type() -> None:
    schema = response_schema(ORDER)
    check_response_format(schema)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"count": None}, "output.count is null, which is not an integer"),
        ({"count": 2**31}, "not an integer of 32 bits"),
        ({"share": 1e39}, "not a number of 32 bits"),
        ({"price": "1.234"}, r"not a string with a decimal\(10,2\)"),
        ({"price": "123456789"}, r"not a string with a decimal\(10,2\)"),
        ({"day": "2026-02-31"}, "not a date"),
        ({"at": "2026-02-28T12:00:00"}, "not a time with its offset"),
        ({"at": "0001-01-01T00:00:00+14:00"}, "not a time with its offset"),
    ],
)
def test_a_value_beyond_its_spark_type_is_reported(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(json.dumps(OUTPUT | changed), parser_of(ORDER))


@pytest.mark.parametrize("rest", [{}, {"name": "labels", "strict": True, "description": "a label"}])
@pytest.mark.parametrize("write", [dict, json.dumps])
def test_an_envelope_gives_the_schema_within_it(rest: dict[str, Any], write: Any) -> None:
    envelope = {"type": "json_schema", "json_schema": {"schema": SCHEMA, **rest}}
    assert response_schema(write(envelope)) == response_schema(SCHEMA) == json.dumps(SCHEMA)


def test_the_other_envelopes_ask_for_any_object_or_any_text() -> None:
    assert response_schema({"type": "json_object"}) == '{"type": "object"}'
    assert response_schema('{"type": "text"}') is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "json_schema"}, "has no json_schema; write"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "has a json_schema without a schema; write"),
        (
            {"type": "json_schema", "json_schema": {"schema": "{}"}},
            "has a json_schema without a schema; write",
        ),
        ({"type": "json_schema", "schema": SCHEMA}, "unknown field 'schema'"),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strikt": True}},
            "unknown field 'strikt'",
        ),
        ({"json_schema": {"schema": SCHEMA}}, "its type must be 'json_schema'"),
        ({"type": "json_object", "schema": {}}, "unknown field 'schema'"),
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        (["STRING"], "is a list"),
        (StructType(), "response-format is struct<>"),
        (StructType().add("a", ArrayType(BinaryType())), r"response-format\.a\[\] is binary"),
        (StructType().add("a", TimestampNTZType()), r"response-format\.a is timestamp_ntz"),
        (MapType(IntegerType(), StringType()), "is map<int,string>"),
        (StructType().add("a", StringType()).add("A", StringType()), "differ only in case"),
        ({"type": "integer", "x-spark-type": "bigint!"}, "it may be tinyint"),
        ({"type": "integer", "x-spark-type": "decimal(39,2)"}, "1 to 38"),
        ({"type": "integer", "x-spark-type": "date"}, "goes with the type 'string'"),
        ({"type": ["integer", "null"], "x-spark-nullable": False}, "may be null"),
        (
            {"type": "object", "properties": {"a": {"type": "string", "x-spark-nullable": False}}},
            "list it in 'required'",
        ),
    ],
)
def test_a_wrong_response_format_is_refused(given: dict[str, Any] | str | DataType, told: str) -> None:
    with pytest.raises(JobError, match=told):
        response_schema(given)


def test_the_class_of_a_pydantic_model_is_its_json_schema() -> None:
    class Part(BaseModel):
        name: str
        weight: float | None = None

    class Order(BaseModel):
        kind: Literal["buy", "sell"]
        parts: list[Part]

    schema = response_schema(Order)
    assert json.loads(schema) == Order.model_json_schema()
    assert compile_schema(json.loads(schema)) is not None
    for wrong in (Part(name="x"), dict, 5):
        with pytest.raises(JobError, match=r"response_format is (a Part|the class dict|a int); give a dict"):
            response_schema(wrong)  # type: ignore[arg-type]
