"""How many rows a caller expects an input to have."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pipemax_spark.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRows:
    """The number of rows that an input may have: from ``minimum`` to ``maximum``, both included."""

    minimum: int
    maximum: int | None

    @classmethod
    def of(cls, bounds: "str | Sequence[int | None] | ExpectedRows") -> Self:
        """Read ``A:B``, ``A:`` or ``:B``, or a pair of numbers with None for no limit.

        Raise ``JobError`` if it is neither.
        """
        if isinstance(bounds, cls):
            return bounds
        if isinstance(bounds, str):
            match = re.fullmatch(r"\s*(\d*)\s*:\s*(\d*)\s*", bounds, re.ASCII)
            ends: Sequence[object] = [int(end) if end else None for end in match.groups()] if match else ()
        else:
            ends = list(bounds) if isinstance(bounds, Sequence) else ()
        numbers = [end for end in ends if isinstance(end, int) and not isinstance(end, bool) and end >= 0]
        if len(ends) != 2 or not numbers or len(numbers) + list(ends).count(None) != 2:
            raise JobError(
                f"expect-rows is {bounds!r}; write it as MINIMUM:MAXIMUM, such as 1000:2000000, where one of them may "
                "be left out"
            )
        if numbers != sorted(numbers):
            raise JobError(f"expect-rows is {bounds!r}, whose minimum is above its maximum")
        first, last = ends
        assert first is None or isinstance(first, int), first
        assert last is None or isinstance(last, int), last
        return cls(minimum=first or 0, maximum=last)

    def __contains__(self, rows: int) -> bool:
        return self.minimum <= rows and (self.maximum is None or rows <= self.maximum)

    def __str__(self) -> str:
        if self.maximum is None:
            return f"at least {self.minimum:,}"
        return f"{self.minimum:,} to {self.maximum:,}"
