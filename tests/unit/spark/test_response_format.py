"""A JSON schema's Spark type, and outputs that fit it or do not."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemax_spark.executor.response_format import compile_schema, load_schema, parse

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": ["integer", "null"]},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        "home": {"$ref": "#/$defs/place"},
        "extra": {"type": "object", "additionalProperties": {"type": "number"}},
    },
    "required": ["name"],
    "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def test_the_type_is_the_documented_one() -> None:
    assert compile_schema(PERSON).arrow_type == pa.struct(
        [
            ("name", pa.string()),
            ("age", pa.int64()),
            ("tags", pa.list_(pa.string())),
            ("home", pa.struct([("city", pa.string())])),
            ("extra", pa.map_(pa.string(), pa.float64())),
        ]
    )


def test_a_valid_output_becomes_an_arrow_value() -> None:
    parser = compile_schema(PERSON)
    text = json.dumps({"name": "Ann", "age": None, "tags": ["b"], "home": {"city": "Ulm"}, "extra": {"x": 1}})
    value = parse(text, parser)
    assert pa.array([value], parser.arrow_type).to_pylist() == [
        {"name": "Ann", "age": None, "tags": ["b"], "home": {"city": "Ulm"}, "extra": [("x", 1.0)]}
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no json", "not JSON"),
        ('{"name": "A', r"did max_tokens cut it off\?"),
        ("{}", "lacks the required property 'name'"),
        ('{"name": 3}', r"output\.name is 3, which is not a string"),
        ('{"name": "A", "age": true}', r"output\.age is true, which is not an integer"),
        ('{"name": "A", "age": 9223372036854775808}', "64 bits"),
        ('{"name": "A", "tags": ["c"]}', r'output\.tags\[0\] is "c", which is not one of \["a", "b"\]'),
        ('{"name": "A", "extra": {"x": "1"}}', r"output\.extra\.x"),
        ('{"name": NaN}', "NaN is not allowed"),
        ("[" * 100_000, "nested too deeply|not JSON"),
    ],
)
def test_an_invalid_value_is_reported_with_its_path(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(text, compile_schema(PERSON))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "response-format is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"$ref": "http://x/y"}', "only references within the schema"),
        ('{"$ref": "#/none"}', "which the schema does not hold"),
        ('{"type": "object", "properties": {"A": {}, "a": {}}}', "differ only in case"),
    ],
)
def test_a_schema_that_no_table_can_hold_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        compile_schema(load_schema(text))


def test_a_schema_that_refers_to_itself_ends_in_json_text() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}}
    parser = compile_schema(tree)
    text = '{"child": {"child": {"child": null}}}'
    assert json.loads(parse(text, parser)["child"]["child"]) == {"child": None}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)


@settings(max_examples=50)
@given(JSON_VALUES)
def test_any_output_either_fits_the_type_or_is_refused(value: Any) -> None:
    parser = compile_schema(PERSON)
    try:
        parsed = parse(json.dumps(value), parser)
    except ValueError:
        return  # anything else that is raised would fail the task, and with it the job
    pa.array([parsed], parser.arrow_type)
