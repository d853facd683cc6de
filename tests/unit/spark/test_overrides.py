"""A struct column of options becomes the overrides of requests, and what does not fit the error of its row."""

import math
from decimal import Decimal
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

from pipemax.wire import OVERRIDES_TYPE
from pipemax_spark.errors import JobError
from pipemax_spark.executor.overrides import overrides_of

WHOLE = ("max_tokens", "top_k", "seed")
REAL = ("temperature", "top_p")


def one(name: str, value: Any, kind: pa.DataType | None = None) -> Any:
    """The value that a row's option becomes, or its error's message."""
    options = pa.array([{name: value}], None if kind is None else pa.struct([(name, kind)]))
    overrides, (fault,) = overrides_of(options)
    assert overrides.type == OVERRIDES_TYPE
    if fault is None:
        return overrides.to_pylist()[0][name]
    assert fault.code == "invalid_parameter"
    assert overrides.to_pylist() == [None]
    return fault.message


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "value",
    [4, 4.0, "4", " 4 ", "4.0", "+4", "4e0", "0.4e1", Decimal("4"), Decimal("4.00"), "0004"],
)
def test_a_whole_number_is_taken_however_it_is_written(name: str, value: Any) -> None:
    assert one(name, value) == 4


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("value", ["0.5", ".5", 0.5, "5e-1", Decimal("0.5"), " +0.50 "])
def test_a_number_is_taken_however_it_is_written(name: str, value: Any) -> None:
    assert one(name, value) == 0.5


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(
    "value",
    [
        4.5,
        math.nan,
        math.inf,
        "n/a",
        "",
        " ",
        "NaN",
        "Infinity",
        "1_000",
        "\N{ARABIC-INDIC DIGIT THREE}",
        "0x10",
        "4.5",
        "1e999",
        "1e-3",
        "true",
        "1e9999999999",
        "9" * 10_000,
        2.0**63,
        Decimal("1E+30"),
        Decimal("4.5"),
        "\N{MINUS SIGN}4",
    ],
)
def test_what_is_no_whole_number_is_an_error_of_its_row(name: str, value: Any) -> None:
    told = one(name, value)
    assert isinstance(told, str)
    assert told.startswith(f"{name} is ")
    assert len(told) < 250


@pytest.mark.parametrize(
    "value", [3_000_000_000, 2**31, 4_294_967_299, -(2**31) - 1, "2147483648", 4294967299.0]
)
def test_a_number_that_its_setting_cannot_hold_is_never_wrapped(value: Any) -> None:
    for name in ("max_tokens", "top_k"):
        assert "must be at least -2147483648 and below 2147483648" in one(name, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, "n/a", "1e999", "nan", "-inf", ""])
@pytest.mark.parametrize("name", REAL)
def test_what_is_no_finite_number_is_an_error_of_its_row(name: str, value: Any) -> None:
    assert one(name, value).startswith(f"{name} is ")


def test_a_large_seed_stays_exact() -> None:
    assert one("seed", 2**62 + 1) == 2**62 + 1
    assert one("seed", str(2**62 + 1)) == 2**62 + 1
    assert one("seed", Decimal(2**62 + 1)) == 2**62 + 1
    assert "beyond 2**53" in one("seed", 2.0**60)


def test_stop_is_a_text_or_several() -> None:
    assert one("stop", "END") == ["END"]
    assert one("stop", ["a", None, "b"]) == ["a", "b"]
    assert one("stop", []) == []


def test_only_the_row_that_does_not_fit_fails() -> None:
    options = pa.array(
        [{"max_tokens": "8", "lora": "red"}, {"max_tokens": "n/a", "lora": "red"}, None, {"lora": None}]
    )
    overrides, faults = overrides_of(options)
    rows = overrides.to_pylist()
    assert [row and (row["max_tokens"], row["lora"]) for row in rows] == [
        (8, "red"),
        None,
        None,
        (None, None),
    ]
    assert [fault and fault.message for fault in faults] == [
        None,
        "max_tokens is 'n/a', not a whole number",
        None,
        None,
    ]


def test_bytes_that_are_no_utf8_are_an_error_of_their_row() -> None:
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"4"], pa.binary()).buffers())
    overrides, (fault, none) = overrides_of(pa.StructArray.from_arrays([broken], names=["max_tokens"]))
    assert fault is not None
    assert (fault.code, none) == ("invalid_parameter", None)
    assert overrides.to_pylist()[1]["max_tokens"] == 4


STRUCT = pa.struct([("a", pa.int32())])


NO_SETTINGS = [
    *(STRUCT, pa.map_(pa.string(), pa.int32()), pa.binary(), pa.bool_(), pa.date32(), pa.timestamp("us")),
    *(pa.duration("us"), pa.list_(pa.int32()), pa.list_(pa.list_(pa.string()))),
]
OTHER_SETTINGS = [
    *(("lora", pa.int64()), ("stop", pa.int32()), ("max_tokens", pa.list_(pa.string()))),
    *(("top_p", pa.time64("us")), ("ignore_eos", pa.int32()), ("stop_token_ids", pa.list_(pa.bool_()))),
]


SETTINGS_AFTER_ALL = [("ignore_eos", pa.bool_()), ("stop_token_ids", pa.list_(pa.int32()))]
REFUSED = [pair for pair in product(OVERRIDES_TYPE.names, NO_SETTINGS) if pair not in SETTINGS_AFTER_ALL]


@pytest.mark.parametrize(("name", "kind"), [*REFUSED, *OTHER_SETTINGS])
def test_a_column_of_another_type_is_refused_with_its_name(name: str, kind: pa.DataType) -> None:
    with pytest.raises(JobError, match=f"the option {name} of a row is of the type .*; it must be "):
        overrides_of(pa.nulls(1, pa.struct([(name, kind)])))


def test_fields_that_are_no_settings_are_refused() -> None:
    with pytest.raises(JobError, match="have the field 'max_token'; give a struct with any of max_tokens"):
        overrides_of(pa.array([{"max_token": 1}]))
    with pytest.raises(JobError, match="are of the type string; give a struct"):
        overrides_of(pa.array(["five"]))
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["seed", "seed"])
    with pytest.raises(JobError, match="have the field 'seed' twice"):
        overrides_of(twice)
