"""A measured engine in the simulator."""

import pytest

from pipemax.control.controller_config import StageConfig
from pipemax.domain.specs import KvCapacity
from pipemax.domain.step_times import StepTimeModel
from pipemax.sim.measured_engine import MeasuredEngine, MeasuredTimes
from pipemax.sim.stage_times import StepWork

LINE = StepTimeModel.linear(alpha_s=1e-4, beta_s=1e-8, delta_s=1e-2)


def measured_times(decode_time: StepTimeModel, prefill_time: StepTimeModel) -> MeasuredTimes:
    stage = StageConfig(
        kv_bytes_per_token=1, h2d_bytes_per_s=1e9, decode_time=decode_time, prefill_time=prefill_time
    )
    engine = MeasuredEngine(
        stages=(stage,),
        round_trip_s=0.0,
        capacity=KvCapacity(block_tokens=32, gpu_blocks=64, host_blocks=64),
        num_batches=2,
        max_num_seqs=8,
        max_batched_tokens=64,
        max_model_len=64,
    )
    return MeasuredTimes(engine)


def test_a_mixed_step_pays_once_for_what_every_step_costs() -> None:
    work = StepWork(decode_requests=10, decode_context_tokens=1000, prefill_tokens=50, prefill_pairs=2000)
    (seconds,) = measured_times(LINE, LINE).stage_s(work)
    assert seconds == pytest.approx(1e-2 + 60 * 1e-4 + 3000 * 1e-8)


def test_a_calibration_whose_line_falls_below_zero_gives_steps_that_take_no_time() -> None:
    falling = StepTimeModel.linear(alpha_s=1e-3, beta_s=0.0, delta_s=-1e-2)
    times = measured_times(falling, falling)
    assert times.stage_s(StepWork(decode_requests=2, decode_context_tokens=10)) == [0.0]
    assert times.stage_s(StepWork(prefill_tokens=2, prefill_pairs=3)) == [0.0]
    assert times.stage_s(StepWork(decode_requests=12, decode_context_tokens=10)) == [2e-3]
