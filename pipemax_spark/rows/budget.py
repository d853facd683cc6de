"""Decide what fits under a run's limits: a forecast with an interval, and how many rows the next chunk may have.

Pure: the input is how many rows and tokens were done by when, and which chunks began and were committed. It knows
nothing of clocks, prices and Spark. A chunk is expected to end when the rows begun before it and its own are done at
the rate of the last quarter of an hour, and then as much later as chunks were committed after so many rows were done:
their last rows decode, and their commit takes its time.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipemax_spark.errors import EndedBy

_RECENT_S = 900.0
"""Rows' lengths drift, so the next chunk is forecast by the rate of this time only."""
_BLOCKS, _FEWEST_BLOCKS = 20, 5
_BLOCK_S = 5.0
"""Shortest time of a block. What varies from one to the next says how far the rate may be off."""
_MAX_SAMPLES = 2_000
"""Beyond this number every other sample is dropped, and only half as many are kept from then on."""
_FIRST_LAG_S = 60.0
"""From the end of a chunk's rows at the mean rate to its commit, as long as none is committed."""
_LAGS = 8
_KNOWN_AFTER_S, _KNOWN_SHARE = 120.0, 0.05
"""From the first row on, in seconds and of the limit: what a shorter time says of the hours to come is left unsaid,
because engines start one after the other. A quarter of an hour is enough."""
_NORMAL = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit of a run, in seconds from the job's start, in tokens, or in cost."""

    ended_by: EndedBy
    """What the run says that it was ended by."""
    text: str
    """As the user gave it, such as ``max-cost 200``."""
    seconds: float | None = None
    tokens: int | None = None
    cost: float | None = None
    """Of the seconds since the job's start, at ``cost_per_s``, and of the tokens that an endpoint has billed."""
    cost_per_s: float = 0.0

    def cost_of(self, sample: "Sample") -> float:
        """Return what has been used of a limit in cost."""
        return sample.token_cost + self.cost_per_s * sample.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its bounds at 95 %."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What was done at one moment."""

    seconds: float
    """From the job's start."""
    rows: int
    tokens: int
    """Of prompts and completions."""
    token_cost: float = 0.0
    """What an endpoint has billed."""


