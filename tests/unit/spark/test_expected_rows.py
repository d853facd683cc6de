"""How many rows an input may have, as a caller writes it."""

from typing import Any

import pytest

from pipemax_spark.errors import JobError, RowCountError
from pipemax_spark.request.expected_rows import ExpectedRows, check_row_count


@pytest.mark.parametrize(
    ("given", "inside", "outside"),
    [
        ("1000:2000000", (1_000, 2_000_000), (0, 999, 2_000_001)),
        ("1:", (1, 10**12), (0,)),
        (":5", (0, 5), (6,)),
        (" 3 : 3 ", (3,), (2, 4)),
        ("0:0", (0,), (1,)),
        ((10, 20), (10, 20), (9, 21)),
        ([None, 20], (0, 20), (21,)),
        ((10, None), (10,), (9,)),
    ],
)
def test_numbers_of_rows_are_inside_or_outside(
    given: Any, inside: tuple[int, ...], outside: tuple[int, ...]
) -> None:
    expected = ExpectedRows.of(given)
    for rows in inside:
        check_row_count(rows, expected=expected, fails_if_empty=False, source="input 't'")
    for rows in outside:
        with pytest.raises(RowCountError, match=f"^input 't' has {rows:,} rows, and --expect-rows allows "):
            check_row_count(rows, expected=expected, fails_if_empty=False, source="input 't'")


TEXTS = ("", ":", "5", "a:b", "1:2:3", "-1:5", "1.5:2", "²:3", "5:1")
VALUES = ((1,), (1, 2, 3), ("1", "2"), (None, None), (-1, 2), (True, 2), (1.0, 2), (5, 1), 5)


@pytest.mark.parametrize("given", [*TEXTS, *VALUES])
def test_other_texts_and_values_are_refused(given: Any) -> None:
    with pytest.raises(JobError, match=r"^expect-rows is "):
        ExpectedRows.of(given)


def test_an_empty_input_fails_only_if_that_is_asked_for() -> None:
    check_row_count(0, expected=None, fails_if_empty=False, source="x")
    check_row_count(1, expected=None, fails_if_empty=True, source="x")
    with pytest.raises(RowCountError, match=r"^x has no rows"):
        check_row_count(0, expected=None, fails_if_empty=True, source="x")
