"""Turn a user's response format (a JSON schema, plain or in ai_query's envelope, or a Spark type) into a JSON schema.

The JSON schema of a Spark type gives that type back (``executor.response_format``), in tasks that have no JVM: if JSON
has no such type, the schema records it in ``x-spark-type`` and ``x-spark-nullable``, which the engine ignores.

All fields of a STRUCT are required of the model. A nullable field may be null, one that is NOT NULL may not; elements
of arrays and values of maps are never null.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError, first_line
from pipemax_spark.executor.json_values import decimal_pattern
from pipemax_spark.executor.response_format import NULLABLE, SPARK_TYPE, compile_schema, load_schema
from pipemax_spark.spark.session import current_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import DataType

ResponseFormat = "Mapping[str, Any] | str | DataType | type | None"
"""The type that a function's signature shows; it is text, because a task must not need pyspark's types."""
_ENVELOPES = ("json_schema", "json_object", "text")
_WRITE = "write {'type': 'json_schema', 'json_schema': {'schema': {…}}}"
_LEAVES: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "boolean": {"type": "boolean"},
    **{
        name: {"type": "integer", "minimum": -(2**bits), "maximum": 2**bits - 1, SPARK_TYPE: name}
        for name, bits in (("tinyint", 7), ("smallint", 15), ("int", 31))
    },
    "bigint": {"type": "integer"},
    "float": {"type": "number", SPARK_TYPE: "float"},
    "double": {"type": "number"},
    "date": {"type": "string", "format": "date", SPARK_TYPE: "date"},
    "timestamp": {"type": "string", "format": "date-time", SPARK_TYPE: "timestamp"},
}


def response_schema(
    schema: "Mapping[str, Any] | str | DataType | type", session: "Callable[[], SparkSession] | None" = None
) -> str | None:
    """Return the text of the JSON schema, or None if any text will do (``{"type": "text"}``).

    Spark parses a type that is given as text, in the active session or otherwise in the one from ``session``.
    ``JobError`` says what is wrong.
    """
    try:
        schema = _of_pydantic(schema)
        if isinstance(schema, Mapping):
            return _checked(schema)
        if isinstance(schema, str):
            return (
                _checked(load_schema(schema), schema)
                if _is_json(schema)
                else _of_type(_parsed(schema, session))
            )
        return _of_type(schema)
    except ValueError as error:
        raise error if isinstance(error, JobError) else JobError(str(error)) from error


def _of_pydantic(schema: Any) -> Any:
    """Return the JSON schema of a Pydantic model's class; anything else unchanged."""
    # By its method, because this side does not need Pydantic.
    if isinstance(schema, type) and callable(make := getattr(schema, "model_json_schema", None)):
        return make()
    return schema


def is_inline(text: str) -> bool:
    """Tell whether an option's value is a schema or a Spark type itself, and not the path of a file that holds it."""
    return text.lstrip().startswith("{") or "<" in text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return text.lstrip().startswith("{")  # this is meant as JSON, so report a JSON error
    return True


def _checked(schema: Mapping[str, Any], text: str | None = None) -> str | None:
    """Return the schema's text, which is ``text`` unless the schema is in an envelope."""
    if schema.get("type") not in _ENVELOPES and "json_schema" not in schema:
        compile_schema(schema)
        return text or json.dumps(schema)
    inner = _unwrapped(schema)
    if inner is None:
        return None
    compile_schema(inner)
    return json.dumps(inner)


def _unwrapped(envelope: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema in an envelope. Its name and description reach no model; the schema is always strict."""
    kind = envelope.get("type")
    if kind not in _ENVELOPES:
        raise ValueError(
            f"response-format has a json_schema and the type {kind!r}; its type must be 'json_schema'"
        )
    _refuse_others(
        envelope, {"type", "json_schema"} if kind == "json_schema" else {"type"}, f"of type {kind!r}"
    )
    if kind != "json_schema":
        return {"type": "object"} if kind == "json_object" else None
    inner = envelope.get("json_schema")
    if not isinstance(inner, Mapping):
        raise ValueError(f"response-format of type 'json_schema' has no json_schema; {_WRITE}")
    _refuse_others(inner, {"name", "description", "schema", "strict"}, "in its json_schema")
    if not isinstance(inner.get("schema"), Mapping):
        raise ValueError(
            f"response-format of type 'json_schema' has a json_schema without a schema; {_WRITE}"
        )
    schema: Mapping[str, Any] = inner["schema"]
    return schema


def _refuse_others(schema: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(schema.keys() - known):
        raise ValueError(
            f"response-format {where} has the unknown field {unknown[0]!r}; known: {sorted(known)}"
        )


def _parsed(text: str, session: "Callable[[], SparkSession] | None") -> "DataType":
    from pyspark.errors import PySparkException
    from pyspark.sql.types import DataType

    if current_session() is None:
        if session is None:
            raise JobError(
                f"response-format {_shown(text)} is a Spark type, which only a Spark session can parse; create one"
            )
        session()
    try:
        return DataType.fromDDL(text)
    except PySparkException as error:
        raise JobError(
            f"response-format {_shown(text)} is neither a JSON schema nor a Spark type: {first_line(error)}"
        ) from error


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:79] + "…")


def _kind_shown(schema: Any) -> str:
    return f"the class {schema.__name__}" if isinstance(schema, type) else f"a {type(schema).__name__}"


def _of_type(kind: object) -> str:
    from pyspark.sql.types import DataType

    if not isinstance(kind, DataType):
        raise ValueError(
            f"response_format is {_kind_shown(kind)}; give a dict, a text, a Spark DataType or the class of a Pydantic "
            "model"
        )
    schema = _schema_of(kind, "response-format")
    compile_schema(schema)
    return json.dumps(schema)


def _schema_of(kind: "DataType", where: str) -> dict[str, Any]:
    from pyspark.sql.types import ArrayType, DecimalType, MapType, StringType, StructType

    match kind:
        case StructType() if kind.fields:
            parts = {
                field.name: _field(_schema_of(field.dataType, f"{where}.{field.name}"), field.nullable)
                for field in kind.fields
            }
            return {
                "type": "object",
                "properties": parts,
                "required": list(parts),
                "additionalProperties": False,
            }
        case ArrayType():
            items = _schema_of(kind.elementType, f"{where}[]")
            return {"type": "array", "items": items if kind.containsNull else {**items, NULLABLE: False}}
        case MapType() if kind.keyType == StringType():
            values = _schema_of(kind.valueType, f"{where}.*")
            return {
                "type": "object",
                "additionalProperties": values if kind.valueContainsNull else {**values, NULLABLE: False},
            }
        case DecimalType():
            pattern = decimal_pattern(kind.precision, kind.scale)
            return {"type": "string", "pattern": pattern, SPARK_TYPE: kind.simpleString()}
        case _ if kind.simpleString() in _LEAVES:
            return _LEAVES[kind.simpleString()]
    raise ValueError(
        f"{where} is {kind.simpleString()}, which JSON output cannot represent; the types are STRUCT with fields, "
        f"ARRAY, MAP<STRING, …>, DECIMAL, {', '.join(name.upper() for name in _LEAVES)}"
    )


def _field(schema: dict[str, Any], nullable: bool) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]} if nullable else {**schema, NULLABLE: False}
