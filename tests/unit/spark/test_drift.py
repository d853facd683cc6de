"""Two sets of rows are compared by tests whose tails are scipy's, with few false alarms and no missed change."""

from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest
from scipy import stats

from pipemax_spark.report.distributions import Choices, Distributions, Lengths
from pipemax_spark.report.drift import (
    Drift,
    Sampled,
    asked_again,
    binomial_tail,
    chi_square_tail,
    compared,
    hypergeometric_tail,
    moved,
)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 18, 51])
def test_the_chi_square_tail_is_scipys(degrees: int) -> None:
    for statistic in (1e-6, 0.3, 1.0, 4.2, 17.0, 60.0, 250.0):
        expected = float(stats.chi2.sf(statistic, degrees))
        assert chi_square_tail(statistic, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_the_hypergeometric_tail_is_scipys() -> None:
    for hits, drawn, marked, total in ((3, 10, 7, 50), (0, 10, 7, 50), (9, 500, 40, 100_500), (7, 10, 7, 12)):
        expected = float(stats.hypergeom.sf(hits - 1, total, marked, drawn))
        assert hypergeometric_tail(hits, drawn, marked, total) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_the_binomial_tail_is_scipys() -> None:
    for hits, drawn, share in ((0, 10, 0.01), (13, 500, 0.01), (500, 500, 0.01), (1, 50, 0.3)):
        expected = float(stats.binom.sf(hits - 1, drawn, share))
        assert binomial_tail(hits, drawn, share) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_rows_asked_again_may_differ_in_a_near_tie_and_not_in_a_tenth() -> None:
    assert not moved([asked_again(same=495, other=5)])
    assert moved([asked_again(same=450, other=50)])


def sampled(
    choices: Mapping[str, int],
    lengths: Mapping[int, int] | None = None,
    errors: Mapping[str, int] | None = None,
) -> Sampled:
    rows = sum(choices.values()) + sum((errors or {}).values())
    distributions = Distributions(
        choices=[Choices(name="text", rows=dict(choices))],
        lengths=[Lengths(name="generated tokens", rows=dict(lengths))] if lengths else [],
    )
    return Sampled(rows=rows, distributions=distributions, errors=dict(errors or {}))


def test_frequent_choices_are_compared_as_scipy_compares_them() -> None:
    before, now = {"a": 600, "b": 300, "c": 100}, {"a": 250, "b": 180, "c": 70}
    (comparison,) = compared(sampled(before), sampled(now))
    table = [[*before.values()], [*now.values()]]
    assert comparison.p_value == pytest.approx(
        stats.chi2_contingency(table, correction=False).pvalue, rel=1e-9
    )
    assert comparison.changes()[0] == ("a", 0.6, 0.5)


def test_a_choice_or_an_error_that_no_row_had_before_is_noticed() -> None:
    before = sampled({"a": 50_000, "b": 50_000})
    assert moved(compared(before, sampled({"a": 245, "b": 245, "c": 10})))
    failing = sampled({"a": 245, "b": 245}, errors={"engine_error": 10})
    (change,) = moved(compared(before, failing))
    assert change.name.startswith("errors")
    assert not moved(compared(before, sampled({"a": 250, "b": 250})))


def test_longer_answers_are_noticed_by_their_quartiles() -> None:
    random = Random(7)

    def lengths(rows: int, factor: float) -> Counter[int]:
        return Counter(int(factor * random.lognormvariate(4, 0.5)) for _ in range(rows))

    before = sampled({"a": 20_000}, lengths(20_000, 1.0))
    assert not moved(compared(before, sampled({"a": 500}, lengths(500, 1.0))))
    (change,) = moved(compared(before, sampled({"a": 500}, lengths(500, 1.3))))
    assert change.name == "generated tokens"


def test_lengths_that_are_all_the_same_are_no_change() -> None:
    assert not compared(sampled({"a": 900}, {1: 900}), sampled({"a": 500}, {1: 500}))


@pytest.mark.parametrize("choices", [2, 20])
def test_rows_of_one_distribution_seldom_raise_an_alarm(choices: int) -> None:
    random = Random(choices)
    weights = [1 / (place + 1) for place in range(choices)]

    def some(rows: int) -> Sampled:
        counts = Counter(random.choices(range(choices), weights, k=rows))
        failed = sum(random.random() < 0.01 for _ in range(rows))
        return sampled({str(name): n for name, n in counts.items()}, errors={"engine_error": failed})

    alarms = sum(bool(moved(compared(some(4_000), some(500)))) for _ in range(300))
    assert alarms <= 9, "1 % of 300, and four standard deviations"


def test_the_facts_say_what_has_moved() -> None:
    comparisons = compared(sampled({"a": 900, "b": 100}), sampled({"a": 250, "b": 250}))
    drift = Drift(rows=500, earlier_run="r1", earlier_rows=1_000, comparisons=comparisons)
    assert drift.facts()["moved"] == ["text"]
    assert "text: a 90.0% before and 50.0% now" in str(drift)
    assert "no earlier run" in str(Drift(rows=500, earlier_run=None))
