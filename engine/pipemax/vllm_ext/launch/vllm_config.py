"""Derive a vLLM engine's arguments and environment from an EngineConfig."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from pipemax.checkpoint.adapters import max_rank
from pipemax.checkpoint.model_kinds import has_windows
from pipemax.config import BatchingChoice, EngineConfig, Policy, Waves, require_free_connector
from pipemax.control.controller_config import usual_num_batches, waves_refusal
from pipemax.domain.envelope import StartEnvelope
from pipemax.domain.specs import KvCapacity
from pipemax.domain.tuned import WAVE_GROUPS
from pipemax.domain.units import GIB
from pipemax.node.failure_records import FAILURES_VARIABLE
from pipemax.node.gpus import pipeline_parallel_size
from pipemax.node.host_pool_size import host_pool_bytes
from pipemax.node.lifetime import SERVER_IDENTITY_VARIABLE
from pipemax.transfer.cuda.pinned_pool import require_pools
from pipemax.transfer.host_memory import available_host_bytes
from pipemax.vllm_ext.compat import check_model
from pipemax.vllm_ext.launch.first_guess import guess_stage
from pipemax.vllm_ext.launch.known_calibration import (
    block_tables,
    frees_windows,
    known_calibration,
    kv_bytes_per_token,
    kv_value_bytes,
    windowed_capacity,
)
from pipemax.vllm_ext.launch.latent_kernels import choose_latent_kernels
from pipemax.vllm_ext.launch.start_envelope import envelope_arguments
from pipemax.vllm_ext.launch.structured_outputs import make_structured_outputs, structured_outputs
from pipemax.vllm_ext.launch.tunable_scheduler import fit_tunable_scheduler
from pipemax.vllm_ext.runtime_settings import FOLLOWS_LAYERS, RuntimeSettings
from pipemax.vllm_ext.seam.version import check_version
from pipemax.vllm_ext.seam.vllm_types import (
    VLLM_VERSION,
    EngineArgs,
    KVTransferConfig,
    ReasoningParserManager,
    StructuredOutputsConfig,
    UsageContext,
    VllmConfig,
    current_platform,
)

log = logging.getLogger(__name__)

KV_LAYOUT = "BLHNC"
"""Block-first: see ``pipemax.transfer.layout``."""
CONNECTOR = "PipeMaxConnector"
_RESIDENT_TOKENS = 512
"""Tokens that a request with KV on the GPU is assumed to have, for the number of the V2 runner's slots."""
_TOKEN_ID_BYTES = 4


def make_vllm_config(config: EngineConfig, envelope: StartEnvelope | None = None) -> VllmConfig:
    """Make vLLM's config, of stock vLLM for an ``envelope``. ``ValueError``: it does not fit machine, vLLM or model."""
    if config.policy is Policy.PIPEMAX:
        check_version()
        require_free_connector(config.vllm_arguments)  # again: under policy auto it was free to name one
    args = engine_args(config, envelope)
    if config.policy is Policy.PIPEMAX:
        choose_latent_kernels(args)
    # vLLM takes the defaults of max_num_seqs and max_num_batched_tokens from tables that lack most contexts.
    vllm_config = args.create_engine_config(UsageContext.LLM_CLASS)
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    if num_stages > num_layers:
        raise ValueError(
            f"pipeline_parallel_size {num_stages} is more than the {num_layers} layers of {config.model!r}: each stage "
            "needs one"
        )
    if config.policy is Policy.PIPEMAX:
        _refuse_embeddings_of_media(vllm_config)
        check_model(vllm_config, num_adapters=len(config.lora))
        _free_windows_where_it_pays(config, vllm_config)
        _check_freed_windows(config, vllm_config)
        _tell_of_model(config, vllm_config)
        _check_mixed_steps(config, vllm_config)
        _check_whole_prompts(config, vllm_config)
        settings = _runtime_settings(config, vllm_config)
        _check_waves(settings, vllm_config)
        assert vllm_config.kv_transfer_config is not None
        fit_scheduler(vllm_config, settings)
        vllm_config.kv_transfer_config.kv_connector_extra_config.update(settings.to_extra_config())
    else:
        fit_tunable_scheduler(vllm_config)
    return vllm_config


def _refuse_embeddings_of_media(vllm_config: VllmConfig) -> None:
    """Leave the text part of a multimodal model without its processor of images, which it would start with.

    To vLLM, an engine with a KV connector is one that other engines send embeddings of images to.
    """
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is not None:
        multimodal.enable_mm_embeds = multimodal.allow_missing_mm_embeddings = False


