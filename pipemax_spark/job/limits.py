"""Hold a run to its limits on cost, time and tokens: say early what will not fit, begin no chunk that would not end.

All limits count from the job's start, with its checks and the engines' start: from then on the machines cost. What is
decided is in ``rows.budget``; this module knows the options, the clock and the sentences.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from pipemax.wire import PreflightReply, Spent
from pipemax_spark.errors import EndedBy, JobError, LimitReachedError
from pipemax_spark.options import JobOptions
from pipemax_spark.report.page_parts import duration
from pipemax_spark.report.progress import clock
from pipemax_spark.report.run_speed import RunSpeed
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.prices import Prices
from pipemax_spark.rows.budget import (
    Interval,
    Limit,
    Outlook,
    Pace,
    Prior,
    Sample,
    forecast,
    most_rows,
    reached,
)

LIMITS = frozenset(
    {EndedBy.MAX_COST, EndedBy.MAX_HOURS, EndedBy.MAX_TOKENS_TOTAL, EndedBy.DONE_BY},
)
"""The ends of a run that reaches a limit."""
_FORECAST_S = 60.0
_FEWEST_CHUNKS = 8
"""Of a limit's time, a chunk takes at most one part in so many."""


def read_done_by(value: str | datetime, *, now: datetime | None = None) -> datetime:
    """Return the moment, with a time zone. ``06:00`` is the next such moment in local time, which is the default zone.

    Raise ``JobError`` if the text is neither a time nor an ISO date and time.
    """
    now = now or datetime.now().astimezone()
    if isinstance(value, datetime):
        return value.astimezone()
    try:
        if len(value.strip()) <= len("06:00"):
            at = datetime.strptime(value.strip(), "%H:%M").time()
            today = datetime.combine(now.date(), at)
            moment = today.astimezone()
            return moment if moment > now else (today + timedelta(days=1)).astimezone()
        return datetime.fromisoformat(value.strip()).astimezone()
    except ValueError as error:
        raise JobError(
            f"done-by is {value!r}; write a time such as 06:00, or a date and time such as 2026-12-01T06:00"
        ) from error


def limits_of(options: JobOptions, *, now: datetime) -> list[Limit]:
    """Return the limits of a job that starts now. Raise ``JobError`` if ``done-by`` has passed."""
    limits = []
    if options.max_cost is not None and options.prices.has_tokens:
        text, per_s = f"max-cost {options.max_cost:,g}", options.prices.per_second
        limits.append(Limit(ended_by=EndedBy.MAX_COST, text=text, cost=options.max_cost, cost_per_s=per_s))
    elif options.max_cost is not None and options.price_per_hour:
        seconds = options.max_cost / options.price_per_hour * 3600
        limits.append(
            Limit(ended_by=EndedBy.MAX_COST, text=f"max-cost {options.max_cost:,g}", seconds=seconds)
        )
    if options.max_hours is not None:
        text = f"max-hours {options.max_hours:g}"
        limits.append(Limit(ended_by=EndedBy.MAX_HOURS, text=text, seconds=3600 * options.max_hours))
    if options.done_by is not None:
        seconds = (options.done_by - now).total_seconds()
        text = f"done-by {_moment(options.done_by, now)}"
        if seconds <= 0:
            raise JobError(f"{text} has passed; give a moment to come")
        limits.append(Limit(ended_by=EndedBy.DONE_BY, text=text, seconds=seconds))
    if options.max_tokens_total is not None:
        text = f"max-tokens-total {options.max_tokens_total:,}"
        limits.append(Limit(ended_by=EndedBy.MAX_TOKENS_TOTAL, text=text, tokens=options.max_tokens_total))
    return limits


