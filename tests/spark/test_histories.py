"""Random histories of an input and its outputs: after each step the tables hold what a model of a few lines says.

``make histories SEEDS=17`` plays one again and prints its steps. Two jobs that step through their commits in turns, and
stop in the midst of them, are in ``test_interleaved_runs``.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.histories.__main__ import play_seed, seeds_of
from tests.spark.histories.driver import watched
from tests.spark.histories.kept_seeds import KEPT_SEEDS
from tests.spark.histories.model import Entry, Held, Request, after, is_between, row_of

NIGHT = int(os.environ.get("PIPEMAX_NIGHT") or 0)
PER_NIGHT = 8
IDS = Request(spec="Say", columns=("id", "text"), has_ids=True)
CONTENT = Request(spec="Say", columns=("id", "text"), has_ids=False)


@pytest.fixture
def stops() -> Iterator[None]:
    with watched():
        yield


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [*KEPT_SEEDS, *range(1_000 + PER_NIGHT * NIGHT, 1_000 + PER_NIGHT * (NIGHT + 1))]
)
def test_after_each_step_of_a_random_history_the_output_is_as_the_model_says(
    spark: Any, engine_python: str, tmp_path: Path, stops: None, seed: int
) -> None:
    play_seed(spark, tmp_path, engine_python, seed)


def held(*texts: str | None, spec: str = "Say") -> Held:
    rows = [row_of({"id": number, "text": text}) for number, text in enumerate(texts)]
    return after(Request(spec=spec, columns=("id", "text"), has_ids=True), Counter(), rows)


def test_the_model_sees_lost_doubled_and_wrong_rows_of_a_run_that_died() -> None:
    before, end = held("a"), held("a", "b", "c")
    assert is_between(IDS, held("a", "b"), before, end)
    assert not is_between(IDS, held("x", "b"), before, end), "a row has changed"
    assert not is_between(IDS, held(), before, end), "a row is lost"
    assert not is_between(IDS, before + held("a"), before, end), "a row stands twice"
    assert not is_between(IDS, held("a", spec="Tell") + before, before, end), "a row of another spec"


def test_the_model_replaces_what_a_run_redoes_and_counts_rows_without_ids() -> None:
    now = [row_of({"id": 0, "text": "new"}), row_of({"id": 1, "text": None})]
    redone = after(
        Request(spec="Say", columns=("id", "text"), has_ids=True, redoes_changed=True), held("old"), now
    )
    assert redone == held("new", None)
    assert after(IDS, held("old"), now) == held("old", None), "only the option looks for changes"
    row = row_of({"id": 0, "text": "a"})
    once = Entry("Say", row, "reply to Say a")
    assert after(CONTENT, Counter([once]), [row, row]) == Counter({once: 2})
    assert after(CONTENT, Counter({once: 2}), [row, row], [row]) == Counter({once: 2}), "appended and done"


def test_seeds_are_named_by_numbers_and_ranges() -> None:
    assert seeds_of("0-2,17") == [0, 1, 2, 17]
