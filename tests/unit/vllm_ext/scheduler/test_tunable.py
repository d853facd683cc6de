"""Stock vLLM with limits that change: the same steps while they do not, and the same tokens whatever they are."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from pipemax.domain.step_records import StepRecords
from pipemax.vllm_ext.scheduler.tunable import StepRecorder, TunableAsyncScheduler, TunableScheduler
from tests.unit.vllm_ext.fake_worker import StockCore, expected_output, make_request, make_stock_scheduler

KINDS = pytest.mark.parametrize(
    ("runner", "stages", "asynchronous"),
    [(1, 1, False), (1, 2, False), (1, 1, True), (2, 1, True), (2, 2, False), (2, 2, True)],
    ids=["v1", "v1 pp2", "v1 async", "v2 async", "v2 pp2", "v2 pp2 async"],
)


def stock_core(*, runner: int, stages: int, asynchronous: bool, **more: Any) -> StockCore:
    scheduler = make_stock_scheduler(
        is_tunable=more.pop("is_tunable", True),
        runner=runner,
        stages=stages,
        asynchronous=asynchronous,
        **more,
    )
    if isinstance(scheduler, TunableScheduler):
        scheduler.take_step_records()  # records are made once somebody takes them
    return StockCore(scheduler, stages + asynchronous)


def random_rows(rng: Random, count: int) -> dict[str, tuple[list[int], int]]:
    """Prompts, some with a common beginning, and output lengths; in all far more KV than there is."""
    common = [rng.randrange(1000) for _ in range(8)]
    return {
        str(index): (
            rng.choice([[], common]) + [rng.randrange(1000, 1999) for _ in range(rng.randint(1, 30))],
            rng.randint(1, 20),
        )
        for index in range(count)
    }


def run(core: StockCore, rows: dict[str, tuple[list[int], int]], before_step: Callable[[], None]) -> None:
    """Run rows, three of which arrive before each step, and check that none is lost and all tokens are right."""
    left = list(rows)
    while left or core.scheduler.get_num_unfinished_requests():
        for name in left[:3]:
            core.add(make_request(name, *rows[name]))
        del left[:3]
        before_step()
        core.step()
        assert core.num_steps < 20_000, "rows do not end"
    assert core.run() == {name: expected_output(*row) for name, row in rows.items()}


@KINDS
def test_with_fixed_limits_the_steps_are_those_of_stock_vllm(
    runner: int, stages: int, asynchronous: bool
) -> None:
    kind = {"runner": runner, "stages": stages, "asynchronous": asynchronous}
    tunable, stock = (stock_core(**kind, is_tunable=is_tunable) for is_tunable in (True, False))
    ours = TunableAsyncScheduler if asynchronous else TunableScheduler
    assert type(tunable.scheduler) is ours
    assert type(stock.scheduler) in ours.__mro__[1:]
    rng = Random(7 * runner + stages)
    rows = random_rows(rng, 80)
    left, aborted, preempted = list(rows), 0, 0
    while left or stock.scheduler.get_num_unfinished_requests():
        for name in left[: rng.randint(0, 4)]:
            left.remove(name)
            for core in (tunable, stock):
                core.add(make_request(name, *rows[name]))
        if rng.random() < 0.1 and stock.scheduler.requests:
            name = rng.choice(sorted(stock.scheduler.requests))
            aborted += 1
            for core in (tunable, stock):
                core.abort([name])
        step = stock.step()
        preempted += len(step.preempted_req_ids or ())
        assert repr(tunable.step()) == repr(step)
    assert tunable.run() == stock.run()
    assert aborted
    assert preempted, "the KV of all rows must not fit"


@KINDS
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_no_row_is_lost_and_no_token_changes_while_limits_change_in_every_step(
    runner: int, stages: int, asynchronous: bool, seed: int
) -> None:
    rng = Random(seed)
    core = stock_core(runner=runner, stages=stages, asynchronous=asynchronous)
    scheduler = core.scheduler

    def change() -> None:
        scheduler.set_limits(rng.randint(1, 64), rng.randint(1, 16))

    run(core, random_rows(rng, 80), change)
    assert sum(scheduler.take_step_records()["preempted"]) > 0


def test_fewer_running_rows_than_run_are_reached_by_rows_that_end() -> None:
    core = stock_core(runner=2, stages=1, asynchronous=True, gpu_blocks=400)
    for index in range(30):
        core.add(make_request(str(index), [index + 1], 5 + index))
    for _ in range(5):
        core.step()
    assert core.scheduler.get_request_counts() == (16, 14)
    core.scheduler.set_limits(64, 3)
    most = 16
    while most > 3:
        core.step()
        running, waiting = core.scheduler.get_request_counts()
        assert running <= most
        assert waiting == 14, "no row is preempted, and none begins"
        most = running
    before = core.num_steps
    while core.scheduler.get_request_counts()[1]:
        core.step()
        assert core.scheduler.get_request_counts()[0] <= 3
    assert core.num_steps > before
    core.run()


def test_with_fewer_tokens_in_a_step_than_rows_run_all_rows_end() -> None:
    core = stock_core(runner=2, stages=1, asynchronous=True, gpu_blocks=400)
    rows = {str(index): ([index + 1] * 4, 12) for index in range(16)}
    for name, row in rows.items():
        core.add(make_request(name, *row))
    core.step()
    core.scheduler.set_limits(5, 16)
    assert core.run() == {name: expected_output(*row) for name, row in rows.items()}
    records = core.scheduler.take_step_records()
    totals = [sum(pair) for pair in zip(records["prompt_tokens"], records["decodes"], strict=True)]
    assert totals[0] == 64
    assert max(totals[1:]) == 5
    assert max(records["running"][1:]) == 16


@pytest.mark.parametrize(
    ("vllm", "least"),
    [({}, 1), ({"enable_chunked_prefill": False}, 64)],
    ids=["split prompts", "whole prompts"],
)
def test_a_step_has_room_for_what_a_row_computes_at_once(vllm: dict[str, Any], least: int) -> None:
    scheduler = make_stock_scheduler(is_tunable=True, vllm=vllm)
    scheduler.set_limits(1, 16)
    assert scheduler.max_num_scheduled_tokens == least


def test_limits_above_those_of_the_start_are_refused() -> None:
    scheduler = make_stock_scheduler(is_tunable=True)
    assert scheduler.most_limits() == (64, 16)
    with pytest.raises(ValueError, match=r"running_rows=17.* above those of the engine's start"):
        scheduler.set_limits(64, 17)
    assert (scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs) == (64, 16)


@KINDS
def test_a_step_s_record_is_what_the_step_was(runner: int, stages: int, asynchronous: bool) -> None:
    core = stock_core(runner=runner, stages=stages, asynchronous=asynchronous, gpu_blocks=400)
    for name, prompt, outputs in (("a", 50, 4), ("b", 30, 3)):
        core.add(make_request(name, [ord(name)] * prompt, outputs))
    core.run()
    records = StepRecords.from_plain(core.scheduler.take_step_records())
    assert records.dropped == 0
    assert records.prompt_tokens.sum() == 80
    # The step that ends a prompt gives the first output, which is no decode. An asynchronous scheduler knows the
    # length of these rows' outputs, so it computes no token too many.
    assert records.decodes.sum() == 3 + 2
    kv = [50 + n for n in (1, 2, 3)] + [30 + n for n in (1, 2)]
    assert records.kv_tokens.sum() == sum(kv)
    assert records.running.tolist()[0] == (
        2 if stages + asynchronous > 1 or records.prompt_tokens[0] == 64 else 1
    )
    assert records.preempted.sum() == records.waiting[-1] == 0
    gaps = [second for second in records.seconds if second != second]
    assert len(gaps) == 1
    assert records.seconds[0] != records.seconds[0], "nothing came before the first step"
    assert core.scheduler.take_step_records()["seconds"] == []


def test_steps_are_recorded_only_while_somebody_takes_the_records() -> None:
    core = stock_core(runner=1, stages=1, asynchronous=False)
    recorder = core.scheduler._recorder = StepRecorder(most_steps=4)

    def run_ten_steps(name: str) -> None:
        core.add(make_request(name, [1, 2, 3], 10))
        core.run()

    run_ten_steps("a")
    assert len(StepRecords.from_plain(recorder.take())) == 0, "nobody had taken any"
    run_ten_steps("b")
    records = StepRecords.from_plain(recorder.take())
    assert (len(records), records.dropped) == (0, 4), "more steps than are kept were not taken"
    core.add(make_request("c", [1, 2, 3], 3))
    core.run()
    records = StepRecords.from_plain(recorder.take())
    assert (records.prompt_tokens.tolist(), records.dropped) == ([3, 0, 0], 0)


def test_the_rows_that_run_say_how_many_tokens_they_have() -> None:
    core = stock_core(runner=1, stages=1, asynchronous=False, gpu_blocks=400)
    for name, outputs in (("a", 2), ("b", 9), ("c", 9)):
        core.add(make_request(name, [1, 2, 3], outputs))
    for _ in range(4):
        core.step()
    assert core.scheduler.take_step_records()["outputs_so_far"] == [4, 4]


def test_a_gap_without_work_is_no_step_s_time() -> None:
    core = stock_core(runner=1, stages=1, asynchronous=False)
    for name in ("a", "b"):
        core.add(make_request(name, [1, 2, 3], 2))
        core.run()
    seconds = core.scheduler.take_step_records()["seconds"]
    assert [second is None for second in seconds] == [True, False, True, False]
