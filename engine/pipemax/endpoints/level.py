"""Find how many requests one endpoint should have open at once.

The level doubles while that pays, which is while answers come at a higher rate. It then holds, one doubling above
the last that paid, and from time to time tries a quarter more. A server that queues what it cannot run yet is so kept
full, and its queue stays short of a few times what it runs. A request that is throttled lowers the level by 30 %, at
most once per round trip; the level comes back to what the server was seen to bear by half of what is missing per round.
A time-out lowers it as well, and only measurements raise it again.

Additive increase and multiplicative decrease are those of TCP (Chiu and Jain, 1989), the doubling its slow start; that
only a higher rate justifies more in flight is BBR's rule (Cardwell et al., 2016). A round is as many answers as the
level. Knows nothing of rows, addresses or clocks.
"""

import math
from enum import Enum, auto

from pipemax.endpoints.measure import RateMeasure

FIRST_LEVEL = 8
_CUT = 0.7
_STEP = 1.25
"""A trial raises the level by so much."""
_PAYS = 1.05
"""A higher level pays if the rate is higher by so much."""
_MIN_ANSWERS = 8
_USABLE_ERROR = 0.2
"""A rate is compared with a later one once its error is below this share."""
_MAX_ROUNDS = 16
"""A comparison that has not been decided after so many rounds is given up."""
_BASELINE_ROUNDS = 3
_REST_ROUNDS = 4
_MAX_REST_ROUNDS = 64
"""Rounds between two trials: twice as many after each that did not pay."""
_LATENCY_MEMORY = 0.9


class _Mode(Enum):
    DOUBLING = auto()
    HOLDING = auto()
    TRYING = auto()
    RECOVERING = auto()


class _Verdict(Enum):
    PAYS = auto()
    DOES_NOT_PAY = auto()
    OPEN = auto()


