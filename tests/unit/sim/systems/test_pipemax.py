"""PipeMax's controller on the simulated machine: what the paper says of it in numbers."""

from dataclasses import replace

import numpy as np
import pytest

from pipemax.domain.specs import KvCacheDtype
from pipemax.sim.links import Direction
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions
from pipemax.sim.workloads import Workload
from tests.unit.sim.machines import small_model, small_node, small_scenario


def uniform_workload(num_requests: int, prompt: int, output: int) -> Workload:
    """Nearly equal requests: their ends are spread, so that batches stay as they are for long."""
    outputs = output + np.arange(num_requests) % 41
    return Workload(
        name="uniform", prompt_tokens=np.full(num_requests, prompt), output_tokens=outputs.astype(np.int64)
    )


def run(options: PipeMaxOptions, *, num_gpus: int = 4, kv_gb: float = 1.0) -> SimulationResult:
    scenario = small_scenario(uniform_workload(500, 300, 160), small_node(num_gpus=num_gpus, kv_gb=kv_gb))
    return PipeMaxSystem(scenario, options).simulate()


@pytest.fixture(scope="module")
def pipemax() -> SimulationResult:
    return run(PipeMaxOptions())


def steady_means(result: SimulationResult) -> tuple[float, float]:
    """KV tokens of a batch, and tokens prefetched a step, in the middle of decode."""
    samples = result.recording.decode_samples
    middle = samples[len(samples) // 4 : len(samples) // 2]
    kv = float(np.mean([sample.kv_tokens for sample in middle]))
    return kv, float(np.mean([sample.prefetched_tokens for sample in middle]))


@pytest.mark.parametrize(
    ("num_gpus", "tensor", "kv_gb"),
    [
        (4, 1, 0.6),
        pytest.param(8, 1, 0.6, marks=pytest.mark.long),
        pytest.param(8, 2, 0.1, marks=pytest.mark.long),
    ],
)
def test_active_batch_follows_the_closed_form(num_gpus: int, tensor: int, kv_gb: float) -> None:
    """A = C/n + P · (1 − 2/n): P arrives each step, two batches' worth of it always waits to be run."""
    result = run(PipeMaxOptions(tensor=tensor), num_gpus=num_gpus, kv_gb=kv_gb)
    active, prefetched = steady_means(result)
    n, capacity = num_gpus // tensor, result.gpu_kv_tokens
    assert prefetched > 0
    assert active == pytest.approx(capacity / n + prefetched * (1 - 2 / n), rel=0.15)
    assert active <= capacity / 2


def test_prefetching_makes_batches_larger_than_the_gpu_alone_can_hold(pipemax: SimulationResult) -> None:
    active, _ = steady_means(pipemax)
    assert active > 1.2 * pipemax.gpu_kv_tokens / 4


def test_freeing_what_has_left_windows_makes_batches_larger_and_copies_smaller() -> None:
    model = replace(small_model(), window_tokens=64, full_layers=tuple(range(0, 20, 2)))
    scenario = replace(small_scenario(uniform_workload(500, 300, 160), small_node(num_gpus=4)), model=model)
    freed, whole = (
        PipeMaxSystem(scenario, PipeMaxOptions(frees_windows=frees)).simulate() for frees in (True, False)
    )
    assert steady_means(freed)[0] > 1.3 * steady_means(whole)[0]
    assert freed.steady_tokens_per_s > whole.steady_tokens_per_s
    # A block has room for three of a stage's five layers.
    prefetched = [
        sum(sample.prefetched_tokens for sample in result.recording.decode_samples)
        for result in (freed, whole)
    ]
    assert freed.h2d_bytes / prefetched[0] == pytest.approx(whole.h2d_bytes / prefetched[1] * 3 / 5, rel=0.02)


def test_kv_that_fits_the_gpu_is_never_prefetched() -> None:
    result = run(PipeMaxOptions(), kv_gb=12.0)
    assert result.h2d_bytes == 0.0


@pytest.mark.parametrize("dtype", [KvCacheDtype.AUTO, KvCacheDtype.FP8])
@pytest.mark.parametrize("frees_windows", [False, True])
def test_every_token_reaches_the_host_in_its_kv_s_bytes(dtype: KvCacheDtype, frees_windows: bool) -> None:
    scenario = replace(
        small_scenario(uniform_workload(60, 100, 30)),
        model=small_model().with_kv_dtype(dtype),
        keep_spans=True,
    )
    if frees_windows:
        model = replace(scenario.model, window_tokens=32, full_layers=tuple(range(0, 20, 2)))
        scenario = replace(scenario, model=model)
    result = PipeMaxSystem(scenario, PipeMaxOptions(frees_windows=frees_windows)).simulate()
    stored = sum(
        span.num_bytes for span in result.recording.copy_spans if span.direction is Direction.GPU_TO_HOST
    )
    workload = scenario.workload
    # The last token of a request is given out, never attended to: it has no KV.
    tokens = workload.total_tokens - len(workload)
    value_bytes = 1 if dtype is KvCacheDtype.FP8 else 2
    assert stored == pytest.approx(tokens * 20 * 2 * 8 * 128 * value_bytes)
