"""Forecast an engine under PipeMax before it starts: whether it can run, and what the simulator needs to know."""

from dataclasses import dataclass

from pipemax.config import EngineConfig, Policy
from pipemax.control.times.calibration import Calibration
from pipemax.domain.specs import KvCapacity
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.vllm_ext.launch.known_calibration import (
    block_tables,
    known_calibration,
    kv_bytes_per_token,
    windowed_capacity,
)
from pipemax.vllm_ext.launch.known_check import kept_check, known_check
from pipemax.vllm_ext.launch.vllm_config import launch_environment, make_vllm_config
from pipemax.vllm_ext.runtime_settings import RuntimeSettings
from pipemax.vllm_ext.seam.vllm_types import VllmConfig, current_platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The facts known of an engine that has not started yet."""

    refusal: str = ""
    """Why it cannot run under PipeMax, or ``policy: auto`` must not choose it; empty if it may."""
    engine: MeasuredEngine | None = None
    """None if it was never calibrated, or if only its start tells how many KV blocks a GPU holds."""
    num_stages: int = 1


def forecast(config: EngineConfig) -> Forecast:
    """Forecast an engine of ``config``, whose policy is pipemax. Loads no weights."""
    try:
        with launch_environment(config):
            vllm_config = make_vllm_config(config)
        calibration = known_calibration(config, vllm_config)
        check = known_check(config, vllm_config) if config.check_at_start else None
    except ValueError as error:
        return Forecast(refusal=str(error).removesuffix(". Use policy: vllm"))
    if check is not None and (doubt := check.auto_refusal()):
        return Forecast(refusal=doubt)
    gpu_blocks = expected_gpu_blocks(vllm_config)
    engine = None
    if calibration is not None and gpu_blocks is not None:
        engine = measured_engine(vllm_config, calibration, gpu_blocks=gpu_blocks)
    return Forecast(engine=engine, num_stages=vllm_config.parallel_config.pipeline_parallel_size)


def measures_at_start(config: EngineConfig) -> bool:
    """Return whether an engine of this config would check or measure the machine when it starts. Loads no weights."""
    if config.policy is Policy.VLLM or config.is_pooling:
        return False
    pipemax = config.model_copy(update={"policy": Policy.PIPEMAX})
    try:
        with launch_environment(pipemax):
            vllm_config = make_vllm_config(pipemax)
        calibration = known_calibration(pipemax, vllm_config)
        is_checked = not config.check_at_start or kept_check(pipemax, vllm_config) is not None
    except ValueError:
        return False  # it cannot run under PipeMax
    if config.policy is Policy.AUTO and vllm_config.parallel_config.pipeline_parallel_size == 1:
        return False  # it takes stock vLLM
    return (calibration is None and config.calibrate_at_start_s > 0) or not is_checked


def expected_gpu_blocks(vllm_config: VllmConfig) -> int | None:
    """Return how many KV blocks vLLM will have; ``None`` if it must look at a GPU's memory for that."""
    cache = vllm_config.cache_config
    if cache.num_gpu_blocks_override is not None:
        return int(cache.num_gpu_blocks_override)
    if not current_platform.is_cpu() or cache.kv_cache_memory_bytes is None:
        return None
    block_bytes = max(kv_bytes_per_token(vllm_config)) * cache.block_size
    return int(cache.kv_cache_memory_bytes // block_bytes)


def measured_engine(vllm_config: VllmConfig, calibration: Calibration, *, gpu_blocks: int) -> MeasuredEngine:
    """Return what the simulator needs to know. vLLM keeps one of ``gpu_blocks`` as its null block."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    settings = runtime_settings(vllm_config)
    capacity = KvCapacity(
        block_tokens=cache.block_size,
        gpu_blocks=gpu_blocks - 1,
        host_blocks=settings.host_blocks(cache.block_size),
        groups=block_tables(vllm_config),
    )
    windowed = None
    if not capacity.groups.window:
        is_given = cache.num_gpu_blocks_override is not None
        windowed = windowed_capacity(vllm_config, capacity, keeps_gpu_blocks=is_given)
    return MeasuredEngine(
        stages=calibration.stages,
        round_trip_s=calibration.round_trip_s,
        capacity=capacity,
        windowed_capacity=windowed,
        num_batches=settings.num_batches,
        wave_groups=settings.wave_groups,
        max_num_seqs=settings.max_num_seqs,  # vLLM's own number may be that of the runner's slots
        max_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        times_are_a_guess=calibration.is_guess,
    )


def runtime_settings(vllm_config: VllmConfig) -> RuntimeSettings:
    """Return the settings of a config that was made for policy pipemax."""
    assert vllm_config.kv_transfer_config is not None, "only an engine under policy pipemax times its steps"
    return RuntimeSettings.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
