"""Find how many requests one endpoint should have open at once.

The level doubles while that pays, which is while answers come at a higher rate. It then holds, one doubling above
the last that paid, and from time to time tries more. A server that queues what it cannot run yet is so kept full, and
its queue stays short of a few times what it runs. Throttled requests lower the level by 30 %, at most once per round
trip, unless they are rare; it comes back to what the server was seen to bear by half of what is missing per round. Many
time-outs halve it, and then only measurements raise it again. What has no effect is undone (``trouble``).

Additive increase and multiplicative decrease are those of TCP (Chiu and Jain, 1989), the doubling its slow start; that
only a higher rate justifies more in flight is BBR's rule (Cardwell et al., 2016). A round is as many answers as the
level. Knows nothing of rows, addresses or clocks.
"""

import math
from enum import Enum, auto

from pipemax.endpoints.measure import ROUNDS, Rate, RateMeasure, gain_of
from pipemax.endpoints.trouble import Trouble

FIRST_LEVEL = 8
_CUT = 0.7
_STEP = 2.0
_CAREFUL_STEP = 1.25
"""A trial raises the level by so much; the second, once the server has throttled or let requests time out."""
_PAYS = 1.05
_CAREFUL_PAYS = 1.02
"""A level after such a step pays if the rate is higher by so much."""
_CLEARLY_PAYS = 1.4
_CAREFUL_CLEARLY_PAYS = 1.15
"""So much more shows that the server has much room: the level doubles at once."""
_SURE_ROUNDS = 2
"""A smaller gain is believed after as many rounds as a queue takes to become steady."""
_USABLE_ERROR = 0.2
"""A rate is compared with a later one once its error is below this share."""
_REST_ROUNDS = 4
_MAX_REST_ROUNDS = 64
_CAREFUL_MAX_REST_ROUNDS = 16
"""Rounds between two trials: twice as many after each that did not pay."""
_PAUSES_BETWEEN_TRIALS = 20
"""A trial that is throttled costs the pause that the server asks for: at most a twentieth of the time."""
_THROTTLED_SHARE, _THROTTLED_MEMORY, _MAX_USUALLY_THROTTLED = 0.08, 64, 0.3
_LATE_SHARE, _LATE_MEMORY, _MAX_USUALLY_LATE = 0.1, 32, 1.0
"""A larger share of the last requests lowers the level, unless it has no effect on so small a share (``Trouble``)."""
_LATENCY_MEMORY = 0.9


