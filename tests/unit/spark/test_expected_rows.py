"""How many rows an input may have, as a caller writes it."""

from typing import Any

import pytest

from pipemax_spark.errors import JobError
from pipemax_spark.request.expected_rows import ExpectedRows


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
    assert all(rows in expected for rows in inside)
    assert not any(rows in expected for rows in outside)


TEXTS = ("", ":", "5", "a:b", "1:2:3", "-1:5", "1.5:2", "²:3", "5:1")
VALUES = ((1,), (1, 2, 3), ("1", "2"), (None, None), (-1, 2), (True, 2), (1.0, 2), (5, 1), 5)


@pytest.mark.parametrize("given", [*TEXTS, *VALUES])
def test_other_texts_and_values_are_refused(given: Any) -> None:
    with pytest.raises(JobError, match=r"^expect-rows is "):
        ExpectedRows.of(given)
