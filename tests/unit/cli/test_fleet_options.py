"""How ``plan-capacity`` reads the time by which a fleet must be done."""

from datetime import UTC, datetime

import pytest

from pipemax.cli.fleet import hours_until

EVENING = datetime(2026, 11, 24, 22, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("8h", 8.0),
        ("1h30m", 1.5),
        ("2d", 48.0),
        ("07:30", 9.0),
        ("23:00", 0.5),
        ("2026-11-25T07:30", 9.0),
        ("2026-11-25T08:30+01:00", 9.0),
    ],
)
def test_a_duration_or_a_moment_is_hours_from_now(text: str, hours: float) -> None:
    assert hours_until(text, EVENING) == pytest.approx(hours)


@pytest.mark.parametrize("text", ["8", "8x", "h", "25:00", "07:61", "tomorrow", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a duration"):
        hours_until(text, EVENING)


@pytest.mark.parametrize("text", ["0h", "2026-11-24T22:30"])
def test_a_time_that_is_past_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is past"):
        hours_until(text, EVENING)