class RunLimits:
    """The limits of one run, which begins when this object is made. Thread-safe."""

    def __init__(
        self,
        options: JobOptions,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        now: datetime | None = None,
    ) -> None:
        """Begin. Raise ``JobError`` if ``done-by`` has passed."""
        self._clock_s = clock_s
        self._begin_s = clock_s()
        self._now = now or datetime.now().astimezone()
        self._prices = options.prices
        self._requests_per_row = max(1, len(options.ask))
        self.limits: Sequence[Limit] = limits_of(options, now=self._now)
        self._lock = threading.Lock()
        self._pace = Pace()
        self._prior = Prior()
        self._rows_total = 0
        self._places: dict[int, int] = {}
        self._outlook: Outlook | None = None
        self._forecast_at_s = 0.0
        self._has_warned = False

    def expect(self, rows: int) -> None:
        """Add ``rows`` to the rows to be done."""
        with self._lock:
            self._rows_total += rows

    def say_forecast(self, terminal: Terminal, speed: RunSpeed | None, reply: PreflightReply) -> None:
        """Say what will be done by the limits, as far as an earlier run and the sample tell."""
        if not self.limits:
            return
        with self._lock:
            self._prior = prior_of(speed, reply, requests_per_row=self._requests_per_row, prices=self._prices)
            rows = self._rows_total
        for line in forecast_lines(self.limits, self._prior, rows, now=self._now, speed=speed):
            terminal.say("Limit", line)

    def look(
        self, *, rows: int, tokens: int, warn: Callable[[str], None], spent: Spent | None = None
    ) -> LimitReachedError | None:
        """Take what is done now, and what an endpoint has billed; return the run's end if a limit is reached.

        Warn once of what will not fit.
        """
        if not self.limits:
            return None
        with self._lock:
            seconds = self._seconds()
            cost = 0.0 if spent is None else self._prices.cost(seconds=0.0, spent=spent)
            self._pace.add(Sample(seconds=seconds, rows=rows, tokens=tokens, token_cost=cost))
            limit = reached(self.limits, self._pace.last)
            if limit is not None:
                return _end(limit, "is reached")
            if seconds < self._forecast_at_s + _FORECAST_S:
                return None
            self._forecast_at_s = seconds
            self._outlook = forecast(self.limits, self._pace) if rows else None
            warning = self._warning()
        if warning is not None:
            warn(warning)
        return None

    def most_rows(self) -> int | None:
        """Return how many rows may still begin; None for any number."""
        if not self.limits:
            return None
        with self._lock:
            return most_rows(self.limits, self._pace, self._prior, now_s=self._seconds())

    def longest_chunk_s(self) -> float | None:
        """Return how long a chunk may take; None for any time."""
        with self._lock:
            left = [limit.seconds - self._seconds() for limit in self.limits if limit.seconds is not None]
        return max(1.0, min(left) / _FEWEST_CHUNKS) if left else None

    def begun(self, chunk: int, rows: int) -> None:
        """Note that a chunk begins."""
        with self._lock:
            self._places[chunk] = self._pace.begin(rows)

    def committed(self, chunk: int) -> None:
        """Note that a chunk is committed."""
        with self._lock:
            self._pace.commit(self._seconds(), self._places.pop(chunk))

    def none_fits(self) -> LimitReachedError:
        """Return the end of a run of which no chunk may begin any more."""
        with self._lock:
            now = replace(self._pace.last, seconds=self._seconds())
            if (limit := reached(self.limits, now)) is not None:
                return _end(limit, "is reached")
            rows = [
                (most_rows([limit], self._pace, self._prior, now_s=now.seconds), limit)
                for limit in self.limits
            ]
        _, least = min(rows, key=lambda pair: math.inf if pair[0] is None else pair[0])
        return _end(least, "leaves too little for another chunk")

    def used(self) -> str:
        """Return what the run has used since the job's start."""
        with self._lock:
            seconds, tokens, token_cost = self._seconds(), self._pace.last.tokens, self._pace.last.token_cost
        cost = (
            f", cost {seconds * self._prices.per_second + token_cost:,.2f}" if self._prices.are_known else ""
        )
        return f"{duration(seconds)} since the job's start{cost}, {tokens:,} tokens"

    def left_text(self) -> str:
        """Return what is left of each limit, for the progress line."""
        with self._lock:
            parts = [self._left_of(limit) for limit in self.limits]
            if self._outlook is not None and self._outlook.rows.middle < self._rows_total:
                parts.append(f"about {self._outlook.rows.middle / self._rows_total:.0%} of the rows by then")
        return " · ".join(parts)

    def _seconds(self) -> float:
        return self._clock_s() - self._begin_s

    def _left_of(self, limit: Limit) -> str:
        if limit.tokens is not None:
            return f"{max(0, limit.tokens - self._pace.last.tokens):,} tokens of {limit.text} left"
        if limit.cost is not None:
            now = replace(self._pace.last, seconds=self._seconds())
            return f"{max(0.0, limit.cost - limit.cost_of(now)):,.2f} of {limit.text} left"
        assert limit.seconds is not None, limit
        left_s = max(0.0, limit.seconds - self._seconds())
        if limit.ended_by is EndedBy.MAX_COST:
            return f"{left_s * self._prices.per_second:,.2f} of {limit.text} left"
        until = "to" if limit.ended_by is EndedBy.DONE_BY else "left of"
        return f"{clock(left_s)} {until} {limit.text}"

    def _warning(self) -> str | None:
        outlook, total = self._outlook, self._rows_total
        if self._has_warned or outlook is None or outlook.rows.high >= total:
            return None
        self._has_warned = True
        done = self._pace.last.rows
        factor = (total - done) / max(1.0, outlook.rows.low - done)
        helps = f". {factor:,.1f} times the engines would do all" if _is_of_time(outlook.limit) else ""
        return (
            f"at this rate {outlook.rows.middle / total:.0%} of the rows will be done at the limit "
            f"({_named(outlook.limit, self._now)}): {_left(outlook.rows, total)}{helps}"
        )


