"""vLLM's own KV offloading to host memory over a virtual node, as a baseline for PipeMax.

vLLM's ``OffloadingConnector`` is real on both sides: its scheduler decides what to store and to load, and its worker
orders the jobs of each stage. Only what copies is replaced (vLLM's ``OffloadingWorker``): jobs take time on the node's
links, in order for each direction, behind the steps that were submitted before them, as vLLM's streams do it.

KV blocks are copied in one piece for each stage, as with vLLM's block-first layout; vLLM's default layouts need a piece
for each layer, and are slower. Contents are not checked.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lab.virtual_node.executor import StepFuture, VirtualNodeExecutor
from lab.virtual_node.sequences import RunStep
from lab.virtual_node.virtual_device import VirtualDevice, VirtualEvent
from lab.virtual_node.virtual_node import NodeStep
from pipemax.domain.specs import NodeSpec
from pipemax.transfer.cuda.copy_runs import copy_runs
from pipemax.transfer.cuda.device import Fence, Lane


class _Job(NamedTuple):
    job_id: int
    end: VirtualEvent


class VirtualOffloadingWorker(OffloadingWorker):
    """One stage's copies, which only take time."""

    def __init__(self, device: VirtualDevice, *, block_bytes: int) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._jobs: dict[Lane, deque[_Job]] = {Lane.STORE: deque(), Lane.PREFETCH: deque()}
        self._ends: dict[int, VirtualEvent] = {}
        self.num_blocks = dict.fromkeys(self._jobs, 0)
        """Blocks copied or being copied, by direction."""

    def submit_store(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(Lane.STORE, Fence.STORE_AFTER_COMPUTE, job_id, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._submit(Lane.PREFETCH, Fence.PREFETCH_AFTER_COMPUTE, job_id, src_spec, dst_spec)

    def _submit(
        self, lane: Lane, fence: Fence, job_id: int, source: LoadStoreSpec, target: LoadStoreSpec
    ) -> bool:
        assert isinstance(source, BlockIDsLoadStoreSpec), source
        assert isinstance(target, BlockIDsLoadStoreSpec), target
        pairs = list(zip(source.block_ids, target.block_ids, strict=True))
        self._device.wait(lane, self._device.record(Lane.COMPUTE), fence)
        self._device.copy(lane, copy_runs(pairs, lane=lane, block_bytes=self._block_bytes))
        self.num_blocks[lane] += len(pairs)
        self._ends[job_id] = self._device.record(lane)
        self._jobs[lane].append(_Job(job_id, self._ends[job_id]))
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        for jobs in self._jobs.values():
            while jobs and jobs[0].end.done_s is not None:
                job_id = jobs.popleft().job_id
                del self._ends[job_id]
                results.append(TransferResult(job_id=job_id, success=True))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Wait before anything else is submitted to the GPU: vLLM's worker waits in its process."""
        for job_id in job_ids:
            if (end := self._ends.get(job_id)) is not None:
                self._device.wait(Lane.COMPUTE, end, Fence.COMPUTE_AFTER_STORE)

    def next_end(self) -> VirtualEvent | None:
        """Return the end of a job that is not known to have ended, if there is one."""
        return next((jobs[0].end for jobs in self._jobs.values() if jobs), None)


class OffloadingNodeExecutor(VirtualNodeExecutor):
    """Runs vLLM's steps on the virtual node, with vLLM's offloading connector on each stage."""

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        if self._tensor > 1:
            raise ValueError("vLLM's offloading is rehearsed under pipeline parallelism only")
        self._offloads: list[OffloadingConnector] = []
        self.workers: list[VirtualOffloadingWorker] = []
        stages = zip(kv_cache_configs, self.node.devices, self.node.layouts, strict=True)
        for config, device, layout in stages:
            connector = OffloadingConnector(self.vllm_config, KVConnectorRole.WORKER, config)
            worker = VirtualOffloadingWorker(device, block_bytes=layout.block_bytes)
            assert connector.connector_worker is not None
            connector.connector_worker.worker = (
                worker  # where register_kv_caches would put one with real tensors
            )
            self._offloads.append(connector)
            self.workers.append(worker)
        self._aggregator = KVOutputAggregator(self.parallel_config.world_size)
        self._merged: KVConnectorOutput | None = None

    def _submit(self, output: SchedulerOutput, run: RunStep) -> NodeStep | None:
        """Put a step on all stages' lanes, in the order of vLLM's V2 runner: loads begin behind the forward pass."""
        step = self._begin_step(run)
        replies = []
        sent = output.kv_connector_metadata
        assert isinstance(sent, OffloadingConnectorMetadata), sent
        for stage, (connector, device) in enumerate(zip(self._offloads, self.node.devices, strict=True)):
            device.begin_step()
            metadata = replace(
                sent, store_jobs=dict(sent.store_jobs)
            )  # a worker takes jobs out of its own copy
            connector.handle_preemptions(metadata)
            connector.bind_connector_metadata(metadata)
            if output.has_sync_kv_loads:
                connector.start_load_kv(None)  # type: ignore[arg-type]  # which it does not look at
            if step is not None:
                self.node.receive(step, stage)
                self.node.compute(step, stage)
            if not output.has_sync_kv_loads:
                connector.start_load_kv(None)  # type: ignore[arg-type]
            connector.wait_for_save()  # type: ignore[no-untyped-call]  # vLLM's
            replies.append(self._reply(connector, output.finished_req_ids))
        merged = self._aggregator.aggregate([*replies], output_rank=0)
        self._merged = merged.kv_connector_output if merged is not None else None
        return step

    def _reply(self, connector: OffloadingConnector, finished_req_ids: set[str]) -> ModelRunnerOutput:
        sent, received = connector.get_finished(finished_req_ids)
        reply = KVConnectorOutput(
            finished_sending=sent or None,
            finished_recving=received or None,
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=reply)

    def _connector_output(self) -> KVConnectorOutput | None:
        return self._merged

    def _future(self, output: ModelRunnerOutput) -> StepFuture:
        """Return the output of the step submitted last; an empty one's waits for a copy if nothing computes.

        A real core would ask again and again, until a copy has ended.
        """
        done = self._last_done
        if done is None or done.done_s is not None:
            ends: Sequence[VirtualEvent | None] = [worker.next_end() for worker in self.workers]
            done = next((end for end in ends if end is not None), None)
        return StepFuture(output, lambda: self._wait_for(done))


def offloading_arguments(node: NodeSpec) -> dict[str, Any]:
    """Return vLLM's arguments for offloading to all of the host memory that the node gives to KV.

    Prompts and outputs are both kept; by default vLLM keeps prompts only.
    """
    config = {"cpu_bytes_to_use": int(node.host_kv_bytes), "offload_prompt_only": False}
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=config
        )
    }
