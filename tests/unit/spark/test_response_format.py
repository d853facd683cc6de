"""A JSON schema's Spark type, and outputs that fit it or do not."""

import json

import pyarrow as pa
import pytest

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
        ('{"$ref": "http://x/y"}', "only references by path within the schema"),
        (
            '{"$ref": "#place", "$defs": {"p": {"$anchor": "place"}}}',
            "the \\$ref '#place'; only references by path",
        ),
        ('{"anyOf": [{"items": [{"$ref": "#a"}]}, {}]}', "'#a'; only references by path"),
        ('{"$dynamicRef": "#a"}', "the \\$dynamicRef '#a'"),
        ('{"$recursiveRef": "#"}', "the \\$recursiveRef '#'"),
        ('{"type": "object", "properties": {"\\ud83c": {}}}', "lone surrogate"),
        ('{"enum": ["\\ud83c"]}', "lone surrogate"),
        ('{"items": ' * 2_000 + "{}" + "}" * 2_000, "nested too deeply|not JSON"),
        ('{"$ref": "#/none"}', "which the schema does not hold"),
        ('{"type": "object", "properties": {"A": {}, "a": {}}}', "differ only in case"),
    ],
)
def test_a_schema_that_no_table_can_hold_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        compile_schema(load_schema(text))


def test_references_by_path_go_through_lists_and_escapes() -> None:
    parts = {"a/b %": {"type": "integer"}, "list": [{"type": "boolean"}]}
    schema = {
        "type": "object",
        "properties": {
            "n": {"$ref": "#/x/a~1b%20%25"},
            "b": {"$ref": "#/x/list/0"},
            "$ref": {"type": "string"},
        },
        "x": parts,
    }
    names = {"n": pa.int64(), "b": pa.bool_(), "$ref": pa.string()}
    assert compile_schema(schema).arrow_type == pa.struct([*names.items()])


FREE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "map": {"type": "object", "additionalProperties": {"type": "string"}},
        "json": {},
        "list": {"type": "array", "items": {"type": "string"}},
    },
}


def test_lone_surrogates_become_question_marks_wherever_they_stand() -> None:
    text = json.dumps(
        {"text": "a\ud83c", "map": {"\udc00": "\ud83c"}, "json": ["\ud83c"], "list": ["\ud83c"]}
    )
    parser = compile_schema(FREE)
    (value,) = pa.array([parse(text, parser)], parser.arrow_type).to_pylist()
    assert value == {"text": "a?", "map": [("?", "?")], "json": '["?"]', "list": ["?"]}
    pair = parse(json.dumps({"text": "\U0001f600"}), parser)
    assert pair["text"] == "\U0001f600", "a whole pair is a character"  # type: ignore[index]


@pytest.mark.parametrize(
    "text",
    [
        '{"map": {"\\ud83c": 1}}',
        '{"text": {"\\ud83c": 1}}',
        '{"map": {"\\ud83c": "a", "\\ud83d": "b"}}',
        '{"list": ["\\ud83c", 1]}',
        '{"json": ' + "[" * 900 + "]" * 900 + "}",
        '{"text": ' + "[" * 900 + "]" * 900 + "}",
        '{"text": ' + "1" * 5_000 + "}",
    ],
)
def test_an_error_s_message_can_be_stored(text: str) -> None:
    parser = compile_schema(FREE)
    try:
        pa.array([parse(text, parser)], parser.arrow_type)
    except ValueError as error:
        pa.array([str(error)])


def test_a_schema_that_refers_to_itself_ends_in_json_text() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}}
    parser = compile_schema(tree)
    text = '{"child": {"child": {"child": null}}}'
    assert json.loads(parse(text, parser)["child"]["child"]) == {"child": None}