def _tell_of_model(config: EngineConfig, vllm_config: VllmConfig) -> None:
    """Log what policy pipemax changes about the model."""
    model = vllm_config.model_config
    if frees_windows(vllm_config):
        log.info("policy pipemax frees the KV of %s that has left the windows of its layers", config.model)
    elif has_windows(model.hf_config):
        log.info(
            "policy pipemax keeps the whole KV of the layers of %s that attend to a window of tokens "
            "(disable_hybrid_kv_cache_manager): they take as much memory as layers with full attention",
            config.model,
        )
    if model.is_multimodal_model:
        log.info("policy pipemax runs the text part of %s only (language_model_only)", config.model)


def _free_windows_where_it_pays(config: EngineConfig, vllm_config: VllmConfig) -> None:
    """Free the KV that has left windows if no prefixes are to be shared, and far more rows fit then.

    ``vllm.disable_hybrid_kv_cache_manager`` in the config settles it.
    """
    model, lengths = vllm_config.model_config, config.row_lengths
    if config.frees_windows is not None or lengths is None or model.attention_chunk_size is not None:
        return
    tokens = min(lengths.tokens_per_row, model.max_model_len)
    # Any number of blocks does: what counts is how many rows the same memory holds.
    whole = KvCapacity(block_tokens=vllm_config.cache_config.block_size, gpu_blocks=1 << 20, host_blocks=1)
    freed = windowed_capacity(vllm_config, whole)
    if freed is not None and freed.pays_over(whole, tokens):
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = False


