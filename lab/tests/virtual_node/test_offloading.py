"""vLLM's own KV offloading over a virtual node: its scheduler and its workers are real, the copies take time."""

from dataclasses import replace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

from lab.virtual_node.executor import VirtualNodeExecutor
from lab.virtual_node.launch import ClockSettings, RehearsedEngine
from lab.virtual_node.offloading import (
    OffloadingNodeExecutor,
    VirtualOffloadingWorker,
    offloading_arguments,
)
from lab.virtual_node.run import RehearsalResult, rehearse
from lab.virtual_node.sequences import RunStep
from lab.virtual_node.virtual_node import NodeStep, VirtualNode
from pipemax.config import Policy
from pipemax.domain.specs import NodeSpec, Parallelism
from pipemax.sim.stage_times import StepWork
from pipemax.transfer.cuda.device import Lane
from tests.unit.sim.machines import small_model, small_node, small_workload


class BlockIds(BlockIDsLoadStoreSpec):
    """Blocks of either side."""


class CountingExecutor(VirtualNodeExecutor):
    """Counts the tokens that the engine that ran last has computed."""

    latest: "CountingExecutor"

    def _init_executor(self) -> None:
        super()._init_executor()
        CountingExecutor.latest = self
        self.num_tokens = 0

    def _submit(self, output: SchedulerOutput, run: RunStep) -> NodeStep | None:
        self.num_tokens += output.total_num_scheduled_tokens
        return super()._submit(output, run)


class CountingOffloadingExecutor(CountingExecutor, OffloadingNodeExecutor):
    """The same, with vLLM's offloading."""


def run(node: NodeSpec, *, offloads: bool, tensor: int = 1) -> RehearsalResult:
    engine = RehearsedEngine(
        node=node,
        model=small_model(),
        parallelism=Parallelism(pipeline=4 // tensor, tensor=tensor),
        policy=Policy.VLLM,
        chunk_tokens=512,
        max_model_len=4096,
        clock=ClockSettings(host_factor=0.0),
        checks_kv=False,
        executor=CountingExecutor,
    )
    if offloads:
        engine = replace(engine, vllm=offloading_arguments(node), executor=CountingOffloadingExecutor)
    return rehearse(engine, small_workload(200))  # which checks that every output has its length


def test_preempted_requests_get_their_kv_back_from_the_host_on_every_stage() -> None:
    node = small_node(kv_gb=0.5)
    run(node, offloads=False)
    num_tokens_stock = CountingExecutor.latest.num_tokens
    run(node, offloads=True)
    offloading = CountingExecutor.latest
    assert isinstance(offloading, CountingOffloadingExecutor)
    counts = [worker.num_blocks for worker in offloading.workers]
    assert len(counts) == 4
    assert all(count == counts[0] for count in counts)
    assert counts[0][Lane.STORE] > 0
    # What comes back need not be computed again.
    num_tokens = small_workload(200).total_tokens
    assert num_tokens_stock > 1.05 * num_tokens
    assert 16 * counts[0][Lane.PREFETCH] > 0.5 * (num_tokens_stock - num_tokens)
    assert offloading.num_tokens - num_tokens < 0.5 * (num_tokens_stock - num_tokens)


def test_copies_over_slow_links_cost_throughput() -> None:
    node = small_node(kv_gb=0.5)
    slow = replace(
        node,
        link=replace(
            node.link, host_to_gpu_bytes_per_s=2e8, gpu_to_host_bytes_per_s=2e8, duplex_bytes_per_s=4e8
        ),
    )
    assert run(slow, offloads=True).seconds > 1.05 * run(node, offloads=True).seconds


def test_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ValueError, match="under pipeline parallelism only"):
        run(small_node(), offloads=True, tensor=2)


def test_a_copy_waits_for_the_steps_before_it_and_is_told_once_it_has_ended() -> None:
    node = VirtualNode(small_node(), small_model(), Parallelism(pipeline=4, tensor=1), checks_kv=False)
    device = node.devices[0]
    worker = VirtualOffloadingWorker(device, block_bytes=1 << 20)
    step = node.begin_step(StepWork(decode_requests=8, decode_context_tokens=800))
    node.compute(step, 0)
    computed = device.record(Lane.COMPUTE)
    worker.submit_store(7, BlockIds([3, 4, 9]), BlockIds([0, 1, 2]))
    worker.submit_load(8, BlockIds([5]), BlockIds([6]))
    ends = [jobs[0].end for jobs in worker._jobs.values()]
    computed_s = node.run_to(computed)
    assert worker.get_finished() == []
    assert all(node.run_to(end) > computed_s for end in ends)
    assert {result.job_id for result in worker.get_finished()} == {7, 8}
    assert worker.get_finished() == []
    assert worker.next_end() is None


def test_a_flush_holds_back_what_is_computed_next() -> None:
    node = VirtualNode(small_node(), small_model(), Parallelism(pipeline=4, tensor=1), checks_kv=False)
    device = node.devices[0]
    worker = VirtualOffloadingWorker(device, block_bytes=1 << 30)  # which takes a while
    worker.submit_store(7, BlockIds([3]), BlockIds([0]))
    stored = worker.next_end()
    assert stored is not None
    worker.wait({7, 99})  # an unknown job has ended long ago
    after = device.record(Lane.COMPUTE)
    assert node.run_to(after) == node.run_to(stored) > 0