class Pace:
    """How fast a run's rows are done, from what was done when. Not thread-safe."""

    def __init__(self) -> None:
        self.last = Sample(seconds=0.0, rows=0, tokens=0)
        """The latest sample."""
        self._samples: list[Sample] = []
        self._period_s = 0.0
        self._begun_rows = 0
        self._lags: deque[float] = deque(maxlen=_LAGS)

    def add(self, sample: Sample) -> None:
        """Take a sample. Samples come in order; counts that go back are those of a silent engine, and are left out."""
        if sample.rows < self.last.rows:
            sample = replace(self.last, seconds=sample.seconds, token_cost=sample.token_cost)
        self.last = sample
        if sample.rows and (
            not self._samples or sample.seconds >= self._samples[-1].seconds + self._period_s
        ):
            self._samples.append(sample)
        if len(self._samples) > _MAX_SAMPLES:
            del self._samples[1::2]
            self._period_s = (sample.seconds - self._samples[0].seconds) / (_MAX_SAMPLES / 2)

    def begin(self, rows: int) -> int:
        """Note that a chunk begins; return how many rows have begun with it, by which ``commit`` knows it."""
        self._begun_rows += rows
        return self._begun_rows

    def commit(self, seconds: float, begun_rows: int) -> None:
        """Note at ``seconds`` that the chunk is committed with which so many rows had begun."""
        done = bisect_left(self._samples, begun_rows, key=lambda sample: sample.rows)
        if done < len(self._samples):
            self._lags.append(max(0.0, seconds - self._samples[done].seconds))

    @property
    def begun_rows(self) -> int:
        """The rows of all chunks that have begun."""
        return self._begun_rows

    @property
    def lag_s(self) -> float:
        """How long after the end of its rows at the mean rate a chunk is expected to be committed."""
        lags = sorted(self._lags)
        if len(lags) < _LAGS:
            return max(lags, default=_FIRST_LAG_S)
        return lags[-2]  # one straggler among them says nothing of the next chunk

    def rows_per_s(self) -> Interval | None:
        """Return the rate of the last quarter of an hour; None while it is unknown."""
        return self._ratio(_RECENT_S)

    def tokens_per_row(self) -> Interval | None:
        """Return the tokens of a row, by those of the last quarter of an hour; None while they are unknown."""
        return self._ratio(_RECENT_S, lambda sample: sample.tokens)

    def token_cost_per_row(self) -> Interval | None:
        """Return what an endpoint bills for a row, by the last quarter of an hour; None while it is unknown."""
        return self._ratio(_RECENT_S, lambda sample: sample.token_cost)

    def rows_per_s_to_come(self) -> Interval | None:
        """Return the rate of the hours to come; None while it is unknown.

        Its bounds also cover the rates since the first row and of the last third of that: executors may still come.
        """
        rates = [
            rate
            for span_s in (_RECENT_S, self.known_s, self.known_s / 3)
            if (rate := self._ratio(span_s)) is not None
        ]
        if len(rates) < 3:
            return None
        low, high = min(rate.low for rate in rates), max(rate.high for rate in rates)
        return Interval(low=low, middle=rates[0].middle, high=high)

    @property
    def known_s(self) -> float:
        """The seconds since the first row was done."""
        return self.last.seconds - self._samples[0].seconds if self._samples else 0.0

    def _ratio(self, span_s: float, of: Callable[[Sample], float] | None = None) -> Interval | None:
        """Return rows per second, or what ``of`` returns per row, over the last ``span_s``."""
        if not self._samples:
            return None
        begin_s = max(self._samples[0].seconds, self.last.seconds - span_s)
        blocks = min(_BLOCKS, int((self.last.seconds - begin_s) / _BLOCK_S))
        if blocks < _FEWEST_BLOCKS:
            return None
        ends = [begin_s + (self.last.seconds - begin_s) * i / blocks for i in range(blocks)]
        at = [bisect_left(self._samples, end, key=lambda sample: sample.seconds) for end in ends]
        samples = [*(self._samples[place] for place in at if place < len(self._samples)), self.last]
        if of is not None:
            pairs = [(float(of(b) - of(a)), float(b.rows - a.rows)) for a, b in pairwise(samples)]
        else:
            pairs = [(float(b.rows - a.rows), b.seconds - a.seconds) for a, b in pairwise(samples)]
        return ratio_of([pair for pair in pairs if pair[1] > 0])


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    """Return the ratio of the pairs' sums, bounded by Student's t over what they leave; None for fewer than five."""
    free = len(pairs) - 1
    if free < _FEWEST_BLOCKS - 1:
        return None
    below = sum(pair[1] for pair in pairs)
    ratio = sum(pair[0] for pair in pairs) / below
    error = math.sqrt(sum((a - ratio * b) ** 2 for a, b in pairs) * len(pairs) / free) / below
    # Cornish and Fisher's expansion of the quantile: within 2 % from 4 degrees of freedom on.
    width = error * (_NORMAL + 2.37 / free + 2.82 / free**2)
    return Interval(low=max(0.0, ratio - width), middle=ratio, high=ratio + width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is known before the first rows are done; None for what is not."""

    rows_per_s: Interval | None = None
    """By an earlier run of the job."""
    tokens_per_row: Interval | None = None
    """By the sampled rows: a row generates at most ``max_tokens``."""
    token_cost_per_row: Interval | None = None
    """Likewise, by an endpoint's prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """How many rows will be done in all when a limit is reached."""

    limit: Limit
    rows: Interval


def forecast(limits: Sequence[Limit], pace: Pace, prior: Prior = Prior()) -> Outlook | None:
    """Return what will be done by the limit that is reached first; None while too little is known for any of them."""
    rate = pace.rows_per_s_to_come() if pace.last.rows else prior.rows_per_s
    of_row = pace.tokens_per_row() if pace.last.rows else prior.tokens_per_row
    cost = pace.token_cost_per_row() if pace.last.rows else prior.token_cost_per_row
    outlooks = []
    for limit in limits:
        known_after_s = min(_RECENT_S, max(_KNOWN_AFTER_S, _KNOWN_SHARE * (limit.seconds or 0.0)))
        if pace.last.rows and pace.known_s < known_after_s:
            continue
        if limit.seconds is not None and rate is not None:
            left_s = max(0.0, limit.seconds - pace.last.seconds)
            more = Interval(low=rate.low * left_s, middle=rate.middle * left_s, high=rate.high * left_s)
        elif limit.tokens is not None and of_row is not None and of_row.low > 0:
            left: float = max(0, limit.tokens - pace.last.tokens)
            more = Interval(low=left / of_row.high, middle=left / of_row.middle, high=left / of_row.low)
        elif limit.cost is not None and (of_one := _cost_per_row(limit, cost, rate)) is not None:
            left = max(0.0, limit.cost - limit.cost_of(pace.last))
            more = Interval(low=left / of_one.high, middle=left / of_one.middle, high=left / of_one.low)
        else:
            continue
        done = pace.last.rows
        rows = Interval(low=done + more.low, middle=done + more.middle, high=done + more.high)
        outlooks.append(Outlook(limit=limit, rows=rows))
    return min(outlooks, key=lambda outlook: outlook.rows.middle, default=None)


def _cost_per_row(limit: Limit, tokens: Interval | None, rate: Interval | None) -> Interval | None:
    """Return what a row costs, by its tokens and by its time; None while that is unknown, or if it is nothing."""
    if tokens is None:
        return None
    low, middle, high = tokens.low, tokens.middle, tokens.high
    if limit.cost_per_s:
        if rate is None or rate.low <= 0:
            return None
        low, middle, high = (
            tokens.low + limit.cost_per_s / rate.high,
            tokens.middle + limit.cost_per_s / rate.middle,
            tokens.high + limit.cost_per_s / rate.low,
        )
    return Interval(low=low, middle=middle, high=high) if low > 0 else None


def reached(limits: Sequence[Limit], last: Sample) -> Limit | None:
    """Return the first of the limits that is reached; None if none is."""
    for limit in limits:
        if limit.seconds is not None and last.seconds >= limit.seconds:
            return limit
        if limit.tokens is not None and last.tokens >= limit.tokens:
            return limit
        if limit.cost is not None and limit.cost_of(last) >= limit.cost:
            return limit
    return None


def most_rows(
    limits: Sequence[Limit], pace: Pace, prior: Prior = Prior(), *, now_s: float | None = None
) -> int | None:
    """Return how many rows may still begin; None for any number.

    By the bounds that are on the safe side, these rows end before the limits. With no rate to go by, rows begin until
    half of the time has passed. ``now_s`` is later than the latest sample, or left out.
    """
    now_s = pace.last.seconds if now_s is None else now_s
    rows = min((_rows_that_fit(limit, pace, prior, now_s) for limit in limits), default=math.inf)
    return None if math.isinf(rows) else max(0, int(rows))


def _rows_that_fit(limit: Limit, pace: Pace, prior: Prior, now_s: float) -> float:
    """Return how many rows may begin after those that have begun."""
    last, in_flight = pace.last, max(0, pace.begun_rows - pace.last.rows)
    if limit.seconds is not None:
        rate = pace.rows_per_s() or prior.rows_per_s
        if rate is None:
            return math.inf if now_s < limit.seconds / 2 else 0.0
        return rate.low * (limit.seconds - now_s - pace.lag_s) - in_flight
    if limit.cost is not None:
        return _rows_that_cost_less(limit, limit.cost, pace, prior, now_s) - in_flight
    assert limit.tokens is not None, limit
    of_row = pace.tokens_per_row() or prior.tokens_per_row
    if of_row is None or of_row.high == 0:
        return math.inf if last.tokens < limit.tokens else 0.0
    return (limit.tokens - last.tokens) / of_row.high - in_flight


def _rows_that_cost_less(limit: Limit, cost: float, pace: Pace, prior: Prior, now_s: float) -> float:
    """Return how many rows, those in flight among them, may still be done at this cost."""
    left = cost - limit.cost_of(replace(pace.last, seconds=now_s))
    tokens = pace.token_cost_per_row() or prior.token_cost_per_row
    of_row = _cost_per_row(limit, tokens, pace.rows_per_s() or prior.rows_per_s)
    if of_row is None:
        if left <= 0 or limit.cost_per_s * now_s >= cost / 2:
            return 0.0
        return left / tokens.high if tokens is not None and tokens.high > 0 else math.inf
    return (left - limit.cost_per_s * pace.lag_s) / of_row.high
