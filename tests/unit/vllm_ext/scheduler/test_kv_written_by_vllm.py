"""vLLM's runners write to no KV block before the connector's first hook, which waits for earlier copies."""

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy, partial_hash_hits_enabled
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from pipemax.vllm_ext.compat import check_kv_cache
from tests.unit.vllm_ext.fake_worker import make_request, make_scheduler

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=48
)
STATE = MambaSpec(block_size=64, shapes=((8, 8),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")


def groups_of(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([str(index)], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.mark.parametrize("config", [groups_of(FULL), groups_of(FULL, WINDOW), groups_of(WINDOW)])
def test_of_served_models_vllm_copies_and_zeroes_no_blocks(config: KVCacheConfig) -> None:
    check_kv_cache(config)
    assert not config.needs_kv_cache_zeroing
    assert not partial_hash_hits_enabled(config.kv_cache_groups, hash_block_size=16)


def test_models_of_whose_prefixes_vllm_shares_parts_of_blocks_are_refused() -> None:
    config = groups_of(FULL, STATE)
    assert partial_hash_hits_enabled(config.kv_cache_groups, hash_block_size=32)
    with pytest.raises(ValueError, match="policy: vllm"):
        check_kv_cache(config)


def test_models_whose_new_blocks_vllm_fills_with_zeros_are_refused() -> None:
    half = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float8_e4m3fn)
    assert half.page_size_bytes == WINDOW.page_size_bytes
    with pytest.raises(ValueError, match=r"new blocks of this one with zeros\. Use policy: vllm"):
        check_kv_cache(groups_of(half, WINDOW))


@pytest.mark.parametrize(
    "written",
    [{"kv_cache_block_copies": [KVCacheBlockCopy(3, 4)]}, {"new_block_ids_to_zero": [4]}],
    ids=["copied", "zeroed"],
)
def test_a_step_in_which_vllm_writes_to_blocks_itself_is_not_sent(written: dict[str, list[int]]) -> None:
    scheduler = make_scheduler(gpu_blocks=24, host_blocks=40, num_batches=2)
    scheduler.add_request(make_request("a", [1, 2, 3], max_tokens=4))
    scheduler.schedule()
    output = SchedulerOutput.make_empty()
    for name, blocks in written.items():
        setattr(output, name, blocks)
    with pytest.raises(AssertionError, match="vLLM itself writes to blocks"):
        scheduler._build_kv_connector_meta(scheduler.connector, output)
