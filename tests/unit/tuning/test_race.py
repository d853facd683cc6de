"""The race and its stop rule, without an engine."""

import math
from random import Random
from statistics import fmean

import pytest

from pipemax.domain.step_records import StepLimits
from pipemax.tuning.race import MAX_LOOKS, Race, Rival, Verdict

LIMITS = [StepLimits(step_tokens=1024 * count, running_rows=64) for count in (1, 2, 3)]


def rivals(count: int, *, planned_units: int = 12, predicted: float | None = None) -> list[Rival]:
    return [
        Rival(limits=limits, predicted=predicted, planned_units=planned_units) for limits in LIMITS[:count]
    ]


def run(race: Race, gains: dict[StepLimits, float], rng: Random, *, sd: float = 0.028) -> Verdict:
    for _ in range(200):
        race.add([rng.gauss(gains[race.rival.limits], sd)])
        verdict = race.look()
        if verdict is not None:
            return verdict
    raise AssertionError("the race did not end")


def test_pairs_alternate_and_each_rival_has_two_in_a_row() -> None:
    race = Race(rivals(2), num_replicas=3)
    order, firsts = [], []
    for _ in range(8):
        order.append(LIMITS.index(race.rival.limits))
        firsts.append(race.rival_first())
        race.add([0.0, 0.0, 0.0])
    assert order == [0, 0, 1, 1, 0, 0, 1, 1]
    assert firsts[:2] == [[False, True, False], [True, False, True]]
    assert race.num_pairs == 8
    assert len(race.rivals[0].units) == 8, "two of three replicas make one unit, the third another"


def test_what_two_replicas_go_through_together_cancels() -> None:
    race = Race(rivals(1), num_replicas=2)
    slower_later = 0.3
    race.add([0.05 - slower_later, 0.05 + slower_later])
    assert race.rivals[0].units == [pytest.approx(0.05)]


def test_a_clearly_faster_rival_wins_before_all_blocks_are_raced() -> None:
    race = Race(rivals(1), num_replicas=1)
    verdict = run(race, {LIMITS[0]: 0.10}, Random(1))
    assert verdict.winner is race.rivals[0]
    assert verdict.why == "it was shown to be faster"
    assert race.num_pairs < 12


def test_the_best_of_three_rivals_wins() -> None:
    race = Race(rivals(3), num_replicas=1)
    verdict = run(race, dict(zip(LIMITS, (0.03, 0.12, -0.10), strict=True)), Random(2))
    assert verdict.winner is race.rivals[1]
    assert max(len(rival.units) for rival in race.rivals) < 12


def test_slower_rivals_are_dropped_and_the_default_stays() -> None:
    race = Race(rivals(2), num_replicas=1)
    verdict = run(race, dict(zip(LIMITS, (-0.12, -0.15), strict=False)), Random(3))
    assert verdict.winner is None
    assert race.num_pairs < 24


def test_equal_rivals_win_no_more_often_than_the_stop_rule_allows() -> None:
    rng = Random(4)
    shown = [
        run(Race(rivals(1), num_replicas=1), {LIMITS[0]: 0.0}, rng).why == "it was shown to be faster"
        for _ in range(1000)
    ]
    assert 0.005 <= fmean(shown) <= 0.05, "one side of 5 %, and the scatter is estimated"


def test_noise_twice_as_large_as_usual_does_not_break_the_stop_rule() -> None:
    rng = Random(5)
    shown = [
        run(Race(rivals(1), num_replicas=1), {LIMITS[0]: 0.0}, rng, sd=0.056).why
        == "it was shown to be faster"
        for _ in range(600)
    ]
    assert fmean(shown) <= 0.11


def test_at_the_end_a_rival_must_look_better_by_half_a_percent() -> None:
    for gain, wins in ((0.004, False), (0.03, True)):
        race = Race(rivals(1), num_replicas=1)
        race.rivals[0].units = [gain] * 4
        assert (race.end("its time is up").winner is not None) is wins
    assert Race(rivals(1), num_replicas=1).end("its time is up").winner is None


def test_a_rival_that_four_pairs_are_not_for_does_not_win_whatever_is_predicted() -> None:
    for measured, wins in ((-0.003, False), (0.003, True)):
        race = Race(rivals(1, predicted=0.04), num_replicas=1)
        race.rivals[0].units = [measured] * 4
        assert (race.end("its time is up").winner is not None) is wins


def test_one_pair_does_not_refute_a_large_prediction() -> None:
    for measured, wins in ((-0.02, True), (-0.15, False)):
        race = Race(rivals(1, predicted=0.04), num_replicas=1)
        race.rivals[0].units = [measured]
        assert (race.end("its time is up").winner is not None) is wins


def test_a_race_ends_early_when_the_first_pairs_do_not_show_what_was_predicted() -> None:
    race = Race(rivals(1, predicted=0.016), num_replicas=1)
    verdict = run(race, {LIMITS[0]: -0.02}, Random(6), sd=0.001)
    assert verdict.winner is None
    assert verdict.why == "no rival looks better"
    assert race.num_pairs == 2


def test_the_prediction_counts_as_much_as_three_or_four_pairs() -> None:
    (rival,) = rivals(1, predicted=0.04)
    rival.units = [0.0] * 3
    assert rival.weighed_mean() > 0.02
    rival.units = [0.0] * 4
    assert rival.weighed_mean() < 0.02
    rival.units = [0.0] * 20
    assert rival.weighed_mean() < 0.006


def test_bounds_narrow_from_look_to_look() -> None:
    (rival,) = rivals(1)
    halves = []
    for _ in range(MAX_LOOKS):
        rival.units.append(0.0)
        halves.append(rival.estimate().high)
    assert halves == sorted(halves, reverse=True)
    assert halves[0] / halves[-1] > MAX_LOOKS**0.5
    assert math.isclose(rival.estimate().low, -rival.estimate().high)


def test_a_race_needs_rivals() -> None:
    with pytest.raises(ValueError, match="needs rivals"):
        Race([], num_replicas=1)
