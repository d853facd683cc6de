"""Outputs of a few tokens: whole batches end at about the same time, and must be full again soon after."""

import numpy as np
import pytest

from pipemax.control.controller_config import StageConfig
from pipemax.domain.specs import KvCapacity
from pipemax.domain.step_times import StepTimeModel
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions
from pipemax.sim.systems.scenario import measured_scenario
from pipemax.sim.workloads import Workload
from tests.unit.sim.machines import simulate

MAX_NUM_SEQS = 64


def stage(*, alpha_s: float, delta_s: float) -> StageConfig:
    return StageConfig(
        kv_bytes_per_token=1024,
        h2d_bytes_per_s=8e9,
        decode_time=StepTimeModel.linear(alpha_s=alpha_s, beta_s=2e-8, delta_s=delta_s),
        prefill_time=StepTimeModel.linear(alpha_s=3e-5, beta_s=1e-9, delta_s=3e-3),
    )


MEASURED = stage(alpha_s=8e-5, delta_s=2.5e-3)
GUESSED = stage(alpha_s=1e-3, delta_s=1e-2)  # a request seems to cost twelve times as much
ENGINE = MeasuredEngine(
    stages=(MEASURED, MEASURED),
    round_trip_s=5e-3,
    capacity=KvCapacity(block_tokens=32, gpu_blocks=500, host_blocks=4000),
    num_batches=2,
    max_num_seqs=MAX_NUM_SEQS,
    max_batched_tokens=2048,
    max_model_len=512,
)


def short_outputs() -> Workload:
    rng = np.random.default_rng(0)
    return Workload(
        name="short outputs",
        prompt_tokens=rng.integers(60, 130, 600),
        output_tokens=rng.integers(6, 9, 600),
        shared_prefix_tokens=0,
    )


@pytest.mark.parametrize("known", [MEASURED, GUESSED], ids=["calibrated", "guessed"])
def test_batches_are_full_again_after_most_of_their_requests_ended(known: StageConfig) -> None:
    options = PipeMaxOptions(controller={"stages": (known, known)})
    ours = PipeMaxSystem(measured_scenario(ENGINE, short_outputs()), options).simulate()
    assert ours.mean_decode_batch > 0.7 * MAX_NUM_SEQS
    assert (
        ours.total_tokens_per_s
        > simulate("vllm_032_pp", measured_scenario(ENGINE, short_outputs())).total_tokens_per_s
    )
