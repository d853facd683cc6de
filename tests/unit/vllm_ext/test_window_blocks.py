"""The simulator's count of a row's blocks against vLLM's own KV cache manager, with its hybrid manager on."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from pipemax.domain.kv_groups import group_layers

BLOCK = 16
NUM_BLOCKS = 5000
HEADS: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}

GPT_OSS = (36, range(1, 36, 2), 128)
GEMMA_3 = (62, range(5, 62, 6), 1024)
MISTRAL = (32, (), 256)
MORE_FULL = (20, [layer for layer in range(20) if layer % 5], 64)
NEARLY_EQUAL = (25, range(13), 100)
MODELS = [GPT_OSS, GEMMA_3, MISTRAL, MORE_FULL, NEARLY_EQUAL]


def layer_specs(num_layers: int, full_layers: Any, window: int) -> dict[str, KVCacheSpec]:
    return {
        f"layer.{layer}": FullAttentionSpec(**HEADS)
        if layer in full_layers
        else SlidingWindowSpec(**HEADS, sliding_window=window)
        for layer in range(num_layers)
    }


def vllm_groups(num_layers: int, full_layers: Any, window: int) -> Any:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    return get_kv_cache_groups(cast(Any, config), layer_specs(num_layers, full_layers, window))


@pytest.mark.parametrize(("num_layers", "full_layers", "window"), MODELS)
def test_layers_are_grouped_as_vllm_groups_them(num_layers: int, full_layers: Any, window: int) -> None:
    own = group_layers(num_layers, full_layers)
    groups = {frozenset(group.layer_names) for group in vllm_groups(num_layers, full_layers, window)}
    assert groups == {frozenset(f"layer.{layer}" for layer in group) for group in (*own.full, *own.window)}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_layers", "full_layers", "window"), MODELS)
def test_a_row_holds_as_many_blocks_as_in_vllm(
    num_layers: int, full_layers: Any, window: int, caching: bool
) -> None:
    """Prompts of several lengths, whole and in chunks, each decoded over several blocks."""
    groups = group_layers(num_layers, full_layers).tables(window)
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=vllm_groups(num_layers, full_layers, window),
        ),
        max_model_len=8192,
        scheduler_block_size=BLOCK,
        hash_block_size=BLOCK,
        max_in_flight_tokens=8192,
        enable_caching=caching,
    )
    init_none_hash(sha256)
    free = manager.block_pool.get_num_free_blocks
    before = free()
    for number, prompt_tokens in enumerate((1, 15, 16, 17, 63, 127, 128, 129, 500, 1023, 1024, 1025, 2500)):
        request = Request(
            request_id=str(number),
            prompt_token_ids=[(number * 7919 + place) % 1000 for place in range(prompt_tokens)],
            sampling_params=SamplingParams(max_tokens=100),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        chunk = prompt_tokens if number % 2 else 300
        most = groups.prompt_blocks(prompt_tokens, BLOCK, in_flight_tokens=chunk)
        while request.num_computed_tokens < prompt_tokens:
            tokens = min(chunk, prompt_tokens - request.num_computed_tokens)
            assert manager.allocate_slots(request, tokens) is not None
            request.num_computed_tokens += tokens
            assert before - free() <= most
        for _ in range(2 * BLOCK + 3):
            request.append_output_token_ids(1)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
            held = groups.running_blocks(request.num_computed_tokens, BLOCK)
            assert before - free() == held, (prompt_tokens, request.num_computed_tokens)
        manager.free(request)
        assert free() == before
