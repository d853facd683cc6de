"""Connect vLLM to the transfers through its KV connector: each step brings copies in and takes times out.

The scheduler's side carries nothing: ``pipemax.vllm_ext.scheduler`` makes the metadata itself. The worker's side
owns a host pool for its part of the KV: the layers of its stage, and under tensor parallelism its share of their
heads. ``handle_preemptions`` is the first hook of every step, empty ones included, and begins the step of the
transfers. ``bind_connector_metadata`` starts its prefetches: in both of vLLM's runners it is the last hook before the
forward pass, behind the step's inputs and the activations of the stage before. The first hook after the forward pass
ends the step: ``finish_forward`` with vLLM's V2 runner, which calls it before the activations are sent, otherwise
``wait_for_save``. Nothing is done between layers, so full CUDA graphs remain possible, but for waves: these follow the
computation group of layers by group of layers. Of a group's layers only attention reads and writes KV, so a group ends
with its last layer's ``save_kv_layer``, which vLLM calls between piecewise CUDA graphs.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import AttentionMetadata

from pipemax.domain.plan import StepId
from pipemax.transfer.backend import CopyBackend, StepTransfers
from pipemax.transfer.checks.copy_check import CopyCheck, check_copies
from pipemax.transfer.checks.poisoned_prefetches import PoisonedPrefetches
from pipemax.transfer.checks.swapped_prefetches import SwappedPrefetches
from pipemax.transfer.commands import StepCopies
from pipemax.transfer.cpu import CpuCopyBackend, HostPool
from pipemax.transfer.layout import BlockLayout, LayerSpan, describe_layers
from pipemax.transfer.orchestrator import Orchestrator
from pipemax.vllm_ext.runtime_settings import FOLLOWS_LAYERS, RuntimeSettings
from pipemax.vllm_ext.seam.vllm_types import (
    KVCacheBlocks,
    KVCacheConfig,
    Request,
    SchedulerOutput,
    VllmConfig,
    get_pp_group,
    get_tp_group,
)
from pipemax.vllm_ext.worker.activations import arrive_by_copy_engine
from pipemax.vllm_ext.worker.stage_clock import GpuStageClock, StageClock
from pipemax.vllm_ext.worker.stage_reports import WorkerReports


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The message that every worker receives with a step. Block ids are the same on all of them."""

    step_id: StepId
    copies: StepCopies

    def __post_init__(self) -> None:
        self.copies = replace(self.copies, step_id=self.step_id)  # so that their times name the step


@dataclass(frozen=True, slots=True)
class _Stage:
    """A worker's pools, and what copies whole blocks between them."""

    transfers: StepTransfers
    layout: BlockLayout
    gpu_rows: torch.Tensor
    host_rows: torch.Tensor


