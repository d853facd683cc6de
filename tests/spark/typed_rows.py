"""Rows of every type that tables store, as SQL: equal texts are equal values, and other texts are other values."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

_EDGE_DAYS = [-719_893, -719_529, -141_428, -141_427, -25_509, 0, 2_932_896, 2_932_897, 3_652_059]
"""Of the years before 0, 1582 and its missing days, 1900, 9999 and later."""
_EDGE_MICROS = [
    1_761_438_600_000_000,  # 02:30 in Berlin, for the first time
    1_761_442_200_000_000,  # and an hour later again
    1_761_442_200_123_456,
    -62_293_190_400_000_000,  # in the year -4
    -12_219_638_400_000_000,  # on one of the days that 1582 lacked
    -2_500_000_000_000_001,
    316_516_204_800_000_000,  # in the year 12000
    1,
    123_456,
]
_EDGE_BYTES = [
    "",
    "41",
    "4120",
    "61C3A4",
    "68FF69",
    "68FE69",
    "EDA0BD",
    "2F3D253230",
    "5C2722",
    "C3A9F09F9880",
]
_EDGE_BYTES.append(b"__HIVE_DEFAULT_PARTITION__".hex().upper())


def _of_bytes() -> st.SearchStrategy[str]:
    some = st.binary(max_size=6).map(lambda data: data.hex().upper())
    return (st.sampled_from(_EDGE_BYTES) | some).map(lambda digits: f"X'{digits}'")


def _integers(bits: int, name: str) -> st.SearchStrategy[str]:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return (st.sampled_from([low, -1, 0, high]) | st.integers(low, high)).map(
        lambda number: f"{name}('{number}')"
    )


def _floats(width: int, name: str) -> st.SearchStrategy[str]:
    edges = [0.0, -0.0, 0.1 if width == 64 else 0.5, float("inf"), float("nan")]
    some = st.sampled_from(edges) | st.floats(width=width, allow_nan=False)  # type: ignore[arg-type]
    return some.map(lambda number: f"{name}('{number!r}')")


def _decimals(digits: int, scale: int) -> st.SearchStrategy[str]:
    unscaled = st.sampled_from([0, 1, 10**digits - 1]) | st.integers(-(10**digits) + 1, 10**digits - 1)
    return unscaled.map(
        lambda number: (
            f"CAST({'-' if number < 0 else ''}{abs(number) // 10**scale}"
            + (f".{abs(number) % 10**scale:0{scale}d}" if scale else "")
            + f"BD AS DECIMAL({digits},{scale}))"
        )
    )


_MICROS = st.sampled_from(_EDGE_MICROS) | st.integers(-62_200_000_000_000_000, 253_402_300_799_999_999)
SCALARS: dict[str, st.SearchStrategy[str]] = {
    "STRING": _of_bytes().map(lambda text: f"CAST({text} AS STRING)"),
    "BINARY": _of_bytes(),
    "BOOLEAN": st.sampled_from(["true", "false"]),
    "TINYINT": _integers(8, "tinyint"),
    "SMALLINT": _integers(16, "smallint"),
    "INT": _integers(32, "int"),
    "BIGINT": _integers(64, "bigint"),
    "FLOAT": _floats(32, "float"),
    "DOUBLE": _floats(64, "double"),
    "DECIMAL(5,0)": _decimals(5, 0),
    "DECIMAL(18,10)": _decimals(18, 10),
    "DECIMAL(38,18)": _decimals(38, 18),
    "DATE": (st.sampled_from(_EDGE_DAYS) | st.integers(-719_000, 2_932_896)).map(
        lambda days: f"date_from_unix_date({days})"
    ),
    "TIMESTAMP_LTZ": _MICROS.map(lambda micros: f"timestamp_micros({micros})"),
    # In UTC, where each instant is another time of the clock.
    "TIMESTAMP_NTZ": _MICROS.map(
        lambda micros: (
            f"(TIMESTAMP_NTZ'1970-01-01 00:00:00' + make_dt_interval(0, 0, 0, {micros}BD / 1000000))"
        )
    ),
}
_KEYS = [
    "STRING",
    "BINARY",
    "BOOLEAN",
    "BIGINT",
    "DECIMAL(18,10)",
    "DATE",
    "TIMESTAMP_LTZ",
    "STRUCT",
    "ARRAY",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A type, and the values of it."""

    sql: str
    values: st.SearchStrategy[str]
    """SQL of the type, or ``NULL``."""


