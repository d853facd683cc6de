"""The counting rule: its numbers against the reference's, and the promise over every table and all coins."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from pipemax_spark.cascade.beta import chance
from pipemax_spark.cascade.certificate import certify
from pipemax_spark.cascade.promise import Promise, last_true
from tests.unit.cascade.draws import labelled, make_draw

USUAL = Promise(agree=0.97, confidence=0.95)


@pytest.mark.parametrize(("rows", "sampled"), [(2_000, 306), (20_000, 1_423), (1_000_000, 19_309)])
def test_the_default_sample_has_the_size_of_the_design(rows: int, sampled: int) -> None:
    assert rows * USUAL.default_sample_share(rows) == pytest.approx(sampled, abs=1)


def test_a_sample_is_at_most_a_third_of_the_rows() -> None:
    assert USUAL.default_sample_share(10) == 1 / 3


def test_of_20_000_rows_34_sampled_ones_may_differ() -> None:
    share = USUAL.default_sample_share(20_000)
    assert USUAL.allowed_differing(20_000, share) == 34
    assert chance(34, 601, share) == pytest.approx(0.0454, abs=1e-4)


@pytest.mark.parametrize(
    ("agree", "rows", "budget"),
    [(0.97, 100, 3), (0.9, 10, 1), (0.97, 1_000_000_000, 30_000_000), (0.97, 33, 0), (0.7, 10, 3)],
)
def test_the_budget_is_the_share_as_it_is_written(agree: float, rows: int, budget: int) -> None:
    assert Promise(agree=agree, confidence=0.95).budget(rows) == budget


def test_the_risk_is_what_is_left_of_the_confidence_as_it_is_written() -> None:
    assert USUAL.risk == 0.05
    assert Promise(agree=0.9, confidence=0.999).risk == 0.001


@given(st.integers(1, 2_000_000), st.floats(0.5, 0.999), st.floats(0.01, 0.5))
def test_one_differing_row_more_would_break_the_promise(rows: int, agree: float, share: float) -> None:
    promise = Promise(agree=agree, confidence=0.95)
    misses, allowed = promise.budget(rows) + 1, promise.allowed_differing(rows, share)
    tail = special.betainc(misses, 1 if allowed is None else allowed + 2, 1 - share)
    assert tail > 0.05 - 1e-9
    if allowed is not None:
        assert special.betainc(misses, allowed + 1, 1 - share) <= 0.05 + 1e-9
        assert promise.bound_misses(allowed, share) <= promise.budget(rows)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_outside_of_0_to_1_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match=f"agree is {value}; give a share above 0 and below 1"):
        Promise(agree=value, confidence=0.95)
    with pytest.raises(ValueError, match=f"confidence is {value}"):
        Promise(agree=0.97, confidence=value)


def test_full_agreement_is_refused_with_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"agree is 1: .* give less, such as 0\.99"):
        Promise(agree=1.0, confidence=0.95)


@given(st.integers(-1, 5_000))
def test_the_last_integer_that_passes_is_the_last(last: int) -> None:
    assert last_true(lambda value: value <= last) == (None if last < 0 else last)


def worst_chances(rows: int, *, agree: float, confidence: float, sample_share: float) -> tuple[float, float]:
    """Return the largest P(misses > budget) and P(misses > bound) over all tables and the coins of each."""
    draw = make_draw(rows, agree=agree, confidence=confidence, sample_share=sample_share)
    worst_budget = worst_bound = 0.0
    coins = list(itertools.product((False, True), repeat=rows))
    for differs in itertools.product((False, True), repeat=rows):
        table = labelled(differs)
        over_budget = over_bound = 0.0
        for sampled in coins:
            certificate = certify(draw, itertools.compress(table, sampled))
            misses = sum(
                row.differs and certificate.keeps(row.score, row.tie_break, is_sampled=is_sampled)
                for row, is_sampled in zip(table, sampled, strict=True)
            )
            weight = sample_share ** sum(sampled) * (1 - sample_share) ** (rows - sum(sampled))
            over_budget += weight * (misses > certificate.budget_rows)
            over_bound += weight * (misses > certificate.max_misses)
        worst_budget, worst_bound = max(worst_budget, over_budget), max(worst_bound, over_bound)
    return worst_budget, worst_bound


@pytest.mark.parametrize(
    ("rows", "agree", "confidence", "sample_share"),
    [
        (7, 0.7, 0.68, 0.5),  # two misses and one sampled row that differs
        pytest.param(8, 0.6, 0.8, 0.5, marks=pytest.mark.long),  # three and one
        pytest.param(8, 0.75, 0.6, 0.3, marks=pytest.mark.long),  # two and none
    ],
)
def test_no_table_breaks_the_promise_more_often_than_the_rule_says(
    rows: int, agree: float, confidence: float, sample_share: float
) -> None:
    promise = Promise(agree=agree, confidence=confidence)
    allowed = promise.allowed_differing(rows, sample_share)
    assert allowed is not None
    worst_budget, worst_bound = worst_chances(
        rows, agree=agree, confidence=confidence, sample_share=sample_share
    )
    assert worst_budget == pytest.approx(chance(allowed, promise.budget(rows) + 1, sample_share), abs=1e-9)
    assert worst_budget <= promise.risk
    assert worst_bound <= promise.risk + 1e-12


def test_promises_of_several_columns_hold_together() -> None:
    promise = Promise(agree=0.97, confidence=0.95)
    assert promise.of_each(1) == promise
    for number in (2, 3, 7):
        of_each = promise.of_each(number)
        assert of_each.agree == promise.agree
        assert number * of_each.risk == pytest.approx(promise.risk, rel=1e-12)
