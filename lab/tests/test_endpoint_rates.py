"""Which rounds of the comparison of a job over an endpoint count."""

from collections import Counter

import pytest

from lab.bench.endpoint_rates import Round, check_round, summary_of
from lab.bench.overhead_turns import Run
from lab.bench.peers.load import Load


def run(*, seconds: float = 10.0, computed: int = 100, other_answers: int = 0) -> Run:
    texts = Counter({"a": 100 - other_answers, "b": other_answers})
    return Run(seconds=seconds, tokens=100, texts=texts, computed_tokens=computed)


def test_a_round_of_computed_and_equal_answers_counts() -> None:
    done = Round(itself=run(), endpoint=run(seconds=12.5, other_answers=2))
    check_round(done, 100)
    assert (done.ratio, done.different) == (0.8, 2)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        (run(computed=0), "the endpoint computed 0 output tokens"),
        (run(other_answers=3), "3 answers of the endpoint are not those"),
        (run(seconds=5.0), "2.00 times as fast as the engine itself"),
    ],
)
def test_a_round_that_cannot_be_is_an_error(endpoint: Run, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_round(Round(itself=run(), endpoint=endpoint), 100)


def test_rows_with_other_lengths_than_asked_for_are_an_error() -> None:
    with pytest.raises(ValueError, match="the rows ask for 90"):
        check_round(Round(itself=run(), endpoint=run()), 90)


def test_the_summary_has_medians_and_the_spread() -> None:
    names = ("ratio", "itself_rows_per_s", "endpoint_rows_per_s")
    lines = [dict.fromkeys(names, value) for value in (0.8, 1.0, 0.9)]
    load = Load(directory="", rows=4, lengths="skewed", repeats=3, cores=(0, 1))
    summary = summary_of(lines, load, "1")
    assert summary["ratio"] == {"median": 0.9, "min": 0.8, "max": 1.0}
    assert summary["rounds"] == 3
