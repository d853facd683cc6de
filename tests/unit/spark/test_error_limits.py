"""When a job must end for its error rows, and when the driver warns that it hears nothing."""

from pipemax.wire import CollectorAddress
from pipemax_spark.monitor.error_limits import ErrorLimits
from pipemax_spark.monitor.progress import SilenceWatch

ERRORS = {"engine_error": (700, "refused"), "empty_prompt": (300, "no prompt")}


def test_a_larger_share_of_errors_than_allowed_ends_a_job_of_a_thousand_rows() -> None:
    limits = ErrorLimits(max_rate=0.5)
    reason = limits.reason_to_stop(1_999, ERRORS)
    assert reason is not None
    assert reason.startswith(
        "1,000 of 1,999 rows failed, more than --max-error-rate 0.5 allows. engine_error: 700"
    )
    assert limits.reason_to_stop(2_000, ERRORS) is None
    assert limits.reason_to_stop(999, {"empty_prompt": (999, "no prompt")}) is None


def test_one_error_ends_a_job_that_is_to_fail_on_errors() -> None:
    limits = ErrorLimits(max_rate=1.0, fails_on_first=True)
    assert limits.reason_to_stop(5, {}) is None
    reason = limits.reason_to_stop(5, {"empty_prompt": (1, "no prompt")}, of=" in out")
    assert reason == "a row in out failed with empty_prompt: no prompt (--on-error fail)"


def test_reasons_quote_no_message_where_messages_may_not_be_shown() -> None:
    reason = ErrorLimits(max_rate=0.5, quotes_rows=False).reason_to_stop(1_999, ERRORS)
    assert reason is not None
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
