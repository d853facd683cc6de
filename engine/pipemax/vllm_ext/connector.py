"""vLLM's KV connector as the road to the transfer engine: copies in with each step, times out with it.

The scheduler's side carries nothing: ``pipemax.vllm_ext.scheduler`` makes the metadata itself. The worker's side
owns this stage's host pool. ``handle_preemptions`` is the first hook of every step, empty ones included, and
``wait_for_save`` the last after the forward pass: they are the begin and the end of the orchestrator's steps.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group

from pipemax.domain.plan import StepId
from pipemax.transfer.backend import CopyBackend
from pipemax.transfer.commands import StepCopies
from pipemax.transfer.cpu import CpuCopyBackend
from pipemax.transfer.host_pool import HostPool
from pipemax.transfer.layout import describe_layers
from pipemax.transfer.orchestrator import Orchestrator
from pipemax.vllm_ext.settings import RuntimeSettings
from pipemax.vllm_ext.timing import LoadReport, StageReport, StepReport, WorkerReports


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What every stage is told with a step."""

    step_id: StepId
    copies: StepCopies


class PipeMaxConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._settings = RuntimeSettings.from_extra_config(extra_config)
        self._orchestrator: Orchestrator | None = None
        self._clock = _StageClock()

    # -- worker ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Called once this stage's GPU pool exists. ``ValueError`` unless it is block-first."""
        layout, gpu_rows = describe_layers(kv_caches)
        pool = HostPool(layout, self._settings.host_blocks)
        self._orchestrator = Orchestrator(self._make_backend(gpu_rows, pool))

    def _make_backend(self, gpu_rows: torch.Tensor, pool: HostPool) -> CopyBackend:
        """Copies between the two pools; tests put a faulty one here."""
        return CpuCopyBackend(gpu_rows.numpy(), pool.rows)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        assert isinstance(kv_connector_metadata, StepMetadata), kv_connector_metadata
        assert self._orchestrator is not None, "a step before the KV caches exist"
        wait = self._orchestrator.begin_step(kv_connector_metadata.copies)
        self._clock.begin(kv_connector_metadata, wait.stall_s, [load.seconds for load in wait.loads])

    def wait_for_save(self) -> None:
        """A step's KV is computed."""
        assert self._orchestrator is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata), metadata
        self._orchestrator.end_step(metadata.copies)

    def add_compute_s(self, seconds: float) -> None:
        """The worker's own measure of the step that ran last; may come in parts."""
        self._clock.add_compute_s(seconds)

    @property
    def step_begin_s(self) -> float:
        """When the current step had its copies and could compute (``time.perf_counter``)."""
        return self._clock.begin_s

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._clock.take_report()
        return WorkerReports({get_pp_group().rank_in_group: [report]}) if report is not None else None

    def shutdown(self) -> None:
        if self._orchestrator is not None:
            self._orchestrator.close()

    # Not used: there is one copy of everything per stage, and no layer is waited for on its own.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    # -- scheduler ------------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """The replica is for this engine alone."""
        return False

    def has_pending_block_frees(self) -> bool:
        """True makes vLLM leave a request out that finds no blocks, rather than drop another one's KV for it:
        who leaves the GPU, the controller decides.
        """
        return True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        raise AssertionError("PipeMax's scheduler makes the metadata; is scheduler_cls set?")

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class _StageClock:
    """Collects a stage's times from one report to the next."""

    def __init__(self) -> None:
        self.begin_s = 0.0
        self._step_id: StepId | None = None
        self._compute_s = 0.0
        self._loading: deque[tuple[StepId, int]] = deque()
        self._steps: list[StepReport] = []
        self._loads: list[LoadReport] = []
        self._stall_s = 0.0

    def begin(self, metadata: StepMetadata, stall_s: float, load_s: list[float]) -> None:
        if self._step_id is not None and self._compute_s > 0:
            self._steps.append(StepReport(step_id=self._step_id, compute_s=self._compute_s))
        for seconds in load_s:
            step_id, num_blocks = self._loading.popleft()
            self._loads.append(LoadReport(step_id=step_id, num_blocks=num_blocks, seconds=seconds))
        if metadata.copies.loads:
            self._loading.append((metadata.step_id, len(metadata.copies.loads)))
        self._stall_s += stall_s
        self._step_id, self._compute_s = metadata.step_id, 0.0
        self.begin_s = time.perf_counter()

    def add_compute_s(self, seconds: float) -> None:
        self._compute_s += seconds

    def take_report(self) -> StageReport | None:
        if not (self._steps or self._loads or self._stall_s):
            return None
        report = StageReport(steps=tuple(self._steps), loads=tuple(self._loads), stall_s=self._stall_s)
        self._steps, self._loads, self._stall_s = [], [], 0.0
        return report
