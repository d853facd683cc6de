"""The connector's hooks in the order in which vLLM's two model runners call them, over a CPU's KV caches."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from pipemax.config import EngineConfig
from pipemax.domain.plan import StepId
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.backend import CopyBackend
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies
from pipemax.transfer.cpu import CpuCopyBackend, HostPool
from pipemax.transfer.layout import ByteRows, LayerSpan, compact_layout
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config
from pipemax.vllm_ext.worker.connector import (
    PipeMaxConnector,
    StepMetadata,
    _check_block_tokens,
    layers_in_order,
)
from tests.unit.vllm_ext.fake_worker import MODEL


@pytest.fixture
def kv() -> torch.Tensor:
    # (num_blocks, layers, heads, tokens, content)
    return torch.zeros(8, 2, 1, 4, 6)


@pytest.fixture
def connector(kv: torch.Tensor) -> Iterator[PipeMaxConnector]:
    yield from make_connector(kv)


class RecordedBackend(CpuCopyBackend):
    def __init__(self, gpu_rows: ByteRows, host_rows: ByteRows) -> None:
        super().__init__(gpu_rows, host_rows)
        self.submitted: list[tuple[BlockPrefetch, ...]] = []

    def submit_prefetches(self, prefetches: Sequence[BlockPrefetch], span: LayerSpan | None = None) -> None:
        self.submitted.append(tuple(prefetches))
        super().submit_prefetches(prefetches, span)


class RecordedConnector(PipeMaxConnector):
    """The only worker of its engine."""

    def __init__(self, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        self.vllm_config = vllm_config

    def _make_backend(self, gpu_rows: torch.Tensor, pool: HostPool) -> CopyBackend:
        self.backend = RecordedBackend(gpu_rows.numpy(), pool.rows)
        return self.backend

    def _place(self) -> tuple[int, Sequence[int]]:
        return 0, (0,)


@pytest.fixture
def recorded(kv: torch.Tensor) -> Iterator[PipeMaxConnector]:
    yield from make_connector(kv, RecordedConnector)


def make_connector(
    kv: torch.Tensor,
    connector_type: type[PipeMaxConnector] = PipeMaxConnector,
    *,
    waves: str = "off",
) -> Iterator[PipeMaxConnector]:
    config = EngineConfig(model=str(MODEL), policy="pipemax", max_model_len=64, waves=waves)
    with launch_environment(config):
        vllm_config = make_vllm_config(config)
    connector = connector_type(vllm_config, KVConnectorRole.WORKER, None)
    connector.register_kv_caches({f"layer.{layer}": kv[:, layer] for layer in range(2)})
    yield connector
    connector.shutdown()


def run_step(connector: PipeMaxConnector, step: int, copies: StepCopies, hooks: tuple[str, ...]) -> None:
    metadata = StepMetadata(StepId(step), copies)
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    for hook in hooks:
        getattr(connector, hook)()
    connector.clear_connector_metadata()


@pytest.mark.parametrize("hooks", [("wait_for_save",), ("finish_forward", "wait_for_save")], ids=["V1", "V2"])
def test_blocks_are_stored_and_prefetched(
    connector: PipeMaxConnector, kv: torch.Tensor, hooks: tuple[str, ...]
) -> None:
    kv[3] = 7
    store = BlockStore(source=GpuBlockId(3), target=HostBlockId(5))
    run_step(connector, 1, StepCopies(stores=(store,)), hooks)
    run_step(connector, 2, StepCopies(), hooks)  # empty, and all the same begun and ended
    kv[3] = 0
    prefetch = BlockPrefetch(source=HostBlockId(5), target=GpuBlockId(4))
    run_step(connector, 3, StepCopies(prefetches=(prefetch,)), hooks)
    run_step(connector, 4, StepCopies(), hooks)
    assert (kv[4] == 7).all()
    assert not kv[3].any()
    assert connector.gpu_clock is None


def test_a_wave_follows_the_model_from_layer_to_layer(kv: torch.Tensor) -> None:
    for connector in make_connector(kv, RecordedConnector, waves="on"):
        assert isinstance(connector, RecordedConnector)
        kv[3] = 7
        store = BlockStore(source=GpuBlockId(3), target=HostBlockId(5))
        run_step(connector, 1, StepCopies(stores=(store,)), ("wait_for_save",))
        kv[4] = 1
        prefetch = BlockPrefetch(source=HostBlockId(5), target=GpuBlockId(4))
        step = StepMetadata(StepId(2), StepCopies(wave_prefetches=(prefetch,), in_groups=True))
        connector.handle_preemptions(step)
        connector.bind_connector_metadata(step)
        for index in range(2):
            assert (kv[4, index] == 1).all()
            connector.wait_for_layer_load(f"layer.{index}")
            connector.save_kv_layer(f"layer.{index}", kv[:, index], None)
            connector.backend.wait()
            assert (kv[4, index] == 7).all()
        connector.finish_forward()
        with pytest.raises(AssertionError, match="ends in group 0"):
            run_step(connector, 3, StepCopies(in_groups=True), ("wait_for_save",))


def test_waves_need_each_layer_s_own_kv_in_the_order_of_the_layers(kv: torch.Tensor) -> None:
    assert layers_in_order({"layer.1": kv[:, 1], "layer.0": kv[:, 0]}) == ["layer.0", "layer.1"]
    with pytest.raises(ValueError, match=r"in their order, not layer\.1, layer\.0"):
        layers_in_order({"layer.1": kv[:, 0], "layer.0": kv[:, 1]})
    with pytest.raises(ValueError, match="layers of this model share some"):
        layers_in_order({"layer.0": kv[:, 0], "layer.1": kv[:, 1], "layer.2": kv[:, 1]})


PREFETCH = StepMetadata(
    StepId(1), StepCopies(prefetches=(BlockPrefetch(source=HostBlockId(5), target=GpuBlockId(4)),))
)


def test_prefetches_start_when_the_forward_pass_is_about_to(recorded: RecordedConnector) -> None:
    """Between the two hooks vLLM's V1 runner submits the step's inputs, which go first."""
    recorded.handle_preemptions(PREFETCH)
    assert recorded.backend.submitted == []
    recorded.bind_connector_metadata(PREFETCH)
    assert recorded.backend.submitted == [PREFETCH.copies.prefetches]


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_vllm_s_runners_start_the_prefetches_of_a_step_without_a_forward_pass(
    recorded: RecordedConnector, kv: torch.Tensor, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", recorded)
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = PREFETCH
    if runner == "V1":
        recorded.handle_preemptions(PREFETCH)  # by its `execute_model`, always
        KVConnectorModelRunnerMixin.kv_connector_no_forward(output, recorded.vllm_config)
    else:
        caches = {f"layer.{layer}": kv[:, layer] for layer in range(2)}
        ActiveKVConnector(recorded.vllm_config, caches).no_forward(output)
    assert recorded.backend.submitted == [PREFETCH.copies.prefetches]


@pytest.mark.parametrize("waves", ["off", "on"])
def test_full_cuda_graphs_are_kept_but_with_waves(kv: torch.Tensor, waves: str) -> None:
    """vLLM asks this before it captures graphs, of the very config that the connector has."""
    for connector in make_connector(kv, waves=waves):
        transfer_config = connector._vllm_config.kv_transfer_config
        assert transfer_config is not None
        extra_config = transfer_config.kv_connector_extra_config
        assert PipeMaxConnector.requires_piecewise_for_cudagraph(extra_config) == (waves == "on")


def test_caches_that_are_not_block_first_are_refused(connector: PipeMaxConnector) -> None:
    layer_first = torch.zeros(2, 8, 1, 4, 6)
    with pytest.raises(ValueError, match="not block-first"):
        connector.register_kv_caches({str(layer): layer_first[layer] for layer in range(2)})


def test_kernels_with_blocks_of_their_own_are_refused() -> None:
    layout = compact_layout(num_layers=1, num_kv_heads=1, block_tokens=16, content_bytes=4)
    _check_block_tokens(layout, 16)
    with pytest.raises(ValueError, match="blocks of 16 tokens, vLLM's scheduler counts blocks of 64"):
        _check_block_tokens(layout, 64)
