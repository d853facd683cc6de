"""Settles the layout of an engine before it starts: what the engine config leaves open is chosen by simulation.

A config that names ``pipeline_parallel_size``, ``tensor_parallel_size`` or ``replicas`` fixes that part. The choice
rests on the profile of the machine (``pipemax.node.machine``) and on the shapes in the checkpoint's configuration.
Where engines with this model measured themselves on this machine before, their calibrations correct the profile. The
reason says which was used. Where profile or shapes are not known, there are replicas of as few GPUs as hold the model,
with stock vLLM, or one engine that shares each layer among all GPUs.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipemax.checkpoint.local_files import model_directory, weight_file_bytes
from pipemax.checkpoint.model_config import max_model_len, read_model_config
from pipemax.checkpoint.model_kinds import refusal_under_pipemax
from pipemax.checkpoint.model_shapes import model_shapes
from pipemax.config import EngineConfig, Policy, Waves
from pipemax.control.times.calibration import Calibration, load_calibration
from pipemax.domain.specs import NodeSpec
from pipemax.domain.tuned import LAYOUT_SAMPLE_ROWS
from pipemax.domain.units import GIB
from pipemax.node.gpus import engine_gpus
from pipemax.node.host_pool_size import HOST_SHARE
from pipemax.node.machine import machine_profile, smallest_gpu_bytes
from pipemax.policy.layout_by_memory import smallest_layout, stock_if_open
from pipemax.policy.layout_choice import FixedLayout, choose_layout
from pipemax.policy.layouts import Layout
from pipemax.policy.profile_correction import corrected_profile, kept_calibrations, measured_layout
from pipemax.policy.row_sample import assumed_lengths, draw_sample

log = logging.getLogger(__name__)

_OF_VLLM = ("pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size", "world_size")
"""Arguments of vLLM's own that divide GPUs: with one of them under ``vllm:`` the layout is the user's."""

DescribeMachine = Callable[[Mapping[str, str], Sequence[str]], NodeSpec]
GpuBytes = Callable[[Mapping[str, str], Sequence[str]], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledLayout:
    """An engine config whose layout is fixed, and why."""

    config: EngineConfig
    reason: str = ""
    """One clause; empty if there was nothing to choose."""


def settle_layout(
    config: EngineConfig,
    environ: Mapping[str, str],
    gpus: Sequence[str],
    *,
    describe_machine: DescribeMachine = machine_profile,
    gpu_bytes: GpuBytes = smallest_gpu_bytes,
) -> SettledLayout:
    """Return the config with the layout that simulations find fastest on ``gpus`` (UUIDs), where it is open.

    Raise ``ValueError`` if the model runs in no layout that the config allows.
    """
    fixed = fixed_layout(config)
    is_open = None in (fixed.replicas, fixed.tensor_parallel, fixed.pipeline_parallel)
    if len(gpus) < 2 or not is_open or _is_users(config):
        return SettledLayout(config=config)
    if config.is_pooling:
        return _one_model_a_gpu(config, len(gpus))
    try:
        node = _node_for(config, describe_machine(environ, gpus))
        model_config = read_model_config(config)
        longest = max_model_len(config, model_config)
        model = model_shapes(
            Path(config.model).name, model_config, dtype=config.dtype, kv_cache_dtype=config.kv_cache_dtype
        )
        calibrations = _calibrations(config, environ, node)
    except ValueError as error:
        return _by_memory(config, len(gpus), gpu_bytes(environ, gpus), str(error))
    if config.calibration is not None:
        fixed = _with_measured(fixed, measured_layout(node, model, calibrations[0]))
    correction = corrected_profile(node, model, calibrations)
    lengths = config.row_lengths or assumed_lengths(longest)
    sample_rows = min(LAYOUT_SAMPLE_ROWS, lengths.rows or LAYOUT_SAMPLE_ROWS)
    choice = choose_layout(
        node if correction is None else correction.node,
        model,
        draw_sample(lengths, sample_rows, max_model_len=longest),
        fixed=fixed,
        policy=stock_if_open(config.policy) if refusal_under_pipemax(model_config) else config.policy,
        max_model_len=longest,
        frees_windows=config.frees_windows,
        has_waves=config.waves is Waves.ON,
        is_whole_table=lengths.rows == sample_rows,
    )
    profile = f"the profile of {node.name}{f' {correction.reason}' if correction else ''}"
    rows = "sampled rows" if config.row_lengths else "rows of assumed lengths"
    reason = f"{choice.reason}, by {profile} and {rows}"
    log.info("layout: %s", reason)
    return SettledLayout(config=config.model_copy(update=_parts(choice.layout)), reason=reason)


def _by_memory(config: EngineConfig, num_gpus: int, gpu_bytes: int | None, unknown: str) -> SettledLayout:
    """Return the layout where ``unknown`` keeps layouts from being simulated.

    One engine takes all GPUs where the bytes of weights or GPUs are not known either: the GPUs share each layer if the
    model's heads allow it, and are stages where PipeMax is asked for by name, which needs them.
    """
    failed = f"for layouts could not be simulated: {unknown}"
    weights = _weight_bytes(config)
    layout = None
    if config.policy is not Policy.PIPEMAX:
        layout = smallest_layout(
            num_gpus=num_gpus,
            gpu_bytes=gpu_bytes or 0,
            memory_fraction=config.gpu_memory_utilization,
            weight_bytes=weights or float("inf"),
            num_heads=_num_heads(config),
            fixed=fixed_layout(config),
        )
    if layout is None:
        reason = f"one engine over all {num_gpus} GPUs, {failed}"
        log.warning("layout: %s", reason)
        return SettledLayout(config=config, reason=reason)
    if weights is None or gpu_bytes is None:
        missing = "the size of the model is not known" if weights is None else "the GPUs' memory is not known"
        rule = f"the most GPUs for a replica, for {missing}; set replicas if fewer hold the model; "
    else:
        rule = f"the fewest GPUs that hold {weights / 1e9:,.1f} GB of weights × 1.2 and a tenth of each GPU for KV, "
    reason = f"{layout} with stock vLLM: {rule}{failed}"
    log.warning("layout: %s", reason)
    update = _parts(layout) | {"policy": stock_if_open(config.policy)}
    return SettledLayout(config=config.model_copy(update=update), reason=reason)


def _weight_bytes(config: EngineConfig) -> float | None:
    """Return the bytes of the weights, of its files or else by its shapes; ``None`` if neither is known."""
    directory = model_directory(config.model, revision=config.revision)
    in_files = None if directory is None else weight_file_bytes(directory)
    if in_files is not None:
        return in_files
    try:
        return model_shapes(config.model, read_model_config(config), dtype=config.dtype).weight_bytes
    except ValueError:
        return None


def _num_heads(config: EngineConfig) -> int | None:
    """Return the attention heads of the model; ``None`` if its configuration does not say."""
    try:
        text = read_model_config(config).get_text_config()
    except ValueError:
        return None
    return getattr(text, "num_attention_heads", None)


def _parts(layout: Layout) -> dict[str, Any]:
    """Return the layout as fields of an engine config."""
    return {
        "replicas": layout.replicas,
        "tensor_parallel_size": layout.tensor_parallel,
        "pipeline_parallel_size": layout.pipeline_parallel,
    }


def _one_model_a_gpu(config: EngineConfig, num_gpus: int) -> SettledLayout:
    """Return the layout of a pooling task: replicas of a whole model, because most such models fit one GPU."""
    engine_gpus = (config.tensor_parallel_size or 1) * (config.pipeline_parallel_size or 1)
    parts = {
        "replicas": config.replicas or max(1, num_gpus // engine_gpus),
        "tensor_parallel_size": config.tensor_parallel_size or 1,
        "pipeline_parallel_size": config.pipeline_parallel_size or 1,
    }
    reason = (
        f"{parts['replicas']} replicas of {engine_gpus} GPUs each, for task {config.task} is not simulated"
    )
    log.info("layout: %s", reason)
    return SettledLayout(config=config.model_copy(update=parts), reason=reason)


def _calibrations(config: EngineConfig, environ: Mapping[str, str], node: NodeSpec) -> list[Calibration]:
    """Return the calibration that the config names, otherwise those that this machine keeps of the model."""
    if config.calibration is not None:
        return [load_calibration(config.calibration)]
    return kept_calibrations(environ, config.model, node.gpu.name)


def _with_measured(fixed: FixedLayout, measured: Layout | None) -> FixedLayout:
    """Return the layout that a calibration named in the config is of, where the config leaves it open."""
    if measured is None:
        return fixed
    return replace(
        fixed,
        tensor_parallel=fixed.tensor_parallel or measured.tensor_parallel,
        pipeline_parallel=fixed.pipeline_parallel or measured.pipeline_parallel,
    )


def settled_config(config: EngineConfig) -> EngineConfig:
    """Return the config with the layout of this machine's GPUs settled. ``ValueError`` as ``settle_layout``."""
    return settle_layout(config, os.environ, engine_gpus(os.environ)).config


def fixed_layout(config: EngineConfig) -> FixedLayout:
    """Return the parts of the layout that the config itself says."""
    return FixedLayout(
        replicas=config.replicas,
        tensor_parallel=config.tensor_parallel_size,
        pipeline_parallel=config.pipeline_parallel_size,
    )


def _is_users(config: EngineConfig) -> bool:
    return any(name in config.vllm_arguments for name in _OF_VLLM)


def _node_for(config: EngineConfig, node: NodeSpec) -> NodeSpec:
    """Return the machine as far as the config lets the engine use it."""
    host_share = HOST_SHARE
    if config.host_kv_gib is not None:
        host_share = min(1.0, config.host_kv_gib * GIB * node.num_gpus / node.host_memory_bytes)
    return replace(node, gpu_memory_fraction=config.gpu_memory_utilization, host_kv_fraction=host_share)