class _Mode(Enum):
    DOUBLING = auto()
    HOLDING = auto()
    TRYING = auto()
    RECOVERING = auto()


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
        self._is_careful = False
        self._floor = 1  # the level goes no lower within the present round trip
        self._cut_at_s = self._try_after_s = -math.inf
        self._has_opened_since_cut = True
        self._latency_s: float | None = None
        self._throttled = Trouble(
            too_many=_THROTTLED_SHARE, max_usual=_MAX_USUALLY_THROTTLED, memory=_THROTTLED_MEMORY
        )
        self._late = Trouble(too_many=_LATE_SHARE, max_usual=_MAX_USUALLY_LATE, memory=_LATE_MEMORY)

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
        self._throttled.count(has_it=False)
        self._late.count(has_it=False)
        self._restore()
        has_rate = self._measure.add(now_s, latency_s, work)
        memory = 0.0 if self._latency_s is None else _LATENCY_MEMORY
        self._latency_s = memory * (self._latency_s or 0.0) + (1 - memory) * latency_s
        self._round_answers += 1
        if has_rate and self._mode in (_Mode.DOUBLING, _Mode.TRYING):
            self._judge(self._measure.rates[-1])
        if self._round_answers >= self._level:
            self._round_answers = 0
            self._end_round(now_s)

    def throttle(self, now_s: float, pause_s: float) -> None:
        """Count a request that the server did not take because it is busy, and the pause that it asks for."""
        self._change(now_s, -1)
        self._throttled.count(has_it=True)
        self._restore()
        if not self._throttled.is_too_much:
            return
        before = self._level
        if self._may_cut(now_s):
            self._rest_rounds = self._longer_rest() if self._mode is _Mode.TRYING else _REST_ROUNDS
            self._throttled.cut(before)
            self._cut(now_s, int(before * _CUT))
            self._floor = max(1, before // 2)
            self._tolerated = max(self._level, min(self.num_open, before - 1))
            self._try_after_s = now_s + _PAUSES_BETWEEN_TRIALS * pause_s
        # Further requests of the same burst show what the server bears.
        self._tolerated = max(self._floor, min(self._tolerated, self.num_open))
        self._set(_Mode.RECOVERING, min(self._level, self._tolerated))

    def time_out(self, now_s: float) -> None:
        """Count a request that had no answer in time."""
        self._change(now_s, -1)
        self._late.count(has_it=True)
        if self._late.is_too_much and not self._late.is_settling and self._may_cut(now_s):
            if self._mode is _Mode.TRYING and self._baseline is not None:
                self._rest_rounds = self._longer_rest()
                self._cut(now_s, self._baseline.level)
            else:
                self._rest_rounds = _REST_ROUNDS
                self._late.cut(self._level)
                self._cut(now_s, self._level // 2)
            self._set(_Mode.HOLDING, self._level)
        self._restore()

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

    def _judge(self, rate: Rate) -> None:
        """Decide by the rate that was just noted."""
        if not self._measure.is_full(rate):
            if self._measure.is_complete:
                self._measure = RateMeasure(self._level)  # too few rows came: measure again
            return
        if self._baseline is None:
            if rate.relative_error < _USABLE_ERROR or self._measure.is_complete:
                self._go_up(self._level * 2)
        elif self._mode is _Mode.DOUBLING:
            self._judge_doubling(self._baseline)
        else:
            self._judge_trial(self._baseline)

    def _judge_doubling(self, baseline: RateMeasure) -> None:
        """Double again, or hold: a trial with a longer baseline may then show more."""
        rates = self._measure.rates
        gain, error = self._gain(baseline)
        pays = gain - error > _CLEARLY_PAYS
        if not pays and self._is_sure:
            # With the baseline's last rate, which is too high where it was left early: a gain is one all the more.
            gain, error = gain_of(rates[-1], baseline.rates[-1])
            pays = gain - 2 * error > _PAYS
        if pays and (rates[-1].relative_error < _USABLE_ERROR or self._measure.is_complete):
            self._go_up(self._level * 2)
        elif self._is_sure and not pays:
            self._set(_Mode.HOLDING, self._level)

    def _judge_trial(self, baseline: RateMeasure) -> None:
        if not self._is_sure:
            return
        gain, error = self._gain(baseline)
        pays, clearly_pays = (
            (_CAREFUL_PAYS, _CAREFUL_CLEARLY_PAYS) if self._is_careful else (_PAYS, _CLEARLY_PAYS)
        )
        if gain - 2 * error > clearly_pays:
            self._go_up(self._level * 2)
        elif gain - 2 * error > pays:
            self._rest_rounds = _REST_ROUNDS
            self._set(_Mode.HOLDING, self._level)
        elif gain + error < pays or len(self._measure.rates) >= len(baseline.rates):
            self._rest_rounds = self._longer_rest()
            self._set(_Mode.HOLDING, baseline.level)

    @property
    def _is_sure(self) -> bool:
        return len(self._measure.rates) > ROUNDS.index(_SURE_ROUNDS)

    def _go_up(self, level: int) -> None:
        self._baseline, self._rest_rounds = self._measure, _REST_ROUNDS
        self._set(_Mode.HOLDING if self._level == self._max_level else _Mode.DOUBLING, level)

    def _gain(self, baseline: RateMeasure) -> tuple[float, float]:
        """Return what the level gains after as many rounds as both it and the baseline have, and the error."""
        last = min(len(baseline.rates), len(self._measure.rates)) - 1
        return gain_of(self._measure.rates[last], baseline.rates[last])

    def _end_round(self, now_s: float) -> None:
        if self._mode is _Mode.RECOVERING:
            missing = self._tolerated - self._level
            if missing > 0:
                self._set(_Mode.RECOVERING, self._level + math.ceil(missing / 2))
            else:
                self._set(_Mode.HOLDING, self._level)
        elif self._mode is _Mode.HOLDING and self._level < self._max_level:
            self._rounds_held += 1
            rates = self._measure.rates
            if not self._is_sure:
                return
            has_rested = self._rounds_held >= self._rest_rounds and now_s >= self._try_after_s
            if has_rested and self._measure.is_full(rates[-1]):
                self._baseline = self._measure
                step = _CAREFUL_STEP if self._is_careful else _STEP
                self._set(_Mode.TRYING, math.ceil(self._level * step))
            elif self._measure.is_complete or not self._measure.is_full(rates[-1]):
                self._measure = RateMeasure(self._level)  # a rate of long ago is no baseline

    def _longer_rest(self) -> int:
        longest = _CAREFUL_MAX_REST_ROUNDS if self._is_careful else _MAX_REST_ROUNDS
        return min(longest, self._rest_rounds * 2)

    # Down.

    def _restore(self) -> None:
        """Raise the level again if it was lowered without effect."""
        for trouble in (self._throttled, self._late):
            level = trouble.take_restored_level()
            if level is not None and level > self._level:
                self._set(_Mode.HOLDING, level)

    def _may_cut(self, now_s: float) -> bool:
        """Return whether a round trip has passed since the last cut."""
        return self._has_opened_since_cut and now_s - self._cut_at_s >= (self._latency_s or 0.0)

    def _cut(self, now_s: float, level: int) -> None:
        self._level = max(1, level)
        self._is_careful = True
        self._cut_at_s = now_s
        self._has_opened_since_cut = False

    def _set(self, mode: _Mode, level: int) -> None:
        self._mode = mode
        self._level = max(1, min(level, self._max_level))
        self._measure = RateMeasure(self._level)
        self._round_answers = self._rounds_held = 0
