"""What the server counts and learns for each job."""

from collections.abc import Sequence

import pytest

from pipemax.api import Completion
from pipemax.serve.flow.length_relation import MIN_ROWS
from pipemax.serve.job_stats import StatsBook


def rows(lengths: Sequence[tuple[int, int]]) -> list[Completion]:
    return [
        Completion(request_id=str(n), prompt_tokens=prompt, completion_tokens=output)
        for n, (prompt, output) in enumerate(lengths)
    ]


def test_what_a_job_learns_of_lengths_is_of_its_own_rows() -> None:
    book = StatsBook()
    for job in ("first", "second"):
        book.open_session(job, None)
    book.count_done("first", rows([(n, 2 * n) for n in range(MIN_ROWS)]))
    assert book.jobs()["first"].length_correlation == pytest.approx(1.0, abs=0.01)
    assert book.jobs()["second"].length_correlation is None
    book.count_done("second", rows([(n, MIN_ROWS - n) for n in range(MIN_ROWS)]))
    learned = book.jobs()["second"].length_correlation
    assert learned is not None
    assert learned < -0.5
    assert book.jobs()["first"].length_correlation == pytest.approx(1.0, abs=0.01)
