"""Say when an address is left alone: after failures in a row, or because the server asks for a pause.

An address that fails three requests in a row, or more where many are open, and answers none meanwhile, is left out for
30 s and then tried with one request; each further failure doubles the rest, up to 5 minutes. Nothing is sent before the
time that a throttling server names (``Retry-After``). One that names none, and throttles again and again before it has
answered, is left alone for half a second, and twice as long each further time. Knows nothing of levels or requests.
"""

_FAILURES_IN_A_ROW = 3
_FAILED_SHARE = 0.25
"""Where many requests are open, so many of them must fail in a row: three in a row may be three bad rows."""
_FIRST_REST_S = 30.0
_MAX_REST_S = 300.0
_FREE_THROTTLES = 16
"""Throttles in a row without a pause: fewer open requests mostly do."""
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 60.0
_NOTED_PAUSE_S = 30.0
"""A pause as long as this is worth a line in the log."""


class Rest:
    """The rests and pauses of one address."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rests_until_s = self._pauses_until_s = 0.0
        self._failures = 0
        self._rest_s = 0.0
        self._throttles = 0
        self._has_sent = False  # since the last request that was throttled
        self._why_left_out = ""
        self._is_noted = False  # that it is left out
        self._is_pause_noted = False
        self._notes: list[str] = []

    @property
    def is_left_out(self) -> bool:
        """Whether it has failed in a row and not answered since; it is then tried with one request at a time."""
        return self._rest_s > 0

    def is_resting(self, now_s: float) -> bool:
        """Return whether it failed, and not even a trial may be sent now."""
        return self.is_left_out and now_s < self._rests_until_s

    def wait_s(self, now_s: float) -> float:
        """Return in how many seconds a request may be sent; 0 for now."""
        rest_s = self._rests_until_s - now_s if self.is_left_out else 0.0
        return max(0.0, rest_s, self._pauses_until_s - now_s)

    def send(self) -> None:
        """Count a request that is sent."""
        self._has_sent = True

    def live(self, now_s: float) -> bool:
        """Count an answer or a refusal. Return whether the address comes back after a rest."""
        has_rested = self.is_left_out and not self.is_resting(now_s)
        self._failures = self._throttles = 0
        self._rest_s = 0.0
        self._is_pause_noted = False
        return has_rested

    def pause(self, now_s: float, retry_after_s: float | None) -> None:
        """Count a throttled request."""
        if retry_after_s is not None:
            pause_s = max(0.0, retry_after_s)
        else:
            if not self._has_sent:  # it is of the same burst as the one before
                return
            self._throttles += 1
            further = self._throttles - _FREE_THROTTLES - 1
            pause_s = 0.0 if further < 0 else min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(further, 10))
        self._has_sent = False
        self._pauses_until_s = max(self._pauses_until_s, now_s + pause_s)
        if pause_s >= _NOTED_PAUSE_S and not self._is_pause_noted:
            self._is_pause_noted = True
            self._notes.append(
                f"endpoint {self._name} is busy (429 or 503): nothing is sent to it for {pause_s:.0f} s"
            )

    def fail(self, now_s: float, reason: str, *, level: int) -> bool:
        """Count a failure where up to ``level`` requests are open. Return whether a rest begins."""
        if self.is_resting(now_s):
            return False
        self._failures += 1
        if not self.is_left_out and self._failures < max(_FAILURES_IN_A_ROW, _FAILED_SHARE * level):
            return False
        if not self.is_left_out:
            self._why_left_out = (
                f"endpoint {self._name} has failed {self._failures} requests in a row ({reason}): "
                f"it is left out for {_FIRST_REST_S:.0f} s, and then tried again"
            )
        self._rest_s = min(_MAX_REST_S, max(_FIRST_REST_S, 2 * self._rest_s))
        self._rests_until_s = now_s + self._rest_s
        return True

    def take_notes(self) -> list[str]:
        """Return what is new since the last call; a rest that has ended meanwhile is not worth a line."""
        notes, self._notes = self._notes, []
        if self.is_left_out and not self._is_noted:
            notes.append(self._why_left_out)
        elif self._is_noted and not self.is_left_out:
            notes.append(f"endpoint {self._name} answers again")
        self._is_noted = self.is_left_out
        return notes
