"""Find the calibration that an engine starts from: its config's file, otherwise what this machine measured before.

Measurements are kept under ``$XDG_CACHE_HOME/pipemax/calibrations`` (``~/.cache`` by default), keyed by everything
that step times depend on: model, device, cores, stages, types, block size, vLLM's version. It is a cache: delete it
freely.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipemax.checkpoint.adapters import max_rank
from pipemax.checkpoint.fingerprint import fingerprint
from pipemax.checkpoint.model_kinds import window_and_full_layers
from pipemax.config import EngineConfig
from pipemax.control.times.calibration import Calibration, load_calibration, save_calibration
from pipemax.domain.kv_groups import WHOLE_KV, KvGroups, group_layers
from pipemax.domain.specs import KvCapacity
from pipemax.node.kept_files import CALIBRATIONS, kept_directory, kept_name
from pipemax.vllm_ext.seam.vllm_types import (
    VLLM_VERSION,
    VllmConfig,
    current_platform,
    get_pp_indices,
    kv_cache_dtype_str_to_dtype,
)

log = logging.getLogger(__name__)


def known_calibration(config: EngineConfig, vllm_config: VllmConfig) -> Calibration | None:
    """Return the calibration, ``None`` if there is none. ``ValueError`` if its file is of another engine."""
    path = config.calibration or cache_path(config, vllm_config)
    try:
        calibration = load_calibration(path)
    except (OSError, ValueError) as error:
        if config.calibration is not None:
            raise ValueError(f"calibration {path}: {error}") from error
        if not isinstance(error, FileNotFoundError):
            log.warning("a calibration measured before cannot be read, and is measured again: %s", error)
        return None
    measured = [stage.kv_bytes_per_token for stage in calibration.stages]
    expected = kv_bytes_per_token(vllm_config)
    if measured != expected:
        raise ValueError(
            f"calibration {path} is of stages with {measured} bytes of KV per token, this engine's "
            f"have {expected}: it was measured for another model, dtype, KV dtype or number of stages"
        )
    return calibration


def remember_calibration(config: EngineConfig, vllm_config: VllmConfig, calibration: Calibration) -> None:
    """Keep the calibration for the next start. A cache that cannot be written only costs a warning."""
    path = cache_path(config, vllm_config)
    try:
        write_cache_file(path, lambda draft: save_calibration(draft, calibration))
    except OSError as error:
        log.warning("the calibration cannot be kept in %s, so the next start measures again: %s", path, error)
    else:
        log.info("the calibration is kept in %s", path)


def kv_bytes_per_token(vllm_config: VllmConfig) -> list[int]:
    """Return the bytes of KV per token of a block, by stage: of all layers, or of those that have room in a block."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    parts = 1 if model.use_mla else 2  # a latent vector, or keys and values
    values_per_layer = parts * model.get_num_kv_heads(parallel) * model.get_head_size()
    num_layers = model.get_total_num_hidden_layers()
    windows = window_and_full_layers(model.hf_config, num_layers) if frees_windows(vllm_config) else None
    grouped = group_layers(num_layers, windows[1]) if windows else None
    value_bytes = values_per_layer * kv_value_bytes(vllm_config)
    return [
        value_bytes * (grouped.most_layers(first, end) if grouped else end - first)
        for first, end in layers_of_stages(vllm_config)
    ]


def layers_of_stages(vllm_config: VllmConfig) -> list[tuple[int, int]]:
    """Return the layers ``[first, end)`` of each stage."""
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    return [get_pp_indices(num_layers, stage, num_stages) for stage in range(num_stages)]


def frees_windows(vllm_config: VllmConfig) -> bool:
    """Return whether PipeMax frees what has left the windows of the model's layers."""
    return block_tables(vllm_config).window > 0


def block_tables(vllm_config: VllmConfig) -> KvGroups:
    """Return the block tables of a request under PipeMax: one, unless it frees what has left windows."""
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager or vllm_config.kv_transfer_config is None:
        return WHOLE_KV
    model = vllm_config.model_config
    num_layers = model.get_total_num_hidden_layers()
    windows = window_and_full_layers(model.hf_config, num_layers)
    return group_layers(num_layers, windows[1]).tables(windows[0]) if windows else WHOLE_KV


def windowed_capacity(
    vllm_config: VllmConfig, whole: KvCapacity, *, keeps_gpu_blocks: bool = False
) -> KvCapacity | None:
    """Return what the same memory holds if windows are freed; None for a model without sliding windows.

    ``keeps_gpu_blocks``: the number of blocks is given.
    """
    model = vllm_config.model_config
    windows = window_and_full_layers(model.hf_config, model.get_total_num_hidden_layers())
    if windows is None:
        return None
    return whole.with_freed_windows(
        layers_of_stages(vllm_config),
        windows[1],
        window_tokens=windows[0],
        keeps_gpu_blocks=keeps_gpu_blocks,
    )


def kv_value_bytes(vllm_config: VllmConfig) -> int:
    """Return the bytes of one value of KV."""
    name = vllm_config.cache_config.cache_dtype
    if name == "auto" and getattr(vllm_config.quant_config, "kv_cache_scheme", None) is not None:
        name = "fp8"  # which vLLM's attention takes once the model is loaded
    return int(kv_cache_dtype_str_to_dtype(name, vllm_config.model_config).itemsize)


def cache_path(config: EngineConfig, vllm_config: VllmConfig) -> Path:
    """Return where this engine's calibration is kept, if it was measured."""
    return cache_file(CALIBRATIONS, config.model, engine_facts(config, vllm_config), suffix=".yaml")


def cache_file(directory: str, model: str, facts: dict[str, Any], *, suffix: str) -> Path:
    """Return the file in the cache that is named after the model and these facts."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return kept_directory(os.environ, directory) / f"{kept_name(model)}--{digest}{suffix}"


def write_cache_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` make the file under another name, and put it in place whole: two engines may start at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    write(draft)
    draft.replace(path)


def model_name(config: EngineConfig) -> str:
    """Return the last part of the checkpoint's path or hub name."""
    return Path(config.model).name


def device_name() -> str:
    """Return the GPU's name, or the CPU's name and the number of cores that this process may use."""
    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    cores = len(os.sched_getaffinity(0))
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {cores} cores"
    return f"CPU, {cores} cores"


def engine_facts(config: EngineConfig, vllm_config: VllmConfig) -> dict[str, Any]:
    """Return everything that step times depend on, as plain values."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    # Named only if it is not the default, so that what was measured before there was a choice is still found.
    windows = {"windows": "freed"} if frees_windows(vllm_config) else {}
    adapters = {"lora": [len(config.lora), max_rank(config)]} if config.lora else {}
    overrides = (
        {"hf_overrides": config.vllm_arguments["hf_overrides"]}
        if config.vllm_arguments.get("hf_overrides")
        else {}
    )
    revision = getattr(model.hf_config, "_commit_hash", None) or config.revision
    return {
        "model": fingerprint(config.model, resolved_revision=revision),
        "device": device_name(),
        "stages": parallel.pipeline_parallel_size,
        "tensor": parallel.tensor_parallel_size,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_dtype": str(cache.cache_dtype),
        # Workers choose the default when the model is loaded, and this is asked for before and after.
        "block_tokens": cache.block_size if cache.user_specified_block_size else None,
        "eager": model.enforce_eager,
        "v2_runner": bool(vllm_config.use_v2_model_runner),
        "asynchronous": bool(vllm_config.scheduler_config.async_scheduling),
        "vllm": VLLM_VERSION,
        "torch": torch.__version__,
        **windows,
        **adapters,
        **overrides,
    }