def _nullable(kind: Kind) -> st.SearchStrategy[str]:
    return st.one_of(kind.values, kind.values, kind.values, st.just(f"CAST(NULL AS {kind.sql})"))


def scalar(name: str) -> Kind:
    return Kind(sql=name, values=SCALARS[name])


def array_of(element: Kind) -> Kind:
    sql = f"ARRAY<{element.sql}>"
    some = st.lists(_nullable(element), min_size=1, max_size=3).map(lambda them: f"array({', '.join(them)})")
    return Kind(sql=sql, values=some | st.just(f"CAST(array() AS {sql})"))


def struct_of(fields: Sequence[Kind]) -> Kind:
    sql = f"STRUCT<{', '.join(f'f{place}: {field.sql}' for place, field in enumerate(fields))}>"
    names = [f"'f{place}'" for place in range(len(fields))]
    values = st.tuples(*map(_nullable, fields)).map(
        lambda parts: f"named_struct({', '.join(itertools.chain(*zip(names, parts, strict=True)))})"
    )
    return Kind(sql=sql, values=values)


def map_of(key: Kind, value: Kind) -> Kind:
    pairs = st.tuples(key.values, _nullable(value))
    sql = f"MAP<{key.sql}, {value.sql}>"
    # One pair: two texts may be one key.
    return Kind(sql=sql, values=pairs.map(lambda pair: f"map({pair[0]}, {pair[1]})"))


@st.composite
def kinds(draw: st.DrawFn, depth: int = 2) -> Kind:
    """A type, nested at most ``depth`` deep."""
    shape = draw(st.sampled_from(["scalar", "array", "struct", "map"] if depth else ["scalar"]))
    match shape:
        case "array":
            return array_of(draw(kinds(depth - 1)))
        case "struct":
            return struct_of(draw(st.lists(kinds(depth - 1), min_size=1, max_size=3)))
        case "map":
            name = draw(st.sampled_from(_KEYS))
            inner = scalar(draw(st.sampled_from(["BINARY", "DATE", "BIGINT"])))
            key = {"STRUCT": struct_of([inner]), "ARRAY": array_of(inner)}.get(name) or scalar(name)
            return map_of(key, draw(kinds(depth - 1)))
        case _:
            return scalar(draw(st.sampled_from(sorted(SCALARS))))


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedRows:
    """Rows with a column ``n`` that numbers them, and columns ``c0``, ``c1`` and so on."""

    columns: tuple[str, ...]
    """Their types."""
    values: tuple[tuple[str, ...], ...]
    """Of each row, the SQL of its columns."""

    @property
    def ddl(self) -> str:
        return ", ".join(["n BIGINT", *(f"c{place} {kind}" for place, kind in enumerate(self.columns))])

    def frame(self, spark: Any) -> Any:
        names = ", ".join(["n", *(f"c{place}" for place in range(len(self.columns)))])
        rows = ", ".join(f"({number}L, {', '.join(row)})" for number, row in enumerate(self.values))
        casts = [f"CAST(c{place} AS {kind}) AS c{place}" for place, kind in enumerate(self.columns)]
        return spark.sql(f"SELECT n, {', '.join(casts)} FROM VALUES {rows} AS given({names})")


@st.composite
def typed_rows(draw: st.DrawFn, rows: int = 8) -> TypedRows:
    """Rows with a column of each scalar type, a map with each type of key, and some nested columns."""
    chosen = [scalar(name) for name in SCALARS]
    chosen += [map_of(scalar("BINARY"), scalar("DATE")), map_of(struct_of([scalar("INT")]), scalar("STRING"))]
    chosen += draw(st.lists(kinds(), min_size=3, max_size=6))
    values = tuple(tuple(draw(_nullable(kind)) for kind in chosen) for _ in range(rows))
    return TypedRows(columns=tuple(kind.sql for kind in chosen), values=values)
