"""The batching is chosen again once the first rows show how long outputs are."""

import json
import logging
import threading
import time
from dataclasses import replace

import pytest

from pipemax.config import BatchingChoice, RowLengths
from pipemax.control.decision_trace import encode
from pipemax.domain.plan import Batching
from pipemax.generation import Completion, RequestError
from pipemax.policy import later_choice
from pipemax.policy.later_choice import LaterChoice, OutputCohort, is_worth_learning
from pipemax.policy.measured_choice import BatchingPlan
from pipemax.policy.row_sample import choose_batching_for
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.wire import ErrorCode
from tests.unit.policy.test_measured_choice import tiled_engine

LENGTHS = RowLengths(prompt_tokens=(60, 120, 200), max_tokens=200, rows=1_000_000)
MEAN_TOKENS = 50


def completion(name: str, tokens: int) -> Completion:
    return Completion(request_id=name, text="", finish_reason="stop", completion_tokens=tokens)


def small_engine() -> MeasuredEngine:
    """One whose simulation takes a second or two."""
    plain = tiled_engine()
    capacity = replace(plain.capacity, gpu_blocks=200, host_blocks=1_000)
    return replace(plain, capacity=capacity, max_num_seqs=128)


def test_the_mean_is_that_of_the_rows_sent_first_not_of_those_that_end_first() -> None:
    cohort = OutputCohort(4)
    for name in "abcdef":
        cohort.sent(name)
    cohort.ended([completion("a", 1), completion("e", 1), completion("f", 1), completion("b", 3)])
    assert cohort.lengths(LENGTHS) is None
    cohort.ended([completion("c", 100), completion("d", 200)])
    learned = LENGTHS.model_copy(update={"mean_output_tokens": (1 + 3 + 100 + 200) / 4})
    assert cohort.lengths(LENGTHS) == learned


def test_where_no_table_was_sampled_the_rows_show_prompts_and_the_longest_output_too() -> None:
    cohort = OutputCohort(2)
    for name in "ab":
        cohort.sent(name)
    cohort.ended(
        [replace(completion("a", 10), prompt_tokens=7), replace(completion("b", 40), prompt_tokens=9)]
    )
    assert cohort.lengths(None) == RowLengths(prompt_tokens=(7, 9), max_tokens=40, mean_output_tokens=25.0)


def test_rows_that_fail_or_are_given_up_are_replaced_by_later_ones() -> None:
    cohort = OutputCohort(2)
    for name in "ab":
        cohort.sent(name)
    error = RequestError(code=ErrorCode.ENGINE_ERROR, message="no")
    cohort.ended([Completion(request_id="a", error=error)])
    cohort.aborted(["b", "unknown"])
    for name in "cde":
        cohort.sent(name)
    cohort.ended([completion("c", 10), completion("d", 20), completion("e", 99)])
    learned = cohort.lengths(LENGTHS)
    assert learned is not None
    assert learned.mean_output_tokens == 15


@pytest.mark.parametrize(
    ("lengths", "batching", "is_worth"),
    [
        (LENGTHS, BatchingChoice.AUTO, True),
        (LENGTHS.model_copy(update={"rows": None}), BatchingChoice.AUTO, True),
        (LENGTHS.model_copy(update={"rows": 2_000}), BatchingChoice.AUTO, False),
        (LENGTHS.model_copy(update={"mean_output_tokens": 7.0}), BatchingChoice.AUTO, False),
        (LENGTHS, BatchingChoice.SEPARATED, False),
        (None, BatchingChoice.AUTO, True),
        (None, BatchingChoice.MIXED, False),
    ],
)
def test_an_engine_learns_where_it_may_choose_and_nobody_says_the_mean(
    lengths: RowLengths | None, batching: BatchingChoice, is_worth: bool
) -> None:
    assert is_worth_learning(lengths, batching) is is_worth


def watch_rows(choice: LaterChoice, num_rows: int) -> None:
    for index in range(num_rows):
        choice.sent(str(index))
    choice.ended([completion(str(index), MEAN_TOKENS) for index in range(num_rows)])


def test_the_engine_mixes_steps_of_the_size_that_is_fastest_for_what_the_rows_showed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = small_engine()
    known = LENGTHS.model_copy(update={"mean_output_tokens": float(MEAN_TOKENS)})
    expected = choose_batching_for(engine, known, BatchingChoice.AUTO, None)
    assert expected is not None
    assert expected.batching is Batching.MIXED, "or the test says nothing"
    told: list[int] = []
    mixes = threading.Event()

    def mix(step_tokens: int) -> None:
        told.append(step_tokens)
        mixes.set()

    choice = LaterChoice(engine, LENGTHS, mix, cohort_rows=8)
    with caplog.at_level(logging.INFO):
        watch_rows(choice, 8)
        assert mixes.wait(60)
        choice.close()
    assert told == [expected.mixed_step_tokens]
    assert f"outputs have {MEAN_TOKENS} tokens on average, so from now on PipeMax with mixed" in caplog.text
    watch_rows(choice, 8)  # and is not asked again
    assert told == [expected.mixed_step_tokens]


def test_a_size_of_mixed_steps_that_the_engine_config_names_is_kept() -> None:
    told: list[int] = []
    mixes = threading.Event()

    def mix(step_tokens: int) -> None:
        told.append(step_tokens)
        mixes.set()

    choice = LaterChoice(small_engine(), LENGTHS, mix, mixed_step_tokens=256, cohort_rows=8)
    watch_rows(choice, 8)
    assert mixes.wait(60)
    choice.close()
    assert told == [256]


def test_phases_that_are_faster_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    phases = BatchingPlan(
        batching=Batching.SEPARATED, tokens_per_s=900.0, mean_decode_batch=7.0, other_tokens_per_s=800.0
    )
    answer = json.dumps(encode(phases))
    monkeypatch.setattr(later_choice, "_SIMULATOR", ("sh", "-c", f"cat > /dev/null; echo '{answer}'"))
    told: list[int] = []
    choice = LaterChoice(small_engine(), LENGTHS, told.append, cohort_rows=2)
    with caplog.at_level(logging.INFO):
        watch_rows(choice, 2)
        assert choice._waits is not None
        choice._waits.join()
    assert "PipeMax stays in phases: simulated 900 tokens/s, 800 the other way" in caplog.text
    assert not told


def test_a_table_of_unknown_length_has_to_show_that_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later_choice, "_SIMULATOR", ("false",))
    choice = LaterChoice(small_engine(), None, lambda tokens: None, cohort_rows=2)
    watch_rows(choice, 2_500)
    assert choice._waits is None
    watch_rows(choice, 100)
    assert choice._waits is not None
    choice.close()


def test_closing_an_engine_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later_choice, "_SIMULATOR", ("sleep", "600"))
    told: list[int] = []
    choice = LaterChoice(small_engine(), LENGTHS, told.append, cohort_rows=2)
    watch_rows(choice, 2)
    begin_s = time.monotonic()
    choice.close()
    assert time.monotonic() - begin_s < 60
    assert not told


def test_a_simulation_that_fails_leaves_the_engine_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        later_choice, "_SIMULATOR", ("sh", "-c", "cat > /dev/null; echo no memory >&2; exit 3")
    )
    told: list[int] = []
    choice = LaterChoice(small_engine(), LENGTHS, told.append, cohort_rows=2)
    watch_rows(choice, 2)
    assert choice._waits is not None
    choice._waits.join()
    assert "could not be simulated, so PipeMax stays in phases: no memory" in caplog.text
    assert not told
    choice.close()
