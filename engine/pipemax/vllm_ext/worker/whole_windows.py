"""Keep the whole KV of layers that attend to a window of tokens, as if they had full attention.

PipeMax moves blocks of one kind: a block holds all layers' KV of its tokens. With its hybrid KV cache manager off, vLLM
allocates windowed layers as full ones only if the model has full layers too. This does it for a model whose layers all
have a window as well. Attention still reads only the window.
"""

from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    replace_as,
)


def with_whole_windows(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return the KV caches of a worker's layers, by name, with windowed ones as full ones."""
    return {name: _whole(spec) for name, spec in specs.items()}


def _whole(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, SlidingWindowMLASpec):
        return spec  # refused: see compat.check_kv_cache
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return replace_as(spec, FullAttentionSpec, drop=("extra_retained_tokens",))
    return spec


class KeepsWholeWindows:
    """A worker that declares windowed layers as full ones; goes before vLLM's worker among the bases."""

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        vllms: Any = super()
        specs: dict[str, KVCacheSpec] = vllms.get_kv_cache_spec()
        worker: Any = self
        is_whole = worker.vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        return with_whole_windows(specs) if is_whole else specs