def _check_freed_windows(config: EngineConfig, vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` for settings that do not go together with KV that leaves windows."""
    if not frees_windows(vllm_config):
        return
    if vllm_config.cache_config.enable_prefix_caching:
        raise ValueError(
            "policy pipemax shares no prefixes where it frees the KV that has left windows (vllm: "
            "{disable_hybrid_kv_cache_manager: false}): set enable_prefix_caching: false as well"
        )


def _check_mixed_steps(config: EngineConfig, vllm_config: VllmConfig) -> None:
    most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    if config.mixed_step_tokens is not None and config.mixed_step_tokens > most_tokens:
        raise ValueError(
            f"mixed_step_tokens {config.mixed_step_tokens} is more than the {most_tokens} tokens of any step "
            "(max_num_batched_tokens)"
        )


def _check_whole_prompts(config: EngineConfig, vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` if steps may be mixed in an engine that computes each prompt in one step."""
    if vllm_config.scheduler_config.enable_chunked_prefill or config.batching is BatchingChoice.SEPARATED:
        return
    reason = (
        "latent attention (MLA) on a CPU"
        if vllm_config.model_config.use_mla
        else "enable_chunked_prefill: false"
    )
    raise ValueError(
        f"{reason} computes each prompt in one step, which mixed steps may be too short for: set batching: separated"
    )


def _check_waves(settings: RuntimeSettings, vllm_config: VllmConfig) -> None:
    """Raise ``ValueError`` where waves are on and no batch can be overwritten while it computes."""
    if settings.wave_groups is None:
        return
    if (refusal := waves_refusal(settings.num_batches, block_tables(vllm_config))) is not None:
        raise ValueError(f"waves: on is not possible here: they {refusal}. Leave waves out")


def fit_scheduler(
    vllm_config: VllmConfig, settings: RuntimeSettings, *, gpu_bytes: float | None = None
) -> None:
    """Set our scheduler, over the one of vLLM's two that the config and the platform lead to.

    ``gpu_bytes`` is the memory that an engine may take of each GPU, where that is not one of this machine.
    """
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls is None:
        name = "PipeMaxAsyncScheduler" if scheduler.async_scheduling else "PipeMaxScheduler"
        scheduler.scheduler_cls = f"pipemax.vllm_ext.scheduler.scheduler.{name}"
    if vllm_config.use_v2_model_runner:
        # To vLLM this is both the maximum of requests in one step and the runner's slots. All batches need slots.
        scheduler.max_num_seqs = _num_slots(vllm_config, settings.num_batches, gpu_bytes)


def _num_slots(vllm_config: VllmConfig, num_batches: int, gpu_bytes: float | None = None) -> int:
    """Return how many requests the V2 runner keeps the state of: about as many as can have their KV on the GPU at once.

    Each slot costs the last stage counts of the whole vocabulary, as much as a dozen tokens of KV, and every stage has
    the KV blocks of the one with the fewest. Where requests are shorter than assumed, the slots limit the batches; one
    batch always finds as many as it may have requests.
    """
    max_num_seqs, cache = vllm_config.scheduler_config.max_num_seqs, vllm_config.cache_config
    token_bytes = max(kv_bytes_per_token(vllm_config))
    if gpu_bytes is None and cache.num_gpu_blocks_override is not None:
        most_tokens = cache.num_gpu_blocks_override * cache.block_size
    elif gpu_bytes is None and cache.kv_cache_memory_bytes is not None:
        most_tokens = cache.kv_cache_memory_bytes // token_bytes
    else:  # weights take their part, but how much is known once they are loaded
        if gpu_bytes is None:
            gpu_bytes = cache.gpu_memory_utilization * current_platform.get_device_total_memory()
        most_tokens = int(gpu_bytes / token_bytes)
    return max(max_num_seqs, min(num_batches * max_num_seqs, most_tokens // _RESIDENT_TOKENS))


def _pinned_by_worker(vllm_config: VllmConfig, num_batches: int) -> int:
    """Return the bytes of host memory that a GPU's worker pins besides its pool, as far as they count."""
    if not vllm_config.use_v2_model_runner:
        return 0
    # all_token_ids of vLLM's RequestState
    return _num_slots(vllm_config, num_batches) * vllm_config.model_config.max_model_len * _TOKEN_ID_BYTES


def engine_args(config: EngineConfig, envelope: StartEnvelope | None = None) -> EngineArgs:
    """Return vLLM's arguments. ``ValueError`` if the config does not fit this machine or this vLLM."""
    num_gpus = 0 if current_platform.is_cpu() else current_platform.device_count()
    num_stages = pipeline_parallel_size(config, num_gpus=num_gpus)
    values: dict[str, Any] = {
        "model": config.model,
        "revision": config.revision,
        "tokenizer": config.tokenizer,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype.value,
        "quantization": config.quantization,
        "pipeline_parallel_size": num_stages,
        "tensor_parallel_size": config.tensor_degree,
        "max_model_len": config.max_model_len,
        "enable_prefix_caching": config.enable_prefix_caching,
        "trust_remote_code": config.trust_remote_code,
        "seed": config.seed,
        # Compiling takes minutes on a CPU and gains little there.
        "enforce_eager": num_gpus == 0 if config.enforce_eager is None else config.enforce_eager,
    }
    if config.is_pooling:
        values["runner"] = "pooling"
        # vLLM knows which pooling models may take a prompt's beginning from its cache.
        values["enable_prefix_caching"] = None if config.enable_prefix_caching else False
    if num_gpus:
        values["gpu_memory_utilization"] = config.gpu_memory_utilization
    else:
        values["kv_cache_memory_bytes"] = int(config.cpu_kv_gib * GIB)
        values["worker_cls"] = "pipemax.vllm_ext.worker.cpu_worker.CpuStageWorker"
    if config.lora:
        # Each has a place, so that no step must wait for one. Next to rows with adapters, vLLM's kernels for CPUs apply
        # the last place's adapter to rows without one: there it must stay empty.
        num_places = len(config.lora) + (num_gpus == 0)
        values |= {"enable_lora": True, "max_loras": num_places, "max_lora_rank": max_rank(config)}
    if config.policy is Policy.PIPEMAX:
        values |= _pipemax_args(config, num_gpus=num_gpus)
    else:
        # Rows have no video and no sound, and images seldom come twice: each cache would take 4 GiB of host memory.
        values["limit_mm_per_prompt"] = {"image": config.images.max_per_row, "video": 0, "audio": 0}
        values["mm_processor_cache_gb"] = 0
        values |= envelope_arguments(config, envelope)
    for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "reasoning_parser"):
        if (value := getattr(config, name)) is not None:
            values[name] = value
    _load_reasoning_parser(config)
    arguments = dict(config.vllm_arguments)
    if settings := structured_outputs(config):
        arguments["structured_outputs_config"] = make_structured_outputs(StructuredOutputsConfig, settings)
    try:
        return EngineArgs(**{**values, **arguments})
    except TypeError as error:
        raise ValueError(
            f"vllm: {error} (these are the arguments of vLLM {VLLM_VERSION}'s EngineArgs)"
        ) from None  # the one cause: Python's own words do not name the config's field


def _load_reasoning_parser(config: EngineConfig) -> None:
    """Have vLLM know a parser that comes as a plugin. ``ValueError`` if it knows no parser of the config's name."""
    name = config.vllm_argument("reasoning_parser")
    if not name:
        return
    if plugin := config.vllm_arguments.get("reasoning_parser_plugin"):
        ReasoningParserManager.import_reasoning_parser(plugin)
    known = ReasoningParserManager.list_registered()
    if name not in known:
        raise ValueError(f"reasoning_parser {name!r} is unknown to vLLM; it knows {', '.join(known)}")


