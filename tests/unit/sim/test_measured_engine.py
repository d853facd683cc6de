"""A measured engine in the simulator."""

from pipemax.control.controller_config import StageConfig
from pipemax.domain.specs import KvCapacity
from pipemax.domain.step_times import StepTimeModel
from pipemax.sim.measured_engine import MeasuredEngine, MeasuredTimes
from pipemax.sim.stage_times import StepWork


def test_a_calibration_whose_line_falls_below_zero_gives_steps_that_take_no_time() -> None:
    falling = StepTimeModel.linear(alpha_s=1e-3, beta_s=0.0, delta_s=-1e-2)
    stage = StageConfig(kv_bytes_per_token=1, h2d_bytes_per_s=1e9, decode_time=falling, prefill_time=falling)
    engine = MeasuredEngine(
        stages=(stage,),
        round_trip_s=0.0,
        capacity=KvCapacity(block_tokens=32, gpu_blocks=64, host_blocks=64),
        num_batches=2,
        max_num_seqs=8,
        max_batched_tokens=64,
        max_model_len=64,
    )
    times = MeasuredTimes(engine)
    assert times.stage_s(StepWork(decode_requests=2, decode_context_tokens=10)) == [0.0]
    assert times.stage_s(StepWork(prefill_tokens=2, prefill_pairs=3)) == [0.0]
    assert times.stage_s(StepWork(decode_requests=12, decode_context_tokens=10)) == [2e-3]
