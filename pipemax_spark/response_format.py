"""From a JSON schema to the type of ``annotation.parsed``, and from an output's text to a value of it.

| JSON schema | Spark |
|---|---|
| object with properties | struct of them, in the schema's order |
| object without, with additionalProperties: {schema} | map<string, …> |
| array | array<items> |
| string, enum and const of strings | string |
| integer | bigint |
| number | double |
| boolean | boolean |
| ["…", "null"], anyOf with null | the other, nullable |
| anything else ($ref, other unions, mixed enums) | string that holds the JSON |

Every field is nullable, since properties may be left out.
"""

import json
from typing import Any

import pyarrow as pa


def arrow_type(schema: Any) -> pa.DataType:
    """The type of values that the schema describes."""
    if not isinstance(schema, dict):
        return pa.string()
    schema = _without_null(schema)
    match schema.get("type"):
        case "object" if schema.get("properties"):
            return pa.struct([(name, arrow_type(part)) for name, part in schema["properties"].items()])
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return pa.map_(pa.string(), arrow_type(schema["additionalProperties"]))
        case "array" if isinstance(schema.get("items"), dict):
            return pa.list_(arrow_type(schema["items"]))
        case "integer":
            return pa.int64()
        case "number":
            return pa.float64()
        case "boolean":
            return pa.bool_()
        case _:
            return pa.string()


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema.get("type")
    if isinstance(kinds, list):
        rest = [kind for kind in kinds if kind != "null"]
        return {**schema, "type": rest[0] if len(rest) == 1 else None}
    options = schema.get("anyOf")
    if kinds is None and isinstance(options, list):
        rest = [option for option in options if option != {"type": "null"}]
        if len(rest) == 1 and isinstance(rest[0], dict):
            return rest[0]
    return schema


def parse(text: str, expected: pa.DataType) -> Any:
    """The value, as pyarrow takes it for ``expected``. ``ValueError`` says what does not fit."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the output is no JSON ({error}); was it cut by max_tokens?") from error
    return _convert(value, expected, "output")


def _convert(value: Any, expected: pa.DataType, where: str) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(expected) and isinstance(value, dict):
        return {
            field.name: _convert(value.get(field.name), field.type, f"{where}.{field.name}")
            for field in expected
        }
    if pa.types.is_map(expected) and isinstance(value, dict):
        return [(name, _convert(part, expected.item_type, f"{where}.{name}")) for name, part in value.items()]
    if pa.types.is_list(expected) and isinstance(value, list):
        return [_convert(part, expected.value_type, f"{where}[{i}]") for i, part in enumerate(value)]
    if pa.types.is_string(expected):
        return value if isinstance(value, str) else json.dumps(value)
    if pa.types.is_boolean(expected) and isinstance(value, bool):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if pa.types.is_floating(expected) and is_number:
        return float(value)
    if pa.types.is_integer(expected) and is_number and value == int(value) and abs(value) < 2**63:
        return int(value)
    raise ValueError(f"{where} is {json.dumps(value)[:80]}, which is no {expected}")


def load_schema(text: str) -> dict[str, Any]:
    """A schema from its text; ``ValueError`` where it cannot be one. The engine's side checks it in full."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"response-format is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(
            f"response-format must be a JSON object that holds a schema, got {json.dumps(schema)[:80]}"
        )
    return schema
