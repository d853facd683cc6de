"""The calls that take a short way past vLLM's KV cache manager leave it as the manager's own calls would."""

from random import Random

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from pipemax.transfer.cuda.copy_runs import copy_runs
from pipemax.transfer.cuda.device import Lane
from pipemax.vllm_ext.scheduler.scheduler import PipeMaxScheduler
from pipemax.vllm_ext.seam.gpu_blocks import GpuBlocks
from pipemax.vllm_ext.worker.connector import StepMetadata
from tests.unit.vllm_ext.fake_worker import BLOCK_TOKENS, FakeCore, make_request, make_scheduler


class ThroughTheManager(GpuBlocks):
    """Evicts and prefetches by vLLM's own calls, one request after the other, and answers none for the manager."""

    def undo_answers(self) -> None:
        self._manager.allocate_slots = self._allocate_slots  # type: ignore[method-assign]
        self._manager.cache_blocks = self._cache_blocks  # type: ignore[method-assign]

    def evict(self, request: Request) -> None:
        self._manager.free(request)

    def allocate_for_prefetch(self, request: Request) -> int | None:
        computed = request.num_computed_tokens
        self._group.num_cached_block.pop(request.request_id, None)
        request.num_computed_tokens = 0
        try:
            blocks, found = self._manager.get_computed_blocks(request)[:2]
            new_blocks = self._manager.allocate_slots(
                request,
                1,
                num_new_computed_tokens=found,
                new_computed_blocks=blocks,
                num_external_computed_tokens=computed - found,
                delay_cache_blocks=True,
            )
        finally:
            request.num_computed_tokens = computed
        return None if new_blocks is None else found // BLOCK_TOKENS


def pool_state(scheduler: PipeMaxScheduler) -> tuple[object, ...]:
    """Return who holds which block, in order, the free list, and what each block is known by."""
    pool = scheduler.kv_cache_manager.block_pool
    return (
        {name: scheduler.kv_cache_manager.get_block_ids(name) for name in scheduler.requests},
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        [
            pool.cached_block_hash_to_block.contain(block.block_hash, block.block_id)
            for block in pool.blocks
            if block.block_hash is not None
        ],
    )


def contents(scheduler: PipeMaxScheduler) -> tuple[object, ...]:
    """Return what each request's blocks are known by, in order, and the free list: blocks without a hash are alike."""
    pool = scheduler.kv_cache_manager.block_pool
    held = {name: scheduler.kv_cache_manager.get_block_ids(name) for name in scheduler.requests}
    return (
        {
            name: [(pool.blocks[block].ref_cnt, pool.blocks[block].block_hash) for block in blocks]
            for name, (blocks,) in held.items()
        },
        [block.block_hash for block in pool.free_block_queue.get_all_free_blocks()],
        pool_state(scheduler)[-1],
    )


def prompts(rng: Random, num: int) -> list[list[int]]:
    """Return prompts of which many begin alike, and some are equal."""
    templates = [[1] * 9, [2] * 14, []]
    made: list[list[int]] = []
    for _ in range(num):
        if made and rng.random() < 0.2:
            made.append(rng.choice(made))
            continue
        own = [rng.randrange(1000, 1999) for _ in range(rng.randint(1, 26))]
        made.append(rng.choice(templates) + own)
    return made


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", [3, 4])
def test_blocks_and_hashes_are_those_of_vllm_s_own_calls(asynchronous: bool, seed: int) -> None:
    cores = [
        FakeCore(
            make_scheduler(
                gpu_blocks=40, host_blocks=300, num_batches=3, runner=2, asynchronous=asynchronous
            ),
            2,
        )
        for _ in range(2)
    ]
    short, through = (core.scheduler for core in cores)
    through._gpu.__class__ = ThroughTheManager
    through._gpu.undo_answers()  # type: ignore[attr-defined]
    for core in cores:
        rng = Random(seed)
        for index, prompt in enumerate(prompts(rng, 40)):
            core.add(make_request(str(index), prompt, rng.randint(1, 20)))
    while short.has_requests() or through.has_requests():
        for core in cores:
            core.step()
        assert contents(short) == contents(through)
        if cores[0].num_steps == 30:
            for core in cores:
                core.abort(list(core.scheduler.requests)[:3])
    assert cores[0].outputs == cores[1].outputs
    counters = cores[0].counters
    assert min(counters.prefetches, counters.evictions) > 20, counters
    assert counters.found_blocks > 5, counters


def test_a_prefetch_without_room_changes_nothing() -> None:
    scheduler = make_scheduler(gpu_blocks=12, host_blocks=100, num_batches=2)
    core = FakeCore(scheduler)
    core.add(make_request("a", list(range(100, 120)), 10))
    core.step()
    core.step()
    request = scheduler.requests["a"]
    gpu = GpuBlocks(scheduler.kv_cache_manager, BLOCK_TOKENS)
    gpu.evict(request)
    gpu.return_vacated()
    held = scheduler.kv_cache_manager.block_pool.get_new_blocks(11)
    before = pool_state(scheduler)
    assert gpu.allocate_for_prefetch(request) is None
    assert pool_state(scheduler) == before
    scheduler.kv_cache_manager.block_pool.free_blocks(held)


def test_neighbouring_blocks_are_prefetched_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    core = FakeCore(make_scheduler(gpu_blocks=60, host_blocks=300, num_batches=2, runner=2), 2)
    for index in range(12):
        core.add(make_request(str(index), [index * 100 + n for n in range(30)], 20))
    num_blocks, num_copies, execute = 0, 0, core.worker.execute

    def counted(output: SchedulerOutput) -> ModelRunnerOutput:
        nonlocal num_blocks, num_copies
        assert isinstance(output.kv_connector_metadata, StepMetadata)
        copies = output.kv_connector_metadata.copies
        for prefetches in (copies.prefetches, copies.later_prefetches):
            if prefetches:
                num_blocks += len(prefetches)
                num_copies += len(copy_runs(prefetches, lane=Lane.PREFETCH, block_bytes=1))
        return execute(output)

    monkeypatch.setattr(core.worker, "execute", counted)
    while core.scheduler.has_requests():
        core.step()
    assert num_blocks > 100
    assert num_copies < 0.6 * num_blocks