class Level:
    """The level of one endpoint, and how many of its requests are open."""

    def __init__(self, max_level: int) -> None:
        """``max_level``: the most requests that may be open at once, 1 or more."""
        self.num_open = 0
        self._max_level = max_level
        self._level = min(FIRST_LEVEL, max_level)
        self._mode = _Mode.DOUBLING
        self._baseline: RateMeasure | None = None
        self._measure = RateMeasure(self._level)
        self._round_answers = 0
        self._rounds_held = 0
        self._rest_rounds = _REST_ROUNDS
        self._tolerated = max_level  # open requests that the server bore when it last throttled
        self._floor = 1  # the level goes no lower within the present round trip
        self._cut_at_s = -math.inf
        self._has_opened_since_cut = True
        self._latency_s: float | None = None

    @property
    def limit(self) -> int:
        """How many requests may be open now."""
        return self._level

    @property
    def has_room(self) -> bool:
        return self.num_open < self._level

    def open(self, now_s: float) -> None:
        """Count a request that is sent."""
        assert self.has_room, (self.num_open, self._level)
        self._change(now_s, 1)
        self._has_opened_since_cut = True

    def close(self, now_s: float) -> None:
        """Count a request that has ended without an answer and says nothing of the level."""
        self._change(now_s, -1)

    def answer(self, now_s: float, latency_s: float, work: float) -> None:
        """Count a good answer. ``work``: its tokens; 1 where they are not known."""
        self._change(now_s, -1)
        self._measure.add(now_s, latency_s, work)
        memory = 0.0 if self._latency_s is None else _LATENCY_MEMORY
        self._latency_s = memory * (self._latency_s or 0.0) + (1 - memory) * latency_s
        self._round_answers += 1
        if self._mode in (_Mode.DOUBLING, _Mode.TRYING):
            self._judge()
        if self._round_answers >= self._level:
            self._round_answers = 0
            self._end_round()

    def throttle(self, now_s: float) -> None:
        """Count a request that the server did not take because it is busy."""
        self._change(now_s, -1)
        before = self._level
        if self._may_cut(now_s):
            self._rest_rounds = self._longer_rest() if self._mode is _Mode.TRYING else _REST_ROUNDS
            self._cut(now_s, int(before * _CUT))
            self._floor = max(1, before // 2)
            self._tolerated = max(self._level, min(self.num_open, before - 1))
        # Further requests of the same burst show what the server bears.
        self._tolerated = max(self._floor, min(self._tolerated, self.num_open))
        self._set(_Mode.RECOVERING, min(self._level, self._tolerated))

    def time_out(self, now_s: float) -> None:
        """Count a request that had no answer in time."""
        self._change(now_s, -1)
        if self._may_cut(now_s):
            self._rest_rounds = _REST_ROUNDS
            self._cut(now_s, int(self._level * _CUT))
            self._set(_Mode.HOLDING, self._level)

    def start_again(self, now_s: float) -> None:
        """Begin small again, after the server was away."""
        self._measure.advance(now_s, self.num_open)
        self._baseline = None
        self._set(_Mode.DOUBLING, min(FIRST_LEVEL, self._level))

    def _change(self, now_s: float, by: int) -> None:
        self._measure.advance(now_s, self.num_open)
        self.num_open += by
        assert self.num_open >= 0, self.num_open
        self._measure.advance(now_s, self.num_open)

    # Up.

    def _judge(self) -> None:
        match self._compare():
            case _Verdict.PAYS:
                self._baseline, self._rest_rounds = self._measure, _REST_ROUNDS
                is_highest = self._level == self._max_level
                self._set(_Mode.HOLDING if is_highest else _Mode.DOUBLING, self._level * 2)
            case _Verdict.DOES_NOT_PAY if self._mode is _Mode.DOUBLING:
                self._set(_Mode.HOLDING, self._level)
            case _Verdict.DOES_NOT_PAY:
                assert self._baseline is not None
                self._rest_rounds = self._longer_rest()
                self._set(_Mode.HOLDING, self._baseline.level)
            case _Verdict.OPEN:
                pass

    def _compare(self) -> _Verdict:
        """Return whether the present level pays, compared with the lower one before it."""
        now, before = self._measure, self._baseline
        if now.num_answers < max(_MIN_ANSWERS, self._level // 2):
            return _Verdict.OPEN
        is_late = now.num_answers >= _MAX_ROUNDS * self._level
        if not now.is_full:
            if is_late:
                self._measure = RateMeasure(self._level)  # too few rows came: measure again
            return _Verdict.OPEN
        if now.relative_error > _USABLE_ERROR and not is_late:
            return _Verdict.OPEN
        if before is None or before.rate <= 0:
            return _Verdict.PAYS
        gain = now.rate / before.rate
        error = gain * math.hypot(now.relative_error, before.relative_error)
        if gain - (1 if self._mode is _Mode.DOUBLING else 2) * error > _PAYS:
            return _Verdict.PAYS
        if now.num_answers >= self._level and (is_late or gain + error < _PAYS):
            return _Verdict.DOES_NOT_PAY
        return _Verdict.OPEN

    def _end_round(self) -> None:
        if self._mode is _Mode.RECOVERING:
            missing = self._tolerated - self._level
            if missing > 0:
                self._set(_Mode.RECOVERING, self._level + math.ceil(missing / 2))
            else:
                self._set(_Mode.HOLDING, self._level)
        elif self._mode is _Mode.HOLDING and self._level < self._max_level:
            self._rounds_held += 1
            measured = self._measure.num_answers
            if measured < max(_MIN_ANSWERS, _BASELINE_ROUNDS * self._level):
                return
            if self._rounds_held >= self._rest_rounds and self._measure.is_full:
                self._baseline = self._measure
                self._set(_Mode.TRYING, math.ceil(self._level * _STEP))
            elif measured >= _MAX_ROUNDS * self._level or not self._measure.is_full:
                self._measure = RateMeasure(self._level)  # a rate of long ago is no baseline

    def _longer_rest(self) -> int:
        return min(_MAX_REST_ROUNDS, self._rest_rounds * 2)

    # Down.

    def _may_cut(self, now_s: float) -> bool:
        """Return whether a round trip has passed since the last cut."""
        return self._has_opened_since_cut and now_s - self._cut_at_s >= (self._latency_s or 0.0)

    def _cut(self, now_s: float, level: int) -> None:
        self._level = max(1, level)
        self._cut_at_s = now_s
        self._has_opened_since_cut = False

    def _set(self, mode: _Mode, level: int) -> None:
        self._mode = mode
        self._level = max(1, min(level, self._max_level))
        self._measure = RateMeasure(self._level)
        self._round_answers = self._rounds_held = 0
