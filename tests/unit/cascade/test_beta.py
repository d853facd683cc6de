"""The tail functions against scipy's, and against sums of exact fractions."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from pipemax_spark.cascade.beta import chance, log_wealth

SHARES = st.floats(1e-4, 0.9)


@settings(max_examples=300)
@given(st.integers(1, 30_000_000), st.floats(0, 3), SHARES)
def test_chance_is_scipys_binomial_tail(misses: int, times: float, share: float) -> None:
    differing = int(times * misses * share / (1 - share))
    assert chance(differing, misses, share) == pytest.approx(
        special.betainc(misses, differing + 1, 1 - share), abs=1e-9
    )


@settings(max_examples=300)
@given(st.integers(1, 100_000), st.floats(-8, 2), st.floats(1e-3, 0.34))
def test_a_small_chance_is_as_exact_as_a_large_one(misses: int, sigmas: float, share: float) -> None:
    expected = misses * share / (1 - share)
    differing = max(0, int(expected + sigmas * math.sqrt(expected)))
    assert chance(differing, misses, share) == pytest.approx(
        float(stats.nbinom.cdf(differing, misses, 1 - share)), rel=1e-9, abs=1e-300
    )


@pytest.mark.parametrize(
    ("differing", "misses", "share"), [(0, 1, "1/2"), (3, 7, "1/3"), (34, 601, "1/14"), (0, 40, "1/1000")]
)
def test_chance_is_the_sum_of_exact_fractions(differing: int, misses: int, share: str) -> None:
    q, rows = Fraction(share), differing + misses
    exact = sum(math.comb(rows, j) * q**j * (1 - q) ** (rows - j) for j in range(differing + 1))
    assert chance(differing, misses, float(q)) == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize(
    ("differing", "misses", "share"),
    [
        (57_644, 30_000_001, 0.00193),
        (1_246_731, 3_000_000_001, 0.000416),
        (500_000_000, 1_000_000_000, 1 / 3),
    ],
)
def test_of_billions_of_rows_nine_digits_are_right(differing: int, misses: int, share: float) -> None:
    expected = special.betainc(misses, differing + 1, 1 - share)
    assert chance(differing, misses, share) == pytest.approx(expected, rel=1e-9)


def test_without_misses_the_chance_is_certainty() -> None:
    assert chance(0, 0, 0.1) == chance(5, 0, 0.1) == 1.0


@settings(max_examples=300)
@given(st.integers(0, 3_000), st.floats(0, 2), st.floats(1e-3, 0.34), st.floats(0.1, 3_000))
def test_log_wealth_is_scipys_ratio_of_beta_functions(
    misses: int, times: float, share: float, prior: float
) -> None:
    differing = int(times * misses * share / (1 - share))
    a, b = prior * share, prior * (1 - share)
    below = special.betainc(a + differing, b + misses, share)
    if below < 1e-290:
        return  # scipy's underflows
    expected = (
        math.log(below / special.betainc(a, b, share))
        + special.betaln(a + differing, b + misses)
        - special.betaln(a, b)
        - differing * math.log(share)
        - misses * math.log1p(-share)
    )
    assert log_wealth(differing, misses, share, prior) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_log_wealth_is_the_mixture_of_likelihood_ratios() -> None:
    share, prior, differing, misses = 0.1, 40.0, 5, 120
    a, b = prior * share, prior * (1 - share)

    def weight(p: float) -> float:
        return float(stats.beta.pdf(p, a, b))

    def weighted_ratio(p: float) -> float:
        return (p / share) ** differing * ((1 - p) / (1 - share)) ** misses * weight(p)

    mixture = integrate.quad(weighted_ratio, 0, share)[0] / integrate.quad(weight, 0, share)[0]
    assert log_wealth(differing, misses, share, prior) == pytest.approx(math.log(mixture), abs=1e-8)


@given(st.integers(0, 60), st.integers(0, 500), st.floats(0.01, 0.34), st.floats(0.5, 100))
def test_wealth_is_a_martingale(differing: int, misses: int, share: float, prior: float) -> None:
    now, audited, missed = (
        math.exp(log_wealth(differing + more, misses + fewer, share, prior))
        for more, fewer in ((0, 0), (1, 0), (0, 1))
    )
    assert share * audited + (1 - share) * missed == pytest.approx(now, rel=1e-9)


def test_far_more_differing_rows_than_expected_are_no_evidence_and_no_error() -> None:
    """The integral is then all at its upper end, where scipy's function is 0."""
    differing, share, prior = 100_000, 0.001, 50.0
    a, b = prior * share, prior * (1 - share)
    assert special.betainc(a + differing, b + 10, share) == 0
    end = float(stats.beta.pdf(share, a, b) / stats.beta.cdf(share, a, b)) * share / differing
    assert log_wealth(differing, 10, share, prior) == pytest.approx(math.log(end), abs=1e-3)
