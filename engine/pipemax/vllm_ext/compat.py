"""Check that an engine's model, settings and KV cache are such as PipeMax serves."""

from pipemax.checkpoint.model_kinds import has_latent_attention, refusal_under_pipemax
from pipemax.domain.kv_groups import WHOLE_KV, KvGroups
from pipemax.vllm_ext.seam.vllm_types import (
    AttentionBackendEnum,
    KVCacheConfig,
    ModelConfig,
    SlidingWindowSpec,
    VllmConfig,
    current_platform,
)

_PLAIN_KV_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Types of KV caches whose blocks are keys and values only: the scales of FP8 are the model's, one for each layer."""


def check_model(vllm_config: VllmConfig, *, num_adapters: int = 0) -> None:
    """Raise ``ValueError`` for a model or setting that the extension cannot serve; ``policy: vllm`` serves all."""
    model = vllm_config.model_config
    reasons: list[str] = []
    if model.runner_type != "generate":
        reasons.append("it does not generate text")
    reasons += _reasons_of_layers(model)
    reasons += _reasons_of_latent_kernels(vllm_config)
    if model.multimodal_config is not None and not model.multimodal_config.language_model_only:
        reasons.append("vllm.language_model_only is off, and it serves the text part only")
    if vllm_config.speculative_config is not None:
        reasons.append("speculative decoding is on")
    if vllm_config.lora_config is not None and num_adapters > vllm_config.lora_config.max_loras:
        reasons.append(
            f"max_loras is {vllm_config.lora_config.max_loras}, and a step may need all {num_adapters} adapters"
        )
    if vllm_config.scheduler_config.policy != "fcfs":
        reasons.append(f"vLLM's own scheduling policy is {vllm_config.scheduler_config.policy}")
    if vllm_config.parallel_config.data_parallel_size > 1:
        reasons.append("data parallelism is on")
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        reasons.append("context parallelism is on")
    cache = vllm_config.cache_config
    if cache.cache_dtype not in _PLAIN_KV_TYPES:
        reasons.append(
            f"its KV cache is {cache.cache_dtype}, and only {', '.join(_PLAIN_KV_TYPES)} are served"
        )
    interval = vllm_config.scheduler_config.prefill_schedule_interval
    if interval > 1:
        reasons.append(
            f"prefill_schedule_interval is {interval}, which holds prompts back that it has planned"
        )
    if cache.kv_cache_dtype_skip_layers:
        reasons.append("some layers keep their KV in another type (kv_cache_dtype_skip_layers)")
    if reasons:
        raise ValueError(
            f"policy pipemax cannot serve {model.model!r} yet: {'; '.join(reasons)}. Use policy: vllm"
        )


def _reasons_of_layers(model: ModelConfig) -> list[str]:
    refusal = refusal_under_pipemax(model.hf_config)
    if refusal is not None:
        return [f"it {refusal}"]
    if model.is_hybrid or model.is_attention_free:
        return ["it has layers without a KV cache that grows by tokens (Mamba, hybrid)"]
    if has_latent_attention(model.hf_config) and not model.use_mla:
        return ["vLLM runs its latent attention as heads, whose sizes its configuration does not give"]
    return ["it is an encoder-decoder"] if model.is_encoder_decoder else []


def _reasons_of_latent_kernels(vllm_config: VllmConfig) -> list[str]:
    """Refuse other kernels on every CPU, so that a config means the same on all: without AMX, vLLM ignores the name."""
    backend = vllm_config.attention_config.backend
    if (
        not vllm_config.model_config.use_mla
        or not current_platform.is_cpu()
        or backend is AttentionBackendEnum.CPU_MLA
    ):
        return []
    named = "open" if backend is None else backend.name
    return [
        f"vllm.attention_backend is {named}, and on a CPU only CPU_MLA reads latent vectors from blocks that do not "
        "follow one another (leave out vllm.attention_backend)"
    ]


def check_kv_cache(kv_cache_config: KVCacheConfig) -> None:
    """Raise ``ValueError`` for KV caches other than one group of full or latent attention, or groups with one window.

    Windowed layers count as full ones if their KV is kept whole. vLLM writes to blocks of other kinds before the
    connector's first hook, and so before the waits for earlier copies: it fills new blocks with zeros (Mamba, several
    types of KV), and copies a block of which a prompt's prefix is only a part (Mamba).
    """
    if kv_cache_config.needs_kv_cache_zeroing:
        raise ValueError(
            "policy pipemax serves models whose KV is of one type; vLLM fills new blocks of this one with zeros. Use "
            "policy: vllm"
        )
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) == 1 and kinds in (["FullAttentionSpec"], ["MLAAttentionSpec"]):
        return
    specs = [group.kv_cache_spec for group in groups]
    windows = {spec.sliding_window for spec in specs if type(spec) is SlidingWindowSpec}
    is_one_pool = len({(spec.block_size, spec.page_size_bytes) for spec in specs}) == 1
    if {*kinds} - {"FullAttentionSpec", "SlidingWindowSpec"} or len(windows) != 1 or not is_one_pool:
        raise ValueError(
            "policy pipemax serves models whose layers keep KV of the same size for every token, in one group, or in "
            f"groups of full attention and of one sliding window; this model has {len(groups)}, of "
            f"{', '.join(kinds)}. Use policy: vllm"
        )


def kv_groups(kv_cache_config: KVCacheConfig) -> KvGroups:
    """Return the block tables of a request, for groups that ``check_kv_cache`` has checked."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    windows = [spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)]
    if not windows:
        return WHOLE_KV
    return KvGroups(full=len(specs) - len(windows), window=len(windows), window_tokens=windows[0])
