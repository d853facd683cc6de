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
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.vllm_ext.seam.runner_patches import profile_one_step, watch_received
from pipemax.vllm_ext.worker.connector import PipeMaxConnector
from pipemax.vllm_ext.worker.stage_clock import GpuStageClock
from pipemax.vllm_ext.worker.stage_reports import StepReport
from tests.fakes.recording_device import FakeKernel, RecordedEvent, RecordingDevice

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
    clock.begin(StepId(step), NOTHING)


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
    clock.begin(StepId(4), NOTHING)
    clock.begin(StepId(5), NOTHING)
    timing = PrefetchTiming(step_id=StepId(4), num_blocks=2, seconds=0.5)
    clock.begin(StepId(6), StepWait(stall_s=0.25, prefetches=(timing,)))
    report = clock.take_report()
    assert report is not None
    assert [(prefetch.step_id, prefetch.num_blocks, prefetch.seconds) for prefetch in report.prefetches] == [
        (4, 2, 0.5)
    ]
    assert report.stall_s == 0.25


class _PromptDevice(RecordingDevice):
    """Everything submitted is done when its mark is set: a fast link, a late host."""

    def record(self, lane: Lane) -> RecordedEvent:
        event = super().record(lane)
        self.synchronize()
        return event


@pytest.mark.parametrize("device_kind", [_PromptDevice, RecordingDevice])
def test_each_prefetch_is_reported_once_for_its_own_step(device_kind: type[RecordingDevice]) -> None:
    device = device_kind(gpu_blocks=8, host_blocks=8, block_bytes=16)
    transfers, clock = CudaTransfers(device, block_bytes=16), GpuStageClock(device)
    reported: list[tuple[int, int]] = []
    for step in range(9):
        copies = StepCopies(step_id=StepId(step), prefetches=blocks(step % 3))
        clock.begin(StepId(step), transfers.begin_step(copies))
        transfers.start_prefetches(copies)
        transfers.end_step(copies)
        if step % 4 == 3:
            device.synchronize()
        if (report := clock.take_report()) is not None:
            reported += [(prefetch.step_id, prefetch.num_blocks) for prefetch in report.prefetches]
    asked_for = [(step, step % 3) for step in (1, 2, 4, 5, 7, 8)]
    assert reported == asked_for[:-1], "the last one's time is not known yet"


def test_copies_of_no_step_are_not_reported(clock: GpuStageClock) -> None:
    device = _PromptDevice(gpu_blocks=8, host_blocks=8, block_bytes=16)
    transfers = CudaTransfers(device, block_bytes=16)
    checked = StepCopies(prefetches=blocks(3))
    transfers.begin_step(checked)
    transfers.start_prefetches(checked)
    transfers.end_step(checked)
    copies = StepCopies(step_id=StepId(1), prefetches=blocks(2))
    clock.begin(StepId(1), transfers.begin_step(copies))
    transfers.start_prefetches(copies)
    transfers.end_step(copies)
    clock.begin(StepId(2), transfers.begin_step(StepCopies(step_id=StepId(2))))
    report = clock.take_report()
    assert report is not None
    assert [(prefetch.step_id, prefetch.num_blocks) for prefetch in report.prefetches] == [(1, 2)]


def blocks(count: int) -> tuple[BlockPrefetch, ...]:
    return tuple(BlockPrefetch(HostBlockId(block), GpuBlockId(block)) for block in range(count))


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
