"""Tell trouble that comes of too many open requests from trouble that would come anyway.

Requests time out because a queue is long, or because rows are; a server refuses them as busy because it runs too many,
or now and then whatever is open. The level is lowered once more than a certain share of the requests has trouble. If as
many still have it afterwards, the level was not the reason: it is restored, and only more trouble lowers it again.
"""

_RELIEVED = 0.7
"""A share below so much of the earlier one shows that the lower level has helped."""
_MORE = 1.5
_SETTLING = 32
"""After a cut, and after all requests that were open then, so many show whether it has helped."""


class Trouble:
    """The share of an endpoint's requests that has one kind of trouble."""

    def __init__(self, *, too_many: float, max_usual: float, memory: int) -> None:
        """``too_many``: the share above which the level is lowered at first.

        ``max_usual``: the largest share that may come to count as usual. The share is that of about the last ``memory``
        requests.
        """
        self._share = 0.0
        self._usual = too_many / _MORE
        self._max_usual = max_usual
        self._weight = 1 / memory
        self._before_cut: tuple[int, float] | None = None
        self._unsettled = 0

    def count(self, *, has_it: bool) -> None:
        """Count the end of a request."""
        self._share += self._weight * (has_it - self._share)
        self._unsettled = max(0, self._unsettled - 1)

    @property
    def is_too_much(self) -> bool:
        """Whether the level should be lowered."""
        return self._share > _MORE * self._usual

    @property
    def is_settling(self) -> bool:
        """Whether it is not known yet what a cut has helped."""
        return self._unsettled > 0

    def cut(self, level: int) -> None:
        """Note that the level is lowered from ``level``."""
        if self._before_cut is None:
            self._before_cut = level, self._share
            self._unsettled = level + _SETTLING

    def take_restored_level(self) -> int | None:
        """Return the level from before the cuts, once, if they have not helped."""
        if self._before_cut is None or self.is_settling:
            return None
        level, share = self._before_cut
        self._before_cut = None
        if self._share < _RELIEVED * share or self._share > self._max_usual:
            return None
        self._usual = max(self._usual, self._share)
        return level
