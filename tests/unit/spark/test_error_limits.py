"""When a job must end for its error rows, and when the driver warns that it hears nothing."""

import pytest

from pipemax.wire import CollectorAddress
from pipemax_spark.report.collector import SilenceWatch
from pipemax_spark.request.error_limits import ErrorLimits, tell_high_share

ERRORS = {"engine_error": (700, "refused"), "empty_prompt": (300, "no prompt")}


def test_a_larger_share_of_errors_than_allowed_ends_a_job_of_a_thousand_rows() -> None:
    limits = ErrorLimits(max_rate=0.5)
    reason = limits.reason_to_stop(1_999, ERRORS)
    assert reason.startswith(
        "1,000 of 1,999 rows failed, more than --max-error-rate 0.5 allows. engine_error: 700"
    )
    assert limits.reason_to_stop(2_000, ERRORS) is None
    assert limits.reason_to_stop(999, {"empty_prompt": (999, "no prompt")}) is None


@pytest.mark.parametrize(
    ("errors", "rows", "max_rate", "fails"),
    [
        (1, 1, 0.5, False),
        (2, 2, 0.0, False),
        (2, 3, 0.5, False),
        (3, 3, 0.5, True),
        (3, 3, 1.0, False),
        (18, 19, 0.5, False),
        (19, 19, 0.5, True),
        (10, 20, 0.5, False),
        (11, 20, 0.5, True),
        (1, 20, 0.0, True),
        (60, 61, 0.5, True),
        (199, 200, 0.5, True),
        (199, 200, 1.0, False),
        (0, 200, 0.0, False),
        (1_500, 11_500, 0.5, False),
    ],
)
def test_a_run_that_has_ended_is_judged_by_its_share_from_twenty_rows_on(
    errors: int, rows: int, max_rate: float, fails: bool
) -> None:
    limits = ErrorLimits(max_rate=max_rate)
    found = {"empty_prompt": (errors, "no prompt")} if errors else {}
    assert (limits.reason_to_fail(rows, found) is not None) == fails
    assert rows >= 1_000 or limits.reason_to_stop(rows, found) is None, "while it runs"


def test_a_high_share_of_errors_is_told_with_the_most_frequent_code_first() -> None:
    assert tell_high_share(2_000, ERRORS) == (
        "1,000 of 2,000 rows failed. engine_error: 700 rows, such as: refused; empty_prompt: 300 rows, such as: "
        "no prompt"
    )
    assert tell_high_share(1, {"empty_prompt": (1, "")}) == "1 of 1 rows failed. empty_prompt: 1 row"
    assert tell_high_share(10_001, ERRORS) is None
    assert tell_high_share(0, {}) is None


def test_one_error_ends_a_job_that_is_to_fail_on_errors() -> None:
    limits = ErrorLimits(max_rate=1.0, fails_on_first=True)
    assert limits.reason_to_stop(5, {}) is None
    reason = limits.reason_to_stop(5, {"empty_prompt": (1, "no prompt")}, of=" in out")
    assert reason == "a row in out failed with empty_prompt: no prompt (--on-error fail)"


def test_reasons_quote_no_message_where_messages_may_not_be_shown() -> None:
    reason = ErrorLimits(max_rate=0.5, quotes_rows=False).reason_to_stop(1_999, ERRORS)
    assert reason.endswith("engine_error: 700 rows; empty_prompt: 300 rows")
    limits = ErrorLimits(max_rate=1.0, fails_on_first=True, quotes_rows=False)
    reason = limits.reason_to_stop(5, {"empty_prompt": (1, "no prompt")})
    assert reason == "a row failed with empty_prompt (--on-error fail)"


class Heard:
    """A collector that has heard nothing for so long."""

    address = CollectorAddress(host="driver", port=4242, token="t")

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s

    def silent_s(self) -> float:
        return self._silent_s


def watched(silent_s: float, tasks: list[int]) -> tuple[SilenceWatch, list[str]]:
    warnings: list[str] = []
    return SilenceWatch(
        Heard(silent_s), running_tasks=lambda: tasks[0], warn=warnings.append, now_s=0.0
    ), warnings


def test_a_minute_of_running_tasks_without_a_report_is_warned_of_once() -> None:
    tasks = [0]
    watch, warnings = watched(1e6, tasks)
    for now_s in range(100):
        watch.look(now_s)
    assert warnings == [], "no task runs yet"
    tasks[0] = 2
    for now_s in range(100, 300):
        watch.look(now_s)
    (warning,) = warnings
    assert "driver:4242" in warning
    assert "--collector-port" in warning


def test_while_reports_arrive_nothing_is_warned_of() -> None:
    watch, warnings = watched(2.0, [2])
    for now_s in range(200):
        watch.look(now_s)
    assert warnings == []
