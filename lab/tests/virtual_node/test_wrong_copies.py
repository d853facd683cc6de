"""PipeMax's scheduler, connector and fences over a virtual node: right copies pass, planted faults are named."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lab.virtual_node.executor import VirtualNodeExecutor
from lab.virtual_node.kv_order import WrongKvError
from lab.virtual_node.launch import ClockSettings, RehearsedEngine
from lab.virtual_node.run import RehearsalResult, rehearse
from lab.virtual_node.virtual_connector import VirtualConnector
from lab.virtual_node.virtual_device import VirtualDevice
from pipemax.config import Policy
from pipemax.domain.plan import Batching
from pipemax.domain.specs import Parallelism
from pipemax.transfer.commands import BlockPrefetch
from pipemax.transfer.cuda.device import DeviceEvent, Fence, Lane
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.vllm_ext.worker.connector import StepMetadata
from tests.unit.sim.machines import small_model, small_node, small_workload

WAVE_FENCES = {Fence.GROUP_AFTER_WAVE, Fence.WAVE_AFTER_GROUP}
"""Those of waves, which virtual nodes do not have (tests/unit/transfer/cuda/test_waves.py)."""


def run(
    connector: type[VirtualConnector] = VirtualConnector,
    *,
    slow_link: bool = False,
    workload: str = "sharegpt",
    batching: Batching = Batching.SEPARATED,
) -> RehearsalResult:
    """All but a few requests are parked at any time."""

    class Executor(VirtualNodeExecutor):
        connector_class = connector

    node = assumed_node = small_node(num_gpus=4, kv_gb=0.15)
    if slow_link:  # of which the controller does not know, so that copies take longer than steps
        node = replace(node, root_bytes_per_s=node.root_bytes_per_s / 50)
    engine = RehearsedEngine(
        node=node,
        model=small_model(),
        parallelism=Parallelism(pipeline=4, tensor=1),
        policy=Policy.PIPEMAX,
        chunk_tokens=512,
        max_model_len=4096,
        batching=batching,
        clock=ClockSettings(host_factor=0.0),
        assumed_node=assumed_node,
        executor=Executor,
    )
    return rehearse(engine, small_workload(50, name=workload))


@pytest.mark.parametrize("slow_link", [False, True])
def test_the_connector_keeps_every_step_and_copy_to_its_kv(slow_link: bool) -> None:
    result = run(slow_link=slow_link)
    assert result.copy_counts["evictions"] > 100
    assert result.copy_counts["prefetched_blocks"] > 2_000
    assert (result.copy_counts["stall_s"] > 1.0) == slow_link


def test_mixed_steps_and_their_copies_find_their_kv_and_are_faster() -> None:
    mixed = run(batching=Batching.MIXED)
    assert mixed.copy_counts["evictions"] > 100
    assert mixed.copy_counts["prefetched_blocks"] > 2_000
    assert mixed.num_steps < run().num_steps, "prompts ride along with decodes"


def test_requests_may_share_the_kv_of_their_prefix() -> None:
    assert run(workload="templated").copy_counts["prefetched_blocks"] > 0


class _HastyTransfers(CudaTransfers):
    """Marks a prefetch as done before it is."""

    def _submit_prefetches(self, prefetches: Sequence[BlockPrefetch], *, needed_by: int) -> None:
        begun = self.device.record(Lane.PREFETCH)
        super()._submit_prefetches(prefetches, needed_by=needed_by)
        if prefetches:
            self._prefetches[-1] = self._prefetches[-1]._replace(end=begun)


class _HastyConnector(VirtualConnector):
    transfers_class = _HastyTransfers


def test_a_prefetch_that_is_marked_done_too_early_is_named() -> None:
    with pytest.raises(
        WrongKvError,
        match=r"step \d+ on stage \d for request \d+ reads GPU block \d+ (which is being|before a prefetch)",
    ):
        run(_HastyConnector, slow_link=True)


class _ForgetfulConnector(VirtualConnector):
    """Leaves out one of a step's prefetches."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        copies = connector_metadata.copies
        kept = StepMetadata(connector_metadata.step_id, replace(copies, prefetches=copies.prefetches[1:]))
        super().bind_connector_metadata(kept)


def test_a_prefetch_that_is_left_out_is_named() -> None:
    with pytest.raises(WrongKvError, match=r"as KV of request \d+, which it does not hold"):
        run(_ForgetfulConnector)


class _DeafDevice:
    """Passes all calls on but the waits of one kind."""

    def __init__(self, device: VirtualDevice, deaf_to: Fence) -> None:
        self._device = device
        self._deaf_to = deaf_to

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def wait(self, lane: Lane, event: DeviceEvent, reason: Fence) -> None:
        if reason is not self._deaf_to:
            self._device.wait(lane, event, reason)


def _without(fence: Fence) -> type[VirtualConnector]:
    class Transfers(CudaTransfers):
        def __init__(self, device: Any, **more: Any) -> None:
            super().__init__(_DeafDevice(device, fence), **more)  # type: ignore[arg-type]  # by __getattr__

    class Connector(VirtualConnector):
        transfers_class = Transfers

    return Connector


@pytest.mark.parametrize(
    "fence", [fence for fence in Fence if fence not in {Fence.SAVE_AFTER_COMPUTE, *WAVE_FENCES}]
)
def test_each_fence_is_missed(fence: Fence) -> None:
    with pytest.raises(WrongKvError):
        run(_without(fence), slow_link=True)
