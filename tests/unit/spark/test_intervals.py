"""The interval of a share and the test of pairs, by tables and by scipy where it is installed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemax_spark.report.intervals import mcnemar_p, share_interval, share_text


@pytest.mark.parametrize(
    ("rows", "total", "interval"),
    [
        (0, 10, (0.0, 0.2775)),
        (5, 10, (0.2366, 0.7634)),
        (297, 300, (0.9710, 0.9966)),
        (300, 300, (0.9874, 1.0)),
    ],
)
def test_the_interval_of_a_share_is_wilsons(rows: int, total: int, interval: tuple[float, float]) -> None:
    assert share_interval(rows, total) == pytest.approx(interval, abs=1e-4)


def test_a_share_is_written_with_its_interval() -> None:
    assert share_text(5, 10) == "50.0% (95 %: 23.7% to 76.3%)"


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"), [(0, 0, 1.0), (3, 3, 1.0), (0, 5, 2 / 32), (1, 9, 2 * 11 / 1024)]
)
def test_pairs_are_tested_by_coin_throws(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar_p(only_first, only_second) == pytest.approx(p)


@given(st.integers(0, 400), st.integers(0, 400))
def test_the_test_of_pairs_is_scipys_binomial_test(only_first: int, only_second: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    rows = only_first + only_second
    p = stats.binomtest(only_first, rows).pvalue if rows else 1.0
    assert mcnemar_p(only_first, only_second) == pytest.approx(p, abs=1e-9)
