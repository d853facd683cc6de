"""Turn values into the text that a prompt has, in one way that no setting of the session changes.

Spark's own cast to string writes the decimal 0.0000000000 as 0E-10 without ANSI mode, old dates by another calendar
under ``legacy.timeParserPolicy``, nulls in arrays by ``legacy.castComplexTypesToString``, and times in the session's
time zone. Here each value is what that cast makes of it under Spark 4's defaults, in a time zone that is given.
"""

from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError
from pipemax_spark.request.kept_by_json import types_in

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

ZONE_SETTING = "spark.sql.session.timeZone"
_NULL = "null"
_UTC = "UTC"
_CAST_ALIKE = frozenset(
    {
        *("NullType", "StringType", "CharType", "VarcharType", "BinaryType", "BooleanType"),
        *("ByteType", "ShortType", "IntegerType", "LongType", "FloatType", "DoubleType"),
        *("TimestampNTZType", "TimeType"),
        *("DayTimeIntervalType", "YearMonthIntervalType", "CalendarIntervalType"),
    }
)
"""Types whose cast to string depends on no setting; by name, because Spark 4.0 lacks some of them."""


def text_of(value: "Column", kind: "DataType", zone: str) -> "Column":
    """Return the text of a value of this type, null if it is null. Times are those that the zone's clocks show.

    A VARIANT has its times in UTC: its type does not tell whether it holds any. Raise ``JobError`` for a type whose
    values have no text.
    """
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql import types as T  # noqa: N812

    match kind:
        case T.DecimalType():
            return F.replace(F.format_number(value, max(kind.scale, 0)), F.lit(","))
        case T.DateType():
            return _date(value)
        case T.TimestampType():
            return _time(value, zone)
        case T.VariantType():
            return _variant(value)
        case T.StructType():
            return _struct(value, kind, zone)
        case T.ArrayType():
            return _listed(
                "[", F.transform(value, lambda element: _or_null(element, kind.elementType, zone)), "]"
            )
        case T.MapType():

            def pair(entry: "Column") -> "Column":
                key = _or_null(entry["key"], kind.keyType, zone)
                return F.concat(key, F.lit(" -> "), _or_null(entry["value"], kind.valueType, zone))

            return _listed("{", F.transform(F.map_entries(value), pair), "}")
        case _ if type(kind).__name__ in _CAST_ALIKE or _has_own_text(kind):
            return value.cast("string")
    raise JobError(f"of a value of type {kind.simpleString()}, no text can be made; cast it to string")


def variant_as_json(value: "Column") -> "Column":
    """Return a VARIANT as JSON text, with its times in UTC."""
    from pyspark.sql import functions as F  # noqa: N812

    return F.to_json(value, {"timeZone": _UTC})


def has_timestamp(kind: "DataType") -> bool:
    """Tell whether the type contains a timestamp with a time zone.

    ``timestamp_ntz`` looks the same in every time zone.
    """
    from pyspark.sql.types import TimestampType

    return any(isinstance(part, TimestampType) for part in types_in(kind))


def _date(value: "Column") -> "Column":
    """Return a date as ISO 8601 writes it, with a sign before years that have not four digits."""
    from pyspark.sql import functions as F  # noqa: N812

    year = F.year(value)
    sign = F.when(year > 9999, "+").when(year < 0, "-").otherwise("")
    text = F.format_string("%s%04d-%02d-%02d", sign, F.abs(year), F.month(value), F.day(value))
    return F.when(value.isNotNull(), text)


def _time(value: "Column", zone: str) -> "Column":
    """Return a point in time as the zone's clocks show it, by way of the type without a zone."""
    from pyspark.sql import functions as F  # noqa: N812

    start = F.lit("1970-01-01 00:00:00").cast("timestamp_ntz")
    in_utc = F.timestamp_add("MICROSECOND", F.unix_micros(value), start)
    return F.convert_timezone(F.lit(_UTC), F.lit(zone), in_utc).cast("string")


def _variant(value: "Column") -> "Column":
    """Return a VARIANT's text: JSON of objects and arrays, and of other values the text that these have elsewhere."""
    from pyspark.sql import functions as F  # noqa: N812

    kind = F.schema_of_variant(value)
    return (
        F.when(kind.startswith("OBJECT<") | kind.startswith("ARRAY<"), variant_as_json(value))
        .when(kind == "TIMESTAMP", _time(F.try_variant_get(value, "$", "timestamp_ltz"), _UTC))
        .when(kind == "DATE", _date(F.try_variant_get(value, "$", "date")))
        .otherwise(F.try_variant_get(value, "$", "string"))
    )


def _struct(value: "Column", kind: "StructType", zone: str) -> "Column":
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import StructField, StructType

    # By places: two fields' names may differ in nothing but case.
    places = [StructField(f"f{place}", field.dataType) for place, field in enumerate(kind.fields)]
    placed = value.cast(StructType(places))
    texts = [_or_null(placed[place.name], place.dataType, zone) for place in places]
    return F.when(value.isNotNull(), _listed("{", F.array(*texts), "}"))


def _or_null(value: "Column", kind: "DataType", zone: str) -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return F.coalesce(text_of(value, kind, zone), F.lit(_NULL))


def _listed(start: str, texts: "Column", end: str) -> "Column":
    from pyspark.sql import functions as F  # noqa: N812

    return F.concat(F.lit(start), F.array_join(texts, ", "), F.lit(end))


def _has_own_text(kind: "DataType") -> bool:
    """Tell whether the type is a user's, of a JVM class that makes its text itself."""
    from pyspark.sql.types import UserDefinedType

    return isinstance(kind, UserDefinedType) and bool(kind.scalaUDT())
