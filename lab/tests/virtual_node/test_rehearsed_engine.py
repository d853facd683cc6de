"""vLLM's real core and schedulers over a virtual node."""

from dataclasses import replace

import pytest

from lab.virtual_node.executor import VirtualNodeExecutor
from lab.virtual_node.launch import ClockSettings, RehearsedEngine, rehearsed_core
from lab.virtual_node.run import rehearse
from pipemax.config import Policy
from pipemax.domain.plan import Batching
from pipemax.domain.specs import KvCacheDtype, Parallelism
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions
from tests.unit.sim.machines import small_model, small_node, small_scenario, small_workload

CHUNK_TOKENS = 512


def make_engine(pipeline: int = 4, tensor: int = 1, **changes: object) -> RehearsedEngine:
    engine = RehearsedEngine(
        node=small_node(num_gpus=pipeline * tensor),
        model=small_model(),
        parallelism=Parallelism(pipeline=pipeline, tensor=tensor),
        policy=Policy.VLLM,
        chunk_tokens=CHUNK_TOKENS,
        max_model_len=4096,
        clock=ClockSettings(host_factor=0.0),
    )
    return replace(engine, **changes)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize("pipeline", [4, 8])
def test_as_many_steps_are_in_flight_as_on_gpus(pipeline: int) -> None:
    with rehearsed_core(make_engine(pipeline)) as core:
        assert core.batch_queue_size == pipeline + 1  # asynchronous, over vLLM's V2 runner


@pytest.mark.parametrize(
    ("pipeline", "tensor", "chunk_tokens"),
    [
        pytest.param(4, 1, 128, marks=pytest.mark.parity_full),
        (4, 1, 512),
        pytest.param(4, 1, 4096, marks=pytest.mark.parity_full),
        pytest.param(8, 1, 512, marks=pytest.mark.parity_full),
        pytest.param(1, 4, 512, marks=pytest.mark.parity_full),
        (2, 2, 512),
    ],
)
def test_stock_vllm_is_as_fast_as_in_the_simulator(pipeline: int, tensor: int, chunk_tokens: int) -> None:
    engine, workload = make_engine(pipeline, tensor, chunk_tokens=chunk_tokens), small_workload(100)
    result = rehearse(engine, workload)  # which checks that every output has its length
    policy = stock_vllm(chunk_tokens, tensor=tensor, keeps_preempted=True)
    simulated = ContinuousBatching(small_scenario(workload, engine.node), policy).simulate()
    assert result.total_tokens_per_s == pytest.approx(simulated.total_tokens_per_s, rel=0.01)
    assert result.host_bubble == 0.0


def test_stock_vllm_frees_what_has_left_the_windows_as_in_the_simulator() -> None:
    model = replace(small_model(), window_tokens=128, full_layers=tuple(range(1, 20, 2)))
    workload = small_workload(100)
    engine = make_engine(model=model, node=small_node(num_gpus=4, kv_gb=0.2))
    freed = rehearse(engine, workload)
    policy = stock_vllm(CHUNK_TOKENS, keeps_preempted=True)
    scenario = replace(small_scenario(workload, engine.node), model=model)
    simulated = ContinuousBatching(scenario, policy).simulate()
    assert freed.total_tokens_per_s == pytest.approx(simulated.total_tokens_per_s, rel=0.01)
    whole = rehearse(replace(engine, vllm={"disable_hybrid_kv_cache_manager": True}), workload)
    assert whole.total_tokens_per_s < 0.9 * freed.total_tokens_per_s


@pytest.mark.parametrize(
    ("batching", "pipeline", "tensor"),
    [
        pytest.param(Batching.SEPARATED, 4, 1, marks=pytest.mark.parity_full),
        (Batching.MIXED, 4, 1),
        (Batching.SEPARATED, 2, 2),
    ],
)
def test_pipemax_is_as_fast_as_in_the_simulator(batching: Batching, pipeline: int, tensor: int) -> None:
    workload = small_workload(100)
    told = {"initial_output_tokens": workload.typical_output_tokens}
    engine = make_engine(pipeline, tensor, policy=Policy.PIPEMAX, batching=batching, controller=told)
    result = rehearse(engine, workload)
    controller = {
        "batching": batching,
        "mixed_step_tokens": CHUNK_TOKENS,
        "prefill_chunk_tokens": CHUNK_TOKENS,
    }
    options = PipeMaxOptions(tensor=tensor, controller=controller)
    simulated = PipeMaxSystem(small_scenario(workload, engine.node), options).simulate()
    assert result.total_tokens_per_s == pytest.approx(simulated.total_tokens_per_s, rel=0.05)


