"""Decide how many error rows a job tolerates."""

from collections.abc import Mapping
from dataclasses import dataclass

MIN_ROWS_FOR_ERROR_RATE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLimits:
    """The limits at which error rows end a job early."""

    max_rate: float
    """Maximum share of error rows, once there are 1,000 rows."""
    fails_on_first: bool = False
    quotes_rows: bool = True
    """Whether reasons give examples of messages, which may quote a row's prompt or output."""

    def reason_to_stop(self, rows: int, errors: Mapping[str, tuple[int, str]], *, of: str = "") -> str | None:
        """Return why a job whose ``rows`` hold these ``errors`` must end, or None.

        ``errors`` maps a code to (rows, an example's message). ``of`` names the rows if they are not the run's.
        """
        rows_error = sum(count for count, _ in errors.values())
        if not rows_error:
            return None
        if self.fails_on_first:
            code, (_, message) = next(iter(errors.items()))
            example = f": {message}" if self.quotes_rows else ""
            return f"a row{of} failed with {code}{example} (--on-error fail)"
        if rows < MIN_ROWS_FOR_ERROR_RATE or rows_error <= self.max_rate * rows:
            return None
        most = sorted(errors.items(), key=lambda item: -item[1][0])[:3]
        causes = "; ".join(
            f"{code}: {count:,} rows{such_as(message) if self.quotes_rows else ''}"
            for code, (count, message) in most
        )
        share = f"{rows_error:,} of {rows:,} rows{of} failed"
        return f"{share}, more than --max-error-rate {self.max_rate} allows. {causes}"


def such_as(message: str) -> str:
    """Return how an example continues a sentence; nothing if there is no message to show."""
    return f", such as: {message}" if message else ""
