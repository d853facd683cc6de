"""Lengths in bins and quantiles, compared with the sorted list of all of them; and how few of them are drawn."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.report.charts import histogram
from pipemax_spark.report.distributions import Lengths
from pipemax_spark.report.drawing import Axis

tokens = st.lists(st.integers(0, 5_000), min_size=1, max_size=200)


def lengths_of(values: list[int]) -> Lengths:
    return Lengths(name="prompt tokens", rows=dict(sorted(Counter(values).items())))


@given(tokens, st.floats(0.01, 1.0))
def test_a_quantile_is_the_smallest_length_that_enough_rows_do_not_exceed(
    values: list[int], share: float
) -> None:
    quantile = lengths_of(values).quantile(share)
    assert quantile in values
    assert sum(value <= quantile for value in values) >= share * len(values) - 1e-9
    assert sum(value < quantile for value in values) < share * len(values)


@given(tokens, st.integers(1, 40))
def test_bins_hold_each_row_once_and_begin_and_end_with_rows(values: list[int], max_bins: int) -> None:
    bins = lengths_of(values).bins(max_bins)
    assert len(bins) <= max_bins
    for begin, end, rows in bins:
        assert rows == sum(begin <= value < end for value in values)
    assert all(end == begin for (_, end, _), (begin, _, _) in pairwise(bins))
    assert bins[0][0] == min(values)
    assert bins[0][2] > 0 < bins[-1][2]


def test_a_histogram_of_few_lengths_has_whole_numbers_at_its_axis() -> None:
    drawn = histogram("tokens", lengths_of([7] * 5 + [8] * 3 + [9]).bins(30))
    assert all(f">{tick}<" in drawn for tick in (7, 8, 9))
    assert ">7.5<" not in drawn


def test_a_logarithmic_axis_has_ticks_between_the_powers_of_ten_while_there_is_room() -> None:
    assert Axis(low=4.5, high=103.0, is_log=True).ticks() == [5, 10, 20, 50, 100]
    assert Axis(low=0.9, high=11_000.0, is_log=True).ticks() == [1, 10, 100, 1_000, 10_000]
