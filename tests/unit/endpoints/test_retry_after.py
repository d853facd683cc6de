from datetime import UTC, datetime

import pytest

from pipemax.endpoints.client import retry_after_s

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("Sat, 28 Nov 2026 12:00:30 GMT", 30.0),
        ("Sat, 28 Nov 2026 11:00:00 GMT", 0.0),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_a_date(header: str | None, expected: float | None) -> None:
    assert retry_after_s(header, now=NOW) == expected
