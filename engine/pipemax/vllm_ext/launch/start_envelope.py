"""Start stock vLLM on GPUs for steps that fit the job's rows: ``pipemax.domain.envelope``, in vLLM's arguments.

Nothing changes without sampled rows, without GPUs, where the figures of the GPUs or the shapes of the model are not
known, and where the user's arguments decide. What a user sets is never exceeded.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipemax.checkpoint.model_config import read_model_config
from pipemax.checkpoint.model_shapes import model_shapes
from pipemax.config import EngineConfig, Policy, RowLengths
from pipemax.domain.envelope import RowShape, StartEnvelope, graph_sizes, plan_envelope
from pipemax.domain.specs import NodeSpec, Parallelism
from pipemax.domain.step_records import StepLimits
from pipemax.node.gpus import engine_gpus, pipeline_parallel_size
from pipemax.node.machine import machine_profile
from pipemax.vllm_ext.seam.version import installed_lacks_for_tuning
from pipemax.vllm_ext.seam.vllm_types import EngineArgs, UsageContext, current_platform

log = logging.getLogger(__name__)

_DECIDED_BY_USER = (
    *("performance_mode", "speculative_config", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
    *("max_num_active_seqs", "enable_chunked_prefill", "data_parallel_size", "kv_transfer_config"),
    "scheduler_cls",
)
"""With one of these, vLLM's limits or the KV cache are not what the formula takes them for."""
_GRAPHS_OF_USER = ("cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config")
_USUAL_GRAPH_ROWS = 512
_BLACKWELL = 100
"""The family whose graphs vLLM captures up to 1,024 rows by itself."""
_FEWER_ROWS = re.compile(r"exceeds available Mamba cache blocks \((\d+)\)")

DescribeMachine = Callable[[Mapping[str, str], Sequence[str]], NodeSpec]


def start_envelope(
    config: EngineConfig, *, describe_machine: DescribeMachine = machine_profile
) -> StartEnvelope | None:
    """Return what an engine of stock vLLM is started for; ``None`` if that is left to vLLM.

    This calls ``nvidia-smi`` and reads the model's files.
    """
    arguments, lengths = config.vllm_arguments, config.row_lengths
    if config.policy is Policy.PIPEMAX or config.is_pooling or lengths is None or not config.tune:
        return None
    if current_platform.is_cpu() or not (gpus := engine_gpus(os.environ)):
        return None
    if installed_lacks_for_tuning() or any(arguments.get(name) is not None for name in _DECIDED_BY_USER):
        return None  # vLLM would run with the largest limits all the time
    stages = pipeline_parallel_size(config, num_gpus=len(gpus))
    default, keeps_rows, keeps_tokens = _default_limits(config, stages * config.tensor_degree)
    try:
        node = describe_machine(os.environ, gpus)
        model_config = read_model_config(config)
        model = model_shapes(
            config.model, model_config, dtype=config.dtype, kv_cache_dtype=config.kv_cache_dtype
        )
        return plan_envelope(
            replace(node, gpu_memory_fraction=config.vllm_argument("gpu_memory_utilization")),
            model,
            Parallelism(pipeline=stages, tensor=config.tensor_degree),
            _mean_row(config, lengths),
            default,
            keeps_rows=keeps_rows,
            # vLLM itself looks for the tokens of a step that an image needs.
            keeps_tokens=keeps_tokens or hasattr(model_config, "vision_config"),
        )
    except ValueError as error:
        log.info("the limits of steps are vLLM's default, because no formula tells better ones: %s", error)
        return None


def envelope_arguments(config: EngineConfig, envelope: StartEnvelope | None) -> dict[str, Any]:
    """Return the arguments of vLLM that start it for this envelope, and log what they cost."""
    if envelope is None:
        return {}
    ceiling, begin = envelope.ceiling, envelope.begin
    values: dict[str, Any] = {}
    if ceiling.running_rows != begin.running_rows:
        values["max_num_seqs"] = ceiling.running_rows
    if ceiling.step_tokens != begin.step_tokens:
        values["max_num_batched_tokens"] = ceiling.step_tokens
    if envelope.graph_rows > _USUAL_GRAPH_ROWS and _graphs_are_open(config):
        values["cudagraph_capture_sizes"] = graph_sizes(envelope.graph_rows)
    if values:
        log.info(
            "vLLM starts for steps of up to %s tokens and %s rows (begins with %s and %s), and CUDA graphs of up to "
            "%s rows: the KV cache holds about %s rows of this job. That takes about %.1f GB of each GPU, besides the "
            "graphs",
            *(
                f"{n:,}"
                for n in (ceiling.step_tokens, ceiling.running_rows, begin.step_tokens, begin.running_rows)
            ),
            f"{max(values.get('cudagraph_capture_sizes', [_USUAL_GRAPH_ROWS])):,}",
            f"{envelope.rows_of_kv:,.0f}",
            envelope.cost_bytes / 1e9,
        )
    return values


def with_fitting_rows(config: EngineConfig, failure: str) -> EngineConfig | None:
    """Return the config with as many rows as there are Mamba blocks, if a start failed for that; otherwise ``None``.

    ``failure`` is why it failed.
    """
    match = _FEWER_ROWS.search(failure)
    if match is None or int(match[1]) < 1:
        return None
    of_vllm = {
        name: {key: value for key, value in getattr(config, name).items() if key != "max_num_seqs"}
        for name in ("vllm", "vllm_speed")
    }
    return config.model_copy(update={**of_vllm, "max_num_seqs": int(match[1])})


def _default_limits(config: EngineConfig, world_size: int) -> tuple[StepLimits, bool, bool]:
    """Return the limits without an envelope, and whether rows and tokens are the user's own."""
    tokens, rows = (
        of_contexts[UsageContext.LLM_CLASS] for of_contexts in EngineArgs.get_batch_defaults(world_size)
    )
    own_rows = config.vllm_argument("max_num_seqs")
    own_tokens = config.vllm_argument("max_num_batched_tokens")
    step_tokens = own_tokens or tokens
    default = StepLimits(step_tokens=step_tokens, running_rows=own_rows or min(rows, step_tokens))
    return default, own_rows is not None, own_tokens is not None


def _mean_row(config: EngineConfig, lengths: RowLengths) -> RowShape:
    shared = lengths.shared_prefix_tokens if config.enable_prefix_caching else 0
    prompt_tokens = sum(lengths.prompt_tokens) / len(lengths.prompt_tokens)
    return RowShape(
        prompt_tokens=max(1.0, prompt_tokens - shared), output_tokens=lengths.expected_output_tokens
    )


def _graphs_are_open(config: EngineConfig) -> bool:
    is_users = any(config.vllm_arguments.get(name) is not None for name in _GRAPHS_OF_USER)
    is_eager = bool(config.vllm_argument("enforce_eager"))
    return not (is_users or is_eager or current_platform.is_device_capability_family(_BLACKWELL))
