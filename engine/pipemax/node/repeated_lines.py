"""Hold back log lines that repeat, so that they neither fill the disk nor push all others out of a bounded log.

One of vLLM's lines is left out as a whole: what it says of scheduler classes is not true of ours.
"""

import logging
import threading
from dataclasses import dataclass

MAX_LINES = 60
PERIOD_S = 60.0
_LOGGERS = (None, "vllm")
"""The loggers that have handlers: the root, and vLLM's own."""
_OF_SCHEDULERS = "vllm.config.scheduler"


@dataclass(slots=True)
class _Place:
    """One place in the code that logs at one level."""

    until_unix_s: float
    lines: int = 0
    """Since the period began, those left out included."""


class RepeatedLines(logging.Filter):
    """Lets through the first ``MAX_LINES`` lines from one place in the code within ``PERIOD_S``. Thread-safe.

    The last of them says that more are left out, and the first one after them how many were.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            key = (record.pathname, record.lineno, record.levelno)
            place = self._places.get(key)
            num_left_out = 0
            if place is None or record.created >= place.until_unix_s:
                num_left_out = 0 if place is None else max(0, place.lines - MAX_LINES)
                place = self._places[key] = _Place(record.created + PERIOD_S)
            place.lines += 1
            lines = place.lines
        if num_left_out:
            _add(record, f"{num_left_out:,} lines from this place were left out before this one")
        if lines == MAX_LINES:
            _add(
                record, f"further lines from this place are left out, for {PERIOD_S:.0f} s from the first on"
            )
        return lines <= MAX_LINES


def hold_back_repeated_lines() -> None:
    """Have the handlers of this process hold back repeated lines. May be called again, when there are more handlers."""
    handlers = [handler for name in _LOGGERS for handler in logging.getLogger(name).handlers]
    for handler in handlers:
        if not any(isinstance(known, RepeatedLines) for known in handler.filters):
            handler.addFilter(RepeatedLines())


def leave_out_warning_of_our_schedulers() -> None:
    """Leave out vLLM's warning that a custom scheduler class may turn asynchronous scheduling off: ours keep it.

    May be called more than once. It stays for classes of others.
    """
    logger = logging.getLogger(_OF_SCHEDULERS)
    # Of the logger, not of a handler: vLLM's processes configure logging, which takes all handlers away.
    if _is_true not in logger.filters:
        logger.addFilter(_is_true)


def _is_true(record: logging.LogRecord) -> bool:
    names_ours = isinstance(record.args, tuple) and str(record.args[:1]).startswith("('pipemax.")
    return not (names_ours and record.msg.startswith("Using custom scheduler class"))


def _add(record: logging.LogRecord, note: str) -> None:
    record.msg, record.args = f"{record.getMessage()} ({note})", ()
