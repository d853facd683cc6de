"""Tell requests that time out because too many are open from rows that take too long anyway.

The level is halved once more than a tenth of the requests time out. If as many still do afterwards, the level was not
the reason: it is restored, and only more time-outs than these lower it again.
"""

_TOO_MANY = 0.1
_MEMORY = 31 / 32
_RELIEVED = 0.7
"""A share below so much of the earlier one shows that the lower level has helped."""
_MORE = 1.5
_SETTLING = 32
"""After a cut, and after all requests that were open then, so many show whether it has helped."""


class Lateness:
    """The share of an endpoint's requests that time out."""

    def __init__(self) -> None:
        self._share = 0.0
        self._usual = _TOO_MANY / _MORE
        self._before_cut: tuple[int, float] | None = None
        self._unsettled = 0

    def count(self, *, is_late: bool) -> None:
        """Count the end of a request."""
        self._share += (1 - _MEMORY) * (is_late - self._share)
        self._unsettled = max(0, self._unsettled - 1)

    @property
    def is_too_high(self) -> bool:
        """Whether the level should be halved."""
        return self._before_cut is None and self._share > _MORE * self._usual

    def cut(self, level: int) -> None:
        """Note that the level was lowered from ``level``."""
        self._before_cut = level, self._share
        self._unsettled = level + _SETTLING

    def take_restored_level(self) -> int | None:
        """Return the level from before the cut, once, if the cut has not helped."""
        if self._before_cut is None or self._unsettled:
            return None
        level, share = self._before_cut
        self._before_cut = None
        if self._share < _RELIEVED * share:
            return None
        self._usual = max(self._usual, self._share)
        return level