def _pipemax_args(config: EngineConfig, *, num_gpus: int) -> dict[str, Any]:
    worker = "gpu_worker.PipeMaxGpuWorker" if num_gpus else "cpu_worker.PipeMaxCpuWorker"
    return {
        "worker_cls": f"pipemax.vllm_ext.worker.{worker}",
        "disable_hybrid_kv_cache_manager": True,
        "language_model_only": True,
        "kv_transfer_config": KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_connector_module_path="pipemax.vllm_ext.worker.connector",
            kv_role="kv_both",
            kv_connector_extra_config={FOLLOWS_LAYERS: True} if config.waves is Waves.ON else {},
        ),
    }


def default_num_batches(vllm_config: VllmConfig) -> int:
    """Return the number of decode batches of an engine whose config does not give one."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    return usual_num_batches(num_stages, vllm_config.max_concurrent_batches)


def _runtime_settings(config: EngineConfig, vllm_config: VllmConfig) -> RuntimeSettings:
    kv_bytes = kv_bytes_per_token(vllm_config)
    num_workers = vllm_config.parallel_config.world_size
    has_gpus = not current_platform.is_cpu()
    host_bytes = host_pool_bytes(config, num_workers=num_workers, has_gpus=has_gpus)
    num_batches = config.num_batches or default_num_batches(vllm_config)
    if has_gpus:
        other_bytes = _pinned_by_worker(vllm_config, num_batches)
        require_pools(host_bytes, num_workers, available_host_bytes(), other_pinned_bytes=other_bytes)
    host_kv_tokens = int(host_bytes / max(kv_bytes))
    block_tokens, longest = vllm_config.cache_config.block_size, vllm_config.model_config.max_model_len
    num_needed = block_tables(vllm_config).prompt_blocks(longest, block_tokens, in_flight_tokens=0)
    if host_kv_tokens < num_needed * block_tokens:
        raise ValueError(
            f"host_kv_gib {host_bytes / GIB:.3g} holds {host_kv_tokens:,} tokens of {max(kv_bytes):,} bytes; "
            f"one request of max_model_len {longest} needs {num_needed} blocks of {block_tokens} tokens"
        )
    calibration = known_calibration(config, vllm_config)
    if calibration is not None:
        stages = list(calibration.stages)
    else:
        value_bytes = kv_value_bytes(vllm_config)
        stages = [
            guess_stage(of_stage, kv_value_bytes=value_bytes, is_cpu=current_platform.is_cpu())
            for of_stage in kv_bytes
        ]
    return RuntimeSettings(
        host_kv_tokens=host_kv_tokens,
        num_batches=num_batches,
        stages=tuple(stages),
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        stores_tokens=not current_platform.is_cpu(),
        whole_prompts=not vllm_config.scheduler_config.enable_chunked_prefill,
        batching=config.batching.at_start,
        mixed_step_tokens=config.mixed_step_tokens,
        wave_groups=WAVE_GROUPS if config.waves is Waves.ON else None,
    )


@contextmanager
def launch_environment(config: EngineConfig, *, failures: str | None = None) -> Iterator[None]:
    """Set the environment that vLLM's processes read while they start; restore it afterwards.

    ``failures`` is the file in which they record why they fail.
    """
    # Usage reports would leave the user's network, and in a closed network their thread waits.
    values = {"VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1")}
    if SERVER_IDENTITY_VARIABLE in os.environ:
        # A server has threads (gRPC's among them): a forked child would inherit their locks, held. Nor would vLLM
        # load its plugins again in a forked child, and then nothing would end it with the server.
        values["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # All workers are on this machine. Torch's and NCCL's ports ask nobody who they are, and would otherwise be open at
    # the address that the machine's name stands for, which other machines reach.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        values[name] = os.environ.get(name, "lo")
    if config.policy is Policy.PIPEMAX:
        values["VLLM_KV_CACHE_LAYOUT"] = KV_LAYOUT
    num_workers = (config.pipeline_parallel_size or 1) * config.tensor_degree
    if current_platform.is_cpu() and num_workers > 1:
        cores = _cores_of_workers(sorted(os.sched_getaffinity(0)), num_workers)
        values["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", cores)
    if failures is not None:
        values[FAILURES_VARIABLE] = failures
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _cores_of_workers(cores: list[int], num_workers: int) -> str:
    """Write each worker's cores as vLLM expects, stage by stage; workers beyond the number of cores share them in turn.

    So the workers of one stage, which compute at the same time, have cores of their own where there are enough.
    """
    if num_workers >= len(cores):
        return "|".join(str(cores[worker % len(cores)]) for worker in range(num_workers))
    bounds = [len(cores) * worker // num_workers for worker in range(num_workers + 1)]
    return "|".join(",".join(str(core) for core in cores[first:end]) for first, end in pairwise(bounds))