class PipeMaxConnector(KVConnectorBase_V1, SupportsHMA):
    """Begins and ends the transfers' steps from vLLM's hooks; see the module's docstring."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        assert transfer_config is not None, "a connector is made from a transfer config"
        self._settings = RuntimeSettings.from_extra_config(transfer_config.kv_connector_extra_config)
        self.gpu_clock: GpuStageClock | None = None
        """For a GPU's worker, once the KV caches exist."""
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._transfers: StepTransfers | None = None
        self._stage: _Stage | None = None
        self._resources = ExitStack()
        self._step: StepMetadata | None = None  # while the step's forward pass is not over
        self._clock: StageClock = StageClock()
        self._groups: tuple[LayerSpan, ...] = ()
        """Of layers, in the order in which steps compute them; none without waves."""
        self._last_layers: dict[str, int] = {}
        """The groups by the names of their last layers."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Tell whether vLLM must call the connector between layers: a full CUDA graph calls nothing."""
        return FOLLOWS_LAYERS in extra_config

    # -- worker ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the transfers, once this stage's GPU pool exists. ``ValueError`` unless it is block-first."""
        layout, gpu_rows = describe_layers(kv_caches)
        if self._settings.wave_groups is not None:
            self._make_groups(kv_caches, layout, min(self._settings.wave_groups, layout.num_layers))
        if gpu_rows.is_cuda:
            self._start_on_gpu(layout, gpu_rows)
        else:
            self._start_on_cpu(layout, gpu_rows)

    def _make_groups(self, kv_caches: dict[str, torch.Tensor], layout: BlockLayout, num_groups: int) -> None:
        names = layers_in_order(kv_caches)
        layers = layout.layer_groups(num_groups)
        self._last_layers = {names[group.stop - 1]: number for number, group in enumerate(layers)}
        self._groups = layout.group_spans(num_groups)

    def _start_on_cpu(self, layout: BlockLayout, gpu_rows: torch.Tensor) -> None:
        pool = HostPool(layout, self._settings.host_blocks(layout.block_tokens))
        self._transfers = Orchestrator(self._make_backend(gpu_rows, pool), self._groups)
        self._resources.callback(self._transfers.close)
        self._stage = _Stage(self._transfers, layout, gpu_rows, pool.tensor)

    def _start_on_gpu(self, layout: BlockLayout, gpu_rows: torch.Tensor) -> None:
        _check_block_tokens(layout, self._block_tokens)
        # It needs cuda-core, which is installed only where there are GPUs.
        from pipemax.transfer.cuda.assemble import cuda_transfers
        from pipemax.transfer.cuda.cuda_device import CudaDevice

        stage = self._place()[0]
        transfers = self._resources.enter_context(
            cuda_transfers(
                layout,
                gpu_rows,
                self._settings.host_blocks(layout.block_tokens),
                in_pieces=arrive_by_copy_engine(stage),
                groups=self._groups,
            )
        )
        self._transfers = transfers
        self._clock = self.gpu_clock = GpuStageClock(transfers.device)
        device = transfers.device
        assert isinstance(device, CudaDevice), device
        self._stage = _Stage(transfers, layout, gpu_rows, device.host_rows)

    def _make_backend(self, gpu_rows: torch.Tensor, pool: HostPool) -> CopyBackend:
        """Make the backend that copies between the two pools; tests put a faulty one here."""
        return CpuCopyBackend(gpu_rows.numpy(), pool.rows)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step."""
        assert isinstance(kv_connector_metadata, StepMetadata), kv_connector_metadata
        assert self._transfers is not None, "a step before the KV caches exist"
        wait = self._transfers.begin_step(kv_connector_metadata.copies)
        self._step = kv_connector_metadata
        self._clock.begin(kv_connector_metadata.step_id, wait)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Keep the step's message and start its prefetches, behind what its forward pass reads."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata), connector_metadata
        assert self._transfers is not None
        self._transfers.start_prefetches(connector_metadata.copies)
        if connector_metadata.copies.in_groups:
            self._transfers.begin_group(0)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """End a group of layers behind its last one, in a step that computes in groups, and begin the next one."""
        group = self._last_layers.get(layer_name)
        if group is None or self._step is None or not self._step.copies.in_groups:
            return
        assert self._transfers is not None
        self._transfers.end_group(self._step.copies, group)
        if group + 1 < len(self._groups):
            self._transfers.begin_group(group + 1)

    def finish_forward(self) -> None:
        """End a step, whose KV is computed or whose kernels are enqueued."""
        assert self._transfers is not None
        assert self._step is not None, "no step has begun"
        self._transfers.end_step(self._step.copies)
        self._step = None

    def wait_for_save(self) -> None:
        """End the step unless ``finish_forward`` has; does not wait."""
        if self._step is not None:
            self.finish_forward()

    def add_compute_s(self, seconds: float) -> None:
        """Add the worker's own measure of the step that ran last; may come in parts."""
        self._clock.add_compute_s(seconds)

    @property
    def step_begin_s(self) -> float:
        """When the current step had its copies and could compute (``time.perf_counter``)."""
        return self._clock.begin_s

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._clock.take_report()
        if report is None:
            return None
        assert self._transfers is not None
        stage, ranks = self._place()
        counts = self._transfers.counts
        return WorkerReports({stage: [replace(report, rank=rank, copies=counts) for rank in ranks]})

    def _place(self) -> tuple[int, Sequence[int]]:
        """Return this worker's stage, and the ranks of the stage for which it reports: its own."""
        return int(get_pp_group().rank_in_group), (int(get_tp_group().rank_in_group),)

    def shutdown(self) -> None:
        self._resources.close()

    # -- worker, while nothing runs: see ``pipemax.vllm_ext.node_check`` --------------------------------------------

    def check_copies(self) -> CopyCheck:
        """Check this stage's copies with known bytes, which overwrites both of its pools."""
        assert self._stage is not None, "a check before the KV caches exist"
        stage = self._stage
        return check_copies(
            stage.transfers,
            stage.layout,
            stage.gpu_rows,
            stage.host_rows,
            stores_tokens=self._settings.stores_tokens,
        )

    def poison_prefetches(self, is_on: bool) -> None:
        """From now on, overwrite every prefetch's target with NaN before the copy, or no longer."""
        assert self._stage is not None, "a check before the KV caches exist"
        transfers = self._stage.transfers
        gpu_rows, groups = self._stage.gpu_rows, self._groups
        self._transfers = PoisonedPrefetches(transfers, gpu_rows, groups) if is_on else transfers

    def swap_prefetches(self, is_on: bool) -> None:
        """From now on, prefetch other blocks than were asked for, or no longer."""
        assert self._stage is not None, "a check before the KV caches exist"
        transfers = self._stage.transfers
        self._transfers = SwappedPrefetches(transfers) if is_on else transfers

    # Not used: no layer's copies are waited for on their own.

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    # -- scheduler ------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Always ``False``: the replica is only for this engine."""
        return False

    def has_pending_block_frees(self) -> bool:
        """Return ``True``, so that vLLM leaves out a request that finds no blocks.

        Otherwise vLLM would drop another request's KV for it, but only the controller decides who leaves the GPU.
        """
        return True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        raise AssertionError("PipeMax's scheduler makes the metadata; is scheduler_cls set?")

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


def layers_in_order(kv_caches: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of a stage's layers in the order of their parts of a block.

    ``ValueError`` unless that is the order in which the model computes them, each with KV of its own.
    """
    names = sorted(kv_caches, key=lambda name: kv_caches[name].storage_offset())
    if len({cache.storage_offset() for cache in kv_caches.values()}) < len(names):
        raise ValueError("waves: on needs KV of its own for every layer, and layers of this model share some")
    numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name in names]
    if numbers != sorted(numbers):
        raise ValueError(f"waves: on needs the layers of a KV block in their order, not {', '.join(names)}")
    return names


def _check_block_tokens(layout: BlockLayout, block_size: int) -> None:
    """Raise ``ValueError`` if an attention kernel's blocks are not those that the scheduler counts."""
    if layout.block_tokens != block_size:
        raise ValueError(
            f"attention kernels keep KV in blocks of {layout.block_tokens} tokens, vLLM's scheduler counts blocks of "
            f"{block_size}: set block_size {layout.block_tokens}, or run policy: vllm"
        )