@pytest.mark.parametrize("batching", [Batching.SEPARATED, Batching.MIXED])
def test_pipemax_frees_what_has_left_the_windows_and_reads_only_kv_that_is_there(batching: Batching) -> None:
    """With tables for each group of layers; the virtual node checks each of their blocks."""
    model = replace(small_model(), window_tokens=128, full_layers=tuple(range(1, 20, 2)))
    workload, node = small_workload(100), small_node(num_gpus=4, kv_gb=0.2)
    engine = make_engine(
        model=model,
        node=node,
        policy=Policy.PIPEMAX,
        batching=batching,
        controller={"initial_output_tokens": workload.typical_output_tokens},
    )
    freed = rehearse(replace(engine, vllm={"disable_hybrid_kv_cache_manager": False}), workload)
    assert freed.copy_counts["evictions"] > 0
    assert freed.copy_counts["prefetched_blocks"] > 0
    controller = {
        "batching": batching,
        "mixed_step_tokens": CHUNK_TOKENS,
        "prefill_chunk_tokens": CHUNK_TOKENS,
    }
    scenario = replace(small_scenario(workload, node), model=model)
    options = PipeMaxOptions(controller=controller, frees_windows=True)
    simulated = PipeMaxSystem(scenario, options).simulate()
    # Over 400 rows they differ by 0.2 %; few rows end together, one way or another.
    assert freed.total_tokens_per_s == pytest.approx(simulated.total_tokens_per_s, rel=0.08)
    assert freed.total_tokens_per_s > 1.05 * rehearse(engine, workload).total_tokens_per_s


def test_stages_of_two_gpus_evict_and_prefetch_and_read_only_kv_that_is_there() -> None:
    """The virtual node checks each read and copy; that every output has its length is asserted within."""
    node = small_node(num_gpus=4, kv_gb=0.2)
    result = rehearse(make_engine(2, 2, node=node, policy=Policy.PIPEMAX), small_workload(60))
    assert result.copy_counts["evictions"] > 0
    assert result.copy_counts["prefetched_blocks"] > 0


def test_a_run_with_a_host_that_takes_no_time_is_the_same_each_time() -> None:
    workload, engine = small_workload(50), make_engine()
    assert rehearse(engine, workload) == rehearse(engine, workload)


def test_a_host_that_takes_time_costs_throughput() -> None:
    workload = small_workload(50)
    free = rehearse(make_engine(), workload)
    slow = rehearse(make_engine(clock=ClockSettings(host_factor=100.0)), workload)
    assert slow.seconds > free.seconds
    assert slow.host_bubble > 0.0
    assert slow.host_ms_per_step > 0.0


def test_the_wall_clock_gives_every_request_its_output() -> None:
    result = rehearse(make_engine(clock=ClockSettings(stretch=0.01)), small_workload(50))
    assert result.num_steps > 50


def test_a_model_that_does_not_fit_is_refused() -> None:
    engine = make_engine(node=small_node(num_gpus=4, kv_gb=-5.0))
    with pytest.raises(ValueError, match="does not fit"), rehearsed_core(engine):
        pass


def test_fp8_kv_is_rehearsed_under_pipemax_as_it_is_simulated() -> None:
    """Half the bytes in each pool's block and in each copy; checked that every step finds its KV."""
    model = small_model().with_kv_dtype(KvCacheDtype.FP8)
    node = small_node(num_gpus=4, kv_gb=0.15)
    workload = small_workload(100)
    engine = make_engine(model=model, node=node, policy=Policy.PIPEMAX)
    assert engine.capacity.gpu_blocks >= 2 * make_engine(node=node).capacity.gpu_blocks
    with rehearsed_core(engine) as core:
        executor = core.model_executor
        assert isinstance(executor, VirtualNodeExecutor)
        assert [layout.token_bytes for layout in executor.node.layouts] == [5 * 2 * 8 * 128] * 4
        (of_a_layer, *_) = executor.get_kv_cache_specs()[0].values()
        assert of_a_layer.page_size_bytes == BLOCK_TOKENS * 2 * 8 * 128, "vLLM counts the same"
    result = rehearse(engine, workload)
    assert result.copy_counts["prefetched_blocks"] > 0
    scenario = replace(small_scenario(workload, node), model=model)
    simulated = PipeMaxSystem(scenario, PipeMaxOptions()).simulate()
    assert result.total_tokens_per_s == pytest.approx(simulated.total_tokens_per_s, rel=0.1)


def test_stock_vllm_with_fp8_kv_is_as_fast_as_in_the_simulator() -> None:
    model, node = small_model().with_kv_dtype(KvCacheDtype.FP8), small_node(kv_gb=0.15)
    engine, workload = make_engine(model=model, node=node), small_workload(100)
    policy = stock_vllm(CHUNK_TOKENS, keeps_preempted=True)
    scenario = replace(small_scenario(workload, node), model=model)
    simulated = ContinuousBatching(scenario, policy).simulate()
    assert rehearse(engine, workload).total_tokens_per_s == pytest.approx(
        simulated.total_tokens_per_s, rel=0.1
    )


def test_weights_of_one_byte_are_refused() -> None:
    engine = make_engine(model=replace(small_model(), bytes_per_value=1))
    with pytest.raises(ValueError, match="2 or 4 bytes a value of weights, not 1"), rehearsed_core(engine):
        pass
