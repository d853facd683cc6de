"""One replica tries n-gram speculation: what its rate over the others' must be for them to get it too."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from pipemax.tuning.canary import Canary, ReplicaSeen, Speculation, Stage

_LONG_S = 36_000.0
_START_S = 60.0


@dataclass
class Replicas:
    """Replicas that make so many tokens a second each, of which the last may have speculation."""

    speeds: list[float]
    gain: float = 1.0
    """Of speculation, as a ratio of rates."""
    noise: float = 0.0
    """Standard deviation of the rate of 20 seconds."""
    seed: int = 0
    waiting: int = 100
    does_start: bool = True
    canary: Canary = field(default_factory=Canary)

    def __post_init__(self) -> None:
        count = len(self.speeds)
        self.now_s, self._tokens = 0.0, [0.0] * count
        self.speculates, self._restarts, self._up_at_s = [False] * count, [0] * count, [0.0] * count
        self._rng = np.random.default_rng(self.seed)

    def run(self, *, left_s: float = _LONG_S, residence_s: float = 10.0, most_s: float = 3_600.0) -> None:
        """Have the trial go on until it ends; a second passes between two looks."""
        end_s = self.now_s + most_s
        while self.now_s < end_s:
            replicas = [self._seen(index) for index in range(len(self.speeds))]
            if self.canary.observe(replicas, left_s=left_s, residence_s=residence_s, now_s=self.now_s):
                return
            self._change()
            self.now_s += 1.0
            for index, speed in enumerate(self.speeds):
                if self.now_s >= self._up_at_s[index]:
                    rate = speed * (self.gain if self.speculates[index] else 1.0)
                    self._tokens[index] += rate * (1 + self.noise * math.sqrt(20) * self._rng.normal())

    def kill(self, index: int) -> None:
        """A replica dies; one that speculates comes back without."""
        self._restart(index, speculates=False)
        self.canary.speculating -= {index + 1}

    def _change(self) -> None:
        for index, speculates in enumerate(self.speculates):
            if speculates != (index + 1 in self.canary.speculating):
                self._restart(index, speculates=not speculates)
                if not self.does_start:
                    self.kill(index)

    def _restart(self, index: int, *, speculates: bool) -> None:
        self._restarts[index] += 1
        self.speculates[index], self._up_at_s[index] = speculates, self.now_s + _START_S

    def _seen(self, index: int) -> ReplicaSeen:
        return ReplicaSeen(
            number=index + 1,
            is_up=self.now_s >= self._up_at_s[index],
            speculates=self.speculates[index],
            restarts=self._restarts[index],
            start_s=_START_S,
            output_tokens=self._tokens[index],
            running=64,
            waiting=self.waiting,
        )


def result_of(replicas: Replicas) -> Speculation:
    assert replicas.canary.result is not None
    return replicas.canary.result


def test_where_the_canary_is_faster_beyond_doubt_all_get_it() -> None:
    replicas = Replicas([1000.0, 1000.0, 1000.0], gain=1.3, noise=0.02)
    replicas.run()
    result = result_of(replicas)
    assert result.is_taken
    assert replicas.canary.speculating == {1, 2, 3}
    assert str(result).startswith("n-gram speculation: +")
    assert str(result).endswith(", taken")


@pytest.mark.parametrize("gain", [0.7, 1.0, 1.03])
def test_where_it_gains_less_than_5_percent_it_goes_back(gain: float) -> None:
    replicas = Replicas([1000.0, 1000.0], gain=gain, noise=0.02)
    replicas.run()
    result = result_of(replicas)
    assert (result.is_taken, result.why) == (False, "not taken")
    assert replicas.canary.speculating == set()


def test_a_gpu_that_was_faster_all_along_is_not_taken_for_a_gain() -> None:
    replicas = Replicas([1000.0, 1200.0], gain=1.0, noise=0.02)
    replicas.run()
    assert not result_of(replicas).is_taken


def test_without_a_gain_it_is_hardly_ever_taken_and_with_15_percent_nearly_always() -> None:
    taken = dict.fromkeys((1.0, 1.05, 1.15), 0)
    for gain in taken:
        for seed in range(60):
            replicas = Replicas([1000.0, 1000.0], gain=gain, noise=0.02, seed=seed)
            replicas.run()
            taken[gain] += result_of(replicas).is_taken
    assert taken[1.0] == 0
    assert taken[1.05] <= 6, "as likely above as below what is worth it"
    assert taken[1.15] >= 57


@pytest.mark.parametrize(
    ("left_s", "residence_s"),
    [
        pytest.param(20 * _START_S / 0.2 - 60, 10.0, id="20 restarts are not worth a fifth of the rest"),
        pytest.param(_LONG_S, _LONG_S / 30, id="blocks as long as a row runs take too much of the rest"),
    ],
)
def test_on_a_table_that_is_too_short_nothing_is_tried(left_s: float, residence_s: float) -> None:
    replicas = Replicas([1000.0, 1000.0], gain=2.0)
    replicas.run(left_s=left_s, residence_s=residence_s, most_s=2 * _LONG_S)
    assert replicas.canary.stage is Stage.ENDED
    assert (replicas.canary.result, replicas.canary.speculating) == (None, set())


def test_one_that_does_not_start_is_a_result_without_a_rate() -> None:
    replicas = Replicas([1000.0, 1000.0], gain=2.0, does_start=False)
    replicas.run()
    assert str(result_of(replicas)) == "n-gram speculation: it does not start here"
    assert not result_of(replicas).is_taken


def test_one_that_dies_in_the_trial_is_not_taken() -> None:
    replicas = Replicas([1000.0, 1000.0], gain=1.06, noise=0.02)
    while replicas.canary.stage is not Stage.WITH:
        replicas.run(most_s=1.0)
    replicas.kill(1)
    replicas.run()
    assert str(result_of(replicas)) == "n-gram speculation: the replica that tried it ended"


def test_without_rows_that_wait_no_rates_are_compared() -> None:
    replicas = Replicas([1000.0, 1000.0], gain=2.0, waiting=0)
    replicas.run()
    assert (replicas.canary.stage, replicas.canary.result) == (Stage.ENDED, None), "it was not begun"
    replicas = Replicas([1000.0, 1000.0], gain=2.0)
    while replicas.canary.stage is not Stage.WITH:
        replicas.run(most_s=1.0)
    replicas.waiting = 0
    replicas.run()
    assert str(result_of(replicas)).endswith("rates could not be compared: too few rows were waiting")


def test_at_the_end_of_a_table_a_loser_is_not_started_again() -> None:
    replicas = Replicas([1000.0, 1000.0], gain=0.8)
    while replicas.canary.stage is not Stage.WITH:
        replicas.run(most_s=1.0)
    replicas.run(left_s=_START_S)
    assert not result_of(replicas).is_taken
    assert replicas.canary.speculating == {2}


def test_a_trial_waits_for_replicas_that_have_speculation_from_a_job_before() -> None:
    replicas = Replicas([1000.0, 1000.0], gain=1.5)
    replicas.speculates[0] = True
    replicas.run()
    assert result_of(replicas).is_taken
