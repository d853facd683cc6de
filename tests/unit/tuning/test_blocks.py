"""Blocks: what of them is measured, and which are thrown away."""

from dataclasses import replace

import numpy as np
import pytest

from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.tuning.blocks import Block, BlockPlan
from pipemax.tuning.step_fit import WorkCosts

LIMITS = StepLimits(step_tokens=512, running_rows=64)
COSTS = WorkCosts(prompt_token_s=1e-5, decode_s=1e-4, kv_token_s=0.0, prompts_per_output=1.0)


def steps(count: int, *, seconds: float = 0.1, waiting: int = 100, preempted: int = 0) -> StepRecords:
    def filled(value: int) -> np.ndarray:
        return np.full(count, value)

    return StepRecords(
        prompt_tokens=filled(100),
        decodes=filled(50),
        kv_tokens=filled(5000),
        running=filled(50),
        waiting=filled(waiting),
        preempted=filled(preempted),
        seconds=np.full(count, seconds),
    )


def block(*parts: StepRecords, num_replicas: int = 1) -> Block:
    made = Block(BlockPlan(limits=(LIMITS,) * num_replicas, washout_s=1.0, measured_s=2.0))
    for part in parts:
        made.add([part] * num_replicas)
    return made


def test_the_washout_is_not_measured() -> None:
    slow, fast = steps(10, seconds=0.1), steps(40, seconds=0.05)
    made = block(slow, fast)
    assert made.is_complete
    assert made.fault() is None
    assert made.num_steps == [40]
    (log_rate,) = made.log_rates(COSTS)
    assert np.exp(log_rate) == pytest.approx((100 * 1e-5 + 50 * 1e-4) / 0.05)


def test_a_block_is_complete_after_its_time() -> None:
    assert not block(steps(29)).is_complete
    assert block(steps(31)).is_complete


@pytest.mark.parametrize(
    ("late", "fault"),
    [
        (steps(30, waiting=2), "too few rows were waiting"),
        (steps(30, preempted=5), "rows were preempted again and again"),
        (replace(steps(30), seconds=np.array([0.1] * 29 + [5.0])), "a step stalled"),
        (replace(steps(30), seconds=np.array([0.1] * 29 + [np.nan])), "an engine had nothing to do"),
    ],
)
def test_a_block_with_a_fault_says_why(late: StepRecords, fault: str) -> None:
    assert block(steps(11), late).fault() == fault
    assert block(late, steps(40)).fault() in (None, fault)


def test_a_replica_without_steps_is_a_fault() -> None:
    made = Block(BlockPlan(limits=(LIMITS, LIMITS), washout_s=1.0, measured_s=2.0))
    made.add([steps(40), steps(0)])
    assert made.is_complete
    assert made.fault() == "a replica made no steps"


def test_replicas_whose_steps_differ_in_length_are_no_fault() -> None:
    made = Block(BlockPlan(limits=(LIMITS, LIMITS), washout_s=1.0, measured_s=2.0))
    made.add([steps(40), steps(8, seconds=0.5)])
    assert made.fault() is None
    fast, slow = made.log_rates(COSTS)
    assert np.exp(fast - slow) == pytest.approx(5.0)


def test_what_preempted_rows_compute_again_is_not_work() -> None:
    plain, stormy = COSTS.work_s(steps(1)), COSTS.work_s(steps(1, preempted=1))
    assert plain - stormy == pytest.approx(50 * 1e-5), "a steady engine has a prompt token for each output"
    found = replace(COSTS, prompts_per_output=2.0)
    assert found.work_s(steps(1, preempted=1)) == found.work_s(steps(1)), "their KV was in the prefix cache"