def _end(limit: Limit, how: str) -> LimitReachedError:
    return LimitReachedError(f"--{limit.text} {how}", ended_by=limit.ended_by)


def prior_of(
    speed: RunSpeed | None, reply: PreflightReply, *, requests_per_row: int, prices: Prices
) -> Prior:
    """Return what an earlier run and the sampled rows tell before the first row is done.

    A row has the tokens of its prompts at least, and the longest answers at most, on which forecasts count.
    """
    rate = None
    if speed is not None and speed.interval is not None:
        low, high = speed.interval
        rate = Interval(low=low, middle=speed.rows_per_s, high=high)
    per_row = cost = None
    if reply.prompt_tokens:
        read, generated = (
            sum(tokens) / len(reply.prompt_tokens) * requests_per_row
            for tokens in (reply.prompt_tokens, reply.output_tokens)
        )
        per_row = Interval(low=read, middle=read + generated, high=read + generated)
        whole = prices.of_tokens(read, generated)
        cost = (
            Interval(low=prices.of_tokens(read, 0), middle=whole, high=whole) if prices.has_tokens else None
        )
    return Prior(rows_per_s=rate, tokens_per_row=per_row, token_cost_per_row=cost)


def forecast_lines(
    limits: Sequence[Limit], prior: Prior, rows: int, *, now: datetime, speed: RunSpeed | None
) -> list[str]:
    """Return for each limit whether ``rows`` rows fit, and if not, what would help."""
    lines = []
    for limit in limits:
        outlook = forecast([limit], Pace(), prior)
        if outlook is None:
            source = "sampled row" if _is_of_tokens(limit) else "earlier run of this job with full engines"
            fits = f"no forecast before the first rows are done: no {source} tells it"
        elif _is_of_tokens(limit):
            verb = "have more tokens" if limit.cost is None else "cost more"
            fits = _fit_in_tokens(outlook.rows, rows, verb)
        else:
            assert speed is not None, prior
            fits = _fit_in_time(outlook.rows, rows, speed)
            if outlook.rows.low < rows and _is_of_time(limit):
                fits += _help(outlook.rows, rows, speed)
        lines.append(f"{_named(limit, now)}: {fits}")
    return lines


def _fit_in_tokens(fits: Interval, rows: int, verb: str) -> str:
    if fits.low >= rows:
        return f"all {rows:,} rows fit, even with the longest answers"
    if fits.high >= rows:
        return f"{fits.low:,.0f} of {rows:,} rows fit with the longest answers, more with shorter ones"
    return f"at most {fits.high / rows:.0%} of {rows:,} rows fit: the prompts alone {verb}"


def _fit_in_time(fits: Interval, rows: int, speed: RunSpeed) -> str:
    by = f"at the rate of run {speed.run_id}, without the engines' start"
    if fits.low >= rows:
        return f"all {rows:,} rows fit {by}"
    if fits.high >= rows:
        return f"{rows:,} rows may fit or not {by}: {fits.low:,.0f} to {fits.high:,.0f} do"
    return f"about {fits.middle / rows:.0%} of {rows:,} rows fit {by}; {_left(fits, rows)}"


def _help(fits: Interval, rows: int, speed: RunSpeed) -> str:
    """Return what would let all rows fit into a time."""
    if fits.low <= 0:
        return ""
    engines = math.ceil(speed.engines * rows / fits.low)
    return f". What would help: {engines:,} such engines in place of {speed.engines}, or shorter answers"


def _is_of_tokens(limit: Limit) -> bool:
    """Tell whether it depends on the rows' lengths how many fit."""
    return limit.tokens is not None or limit.cost is not None


def _is_of_time(limit: Limit) -> bool:
    """Tell whether more engines do more within the limit."""
    return limit.ended_by in (EndedBy.MAX_HOURS, EndedBy.DONE_BY)


def _named(limit: Limit, now: datetime) -> str:
    """Return the limit with the moment at which it is reached."""
    if limit.seconds is None or limit.ended_by is EndedBy.DONE_BY:
        return limit.text
    return f"{limit.text}, at {_moment(now + timedelta(seconds=limit.seconds), now)}"


def _moment(moment: datetime, now: datetime) -> str:
    local = moment.astimezone(now.tzinfo)
    return f"{local:%H:%M}" if local - now < timedelta(hours=23) else f"{local:%Y-%m-%d %H:%M}"


def _left(done: Interval, rows: int) -> str:
    """Return how many rows will be left, with the bounds."""
    high, middle, low = (max(0, round(rows - some)) for some in (done.low, done.middle, done.high))
    return f"{middle:,} rows will be left ({low:,} to {high:,})"
