"""What a GPU's worker adds, as far as it can be seen without a GPU: step times, and when activations have come."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors

from pipemax.domain.plan import StepId
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, PrefetchTiming, StepCopies, StepWait
from pipemax.transfer.cuda.device import Lane
from pipemax.vllm_ext.worker.connector import PipeMaxConnector
from pipemax.vllm_ext.worker.gpu_worker import watch_received
from pipemax.vllm_ext.worker.runner_v2 import profile_one_step
from pipemax.vllm_ext.worker.stage_clock import GpuStageClock
from pipemax.vllm_ext.worker.stage_reports import StepReport
from tests.fakes.recording_device import FakeKernel, RecordingDevice

NOTHING = StepWait(stall_s=0.0, prefetches=())


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice(gpu_blocks=1, host_blocks=1, block_bytes=1)


@pytest.fixture
def clock(device: RecordingDevice) -> GpuStageClock:
    return GpuStageClock(device)


def compute(device: RecordingDevice, num_kernels: int) -> None:
    """A millisecond each, by the recording device."""
    for _ in range(num_kernels):
        device.launch(Lane.COMPUTE, FakeKernel([], [], lambda: None))


def begin(clock: GpuStageClock, step: int) -> None:
    clock.begin(StepId(step), StepCopies(), NOTHING)


def test_a_step_is_reported_once_the_device_has_finished_it(
    device: RecordingDevice, clock: GpuStageClock
) -> None:
    begin(clock, 1)
    compute(device, 5)
    clock.mark_computed()
    begin(clock, 2)
    assert clock.take_report() is None
    device.synchronize()
    report = clock.take_report()
    assert report is not None
    assert report.steps == (StepReport(step_id=StepId(1), compute_s=pytest.approx(5e-3)),)
    assert clock.take_report() is None


def test_the_wait_for_the_stage_before_is_no_part_of_a_step(
    device: RecordingDevice, clock: GpuStageClock
) -> None:
    begin(clock, 1)
    compute(device, 7)  # as if it were the wait
    clock.mark_received()
    compute(device, 2)
    clock.mark_computed()
    clock.mark_received()  # of the next step, which has not begun
    begin(clock, 2)
    device.synchronize()
    report = clock.take_report()
    assert report is not None
    assert report.steps[0].compute_s == pytest.approx(2e-3)


def test_sampling_is_part_of_a_step_that_computes(device: RecordingDevice, clock: GpuStageClock) -> None:
    begin(clock, 1)
    clock.mark_sampled()
    begin(clock, 2)
    compute(device, 1)
    clock.mark_computed()
    compute(device, 3)
    clock.mark_sampled()
    begin(clock, 3)
    device.synchronize()
    report = clock.take_report()
    assert report is not None
    assert [step.step_id for step in report.steps] == [2], "the first step was empty"
    assert report.steps[0].compute_s == pytest.approx(4e-3)


def test_prefetch_times_belong_to_the_steps_that_asked_for_them(clock: GpuStageClock) -> None:
    prefetches = (BlockPrefetch(HostBlockId(0), GpuBlockId(0)), BlockPrefetch(HostBlockId(1), GpuBlockId(1)))
    copies = StepCopies(prefetches=prefetches)
    clock.begin(StepId(4), copies, NOTHING)
    clock.begin(StepId(5), StepCopies(), NOTHING)
    wait = StepWait(stall_s=0.25, prefetches=(PrefetchTiming(num_blocks=2, seconds=0.5),))
    clock.begin(StepId(6), StepCopies(), wait)
    report = clock.take_report()
    assert report is not None
    assert [(prefetch.step_id, prefetch.num_blocks, prefetch.seconds) for prefetch in report.prefetches] == [
        (4, 2, 0.5)
    ]
    assert report.stall_s == 0.25


class _Runner:
    def __init__(self) -> None:
        self.log: list[str] = []

    def execute_model(
        self, scheduler_output: Any, intermediate_tensors: Any = None, dummy: bool = False
    ) -> str:
        self.log.append("begin")
        if intermediate_tensors is not None:
            assert intermediate_tensors.tensors
        self.log.append("model")
        return "output"


class _Handle:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait(self) -> None:
        self._log.append("wait")


def test_activations_are_noticed_when_the_runner_waits_for_them() -> None:
    runner = _Runner()
    watch_received(runner, lambda: runner.log.append("received"))
    tensors = AsyncIntermediateTensors({"hidden_states": torch.zeros(1)}, comm_handles=[_Handle(runner.log)])
    assert runner.execute_model("step", tensors) == "output"
    assert runner.log == ["begin", "wait", "received", "model"]
    assert runner.execute_model("step", None, dummy=True) == "output"
    assert runner.log[4:] == ["begin", "model"]


def test_memory_is_profiled_with_the_requests_of_one_step() -> None:
    profiled: list[int] = []
    runner: Any = SimpleNamespace(max_num_reqs=900)
    runner.profile_run = lambda: profiled.append(runner.max_num_reqs)
    profile_one_step(runner, 100)
    runner.profile_run()
    assert profiled == [100]
    assert runner.max_num_reqs == 900, "the number of slots is as it was"


def test_full_cuda_graphs_are_kept() -> None:
    assert not PipeMaxConnector.requires_piecewise_for_cudagraph({})
