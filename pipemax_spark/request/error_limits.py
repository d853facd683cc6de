"""Decide how many error rows a job tolerates, and say which errors they are."""

from collections.abc import Mapping
from dataclasses import dataclass

_MIN_ROWS_WHILE_RUNNING = 1_000
_MIN_ROWS_AT_END = 20
_MIN_ROWS_ALL_FAILED = 3
"""Fewer rows than ``_MIN_ROWS_AT_END`` fail a job only if all of them failed, and these are enough to tell."""
_HIGH_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLimits:
    """The limits at which error rows end a job early, or make it fail at its end."""

    max_rate: float
    """Maximum share of error rows: once there are 1,000 rows while a job runs, and of 20 rows or more at its end."""
    fails_on_first: bool = False
    quotes_rows: bool = True
    """Whether reasons give examples of messages, which may quote a row's prompt or output."""

    def reason_to_stop(self, rows: int, errors: Mapping[str, tuple[int, str]], *, of: str = "") -> str | None:
        """Return why a job whose ``rows`` so far hold these ``errors`` must end, or None.

        ``errors`` maps a code to (rows, an example's message). ``of`` names the rows if they are not the run's.
        """
        if not errors:
            return None
        if self.fails_on_first:
            code, (_, message) = next(iter(errors.items()))
            example = f": {message}" if self.quotes_rows else ""
            return f"a row{of} failed with {code}{example} (--on-error fail)"
        return None if rows < _MIN_ROWS_WHILE_RUNNING else self._reason(rows, errors, of)

    def reason_to_fail(self, rows: int, errors: Mapping[str, tuple[int, str]], *, of: str = "") -> str | None:
        """Return why a run that has ended with all of its ``rows`` must fail, or None; see ``reason_to_stop``."""
        if self.fails_on_first:
            return self.reason_to_stop(rows, errors, of=of)
        if rows < _MIN_ROWS_AT_END and not _MIN_ROWS_ALL_FAILED <= rows == _count(errors):
            return None
        return self._reason(rows, errors, of)

    def _reason(self, rows: int, errors: Mapping[str, tuple[int, str]], of: str) -> str | None:
        if _count(errors) <= self.max_rate * rows:
            return None
        share = f"{_count(errors):,} of {rows:,} rows{of} failed"
        causes = _causes(errors, quotes_rows=self.quotes_rows)
        return f"{share}, more than --max-error-rate {self.max_rate} allows. {causes}"


def tell_high_share(rows: int, errors: Mapping[str, tuple[int, str]]) -> str | None:
    """Return the sentence about errors with which a report ends if a tenth of the rows or more failed, else None."""
    if not errors or _count(errors) < _HIGH_SHARE * rows:
        return None
    return f"{_count(errors):,} of {rows:,} rows failed. {_causes(errors, quotes_rows=True)}"


def _causes(errors: Mapping[str, tuple[int, str]], *, quotes_rows: bool) -> str:
    """Return the most frequent codes, with an example of each if rows may be quoted."""
    frequent = sorted(errors.items(), key=lambda item: -item[1][0])[:3]
    return "; ".join(
        f"{code}: {count:,} row{'' if count == 1 else 's'}{such_as(message) if quotes_rows else ''}"
        for code, (count, message) in frequent
    )


def _count(errors: Mapping[str, tuple[int, str]]) -> int:
    return sum(count for count, _ in errors.values())


def such_as(message: str) -> str:
    """Return how an example continues a sentence; nothing if there is no message to show."""
    return f", such as: {message}" if message else ""
