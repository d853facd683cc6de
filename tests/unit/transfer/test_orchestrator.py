"""Bytes arrive where they should, in order, and what goes wrong on the copy thread is heard of."""

import threading

import numpy as np
import pytest
import torch

from pipemax.domain.errors import TransferError
from pipemax.domain.plan import StepId
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, StepCopies
from pipemax.transfer.cpu import CpuCopyBackend, HostPool
from pipemax.transfer.layout import ByteRows, describe_layers
from pipemax.transfer.orchestrator import Orchestrator

LAYERS, HEADS, TOKENS, CONTENT = 3, 2, 4, 6


def block_first_layers(num_blocks: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    pool = torch.arange(num_blocks * LAYERS * HEADS * TOKENS * CONTENT).to(dtype)
    pool = pool.view(num_blocks, LAYERS, HEADS, TOKENS, CONTENT)
    return {f"layer.{index}": pool[:, index] for index in range(LAYERS)}


def prefetch(host: int, gpu: int) -> BlockPrefetch:
    return BlockPrefetch(source=HostBlockId(host), target=GpuBlockId(gpu))


def store(gpu: int, host: int) -> BlockStore:
    return BlockStore(source=GpuBlockId(gpu), target=HostBlockId(host))


class TestLayout:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e5m2])
    def test_a_row_is_the_block_of_all_layers(self, dtype: torch.dtype) -> None:
        layers = block_first_layers(5, dtype)
        layout, rows = describe_layers(layers)
        assert layout.block_bytes == LAYERS * HEADS * TOKENS * CONTENT * dtype.itemsize
        block = rows[3].view(dtype).view(LAYERS, HEADS, TOKENS, CONTENT)
        for index, layer in enumerate(layers.values()):
            assert torch.equal(block[index].view(torch.uint8), layer[3].view(torch.uint8))
        rows[3] = 0
        assert not layers["layer.1"][3].view(torch.uint8).any()
        assert layers["layer.1"][2].view(torch.uint8).any()

    def test_one_latent_vector_of_a_token_is_one_head_of_a_block(self) -> None:
        """As vLLM's caches of latent attention (MLA) lie in memory: 512 values and 64 of the position."""
        pool = torch.randn(5, LAYERS, 1, 16, 576)
        layout, rows = describe_layers({str(index): pool[:, index] for index in range(LAYERS)})
        assert (layout.num_kv_heads, layout.content_bytes) == (1, 576 * 4)
        assert layout.token_bytes == LAYERS * 576 * 4
        assert torch.equal(rows.view(torch.float32).view(pool.shape), pool)

    def test_layers_of_several_groups_share_a_place_in_a_block(self) -> None:
        """As vLLM's hybrid KV cache manager lays out windows: a block holds KV of one group's layers."""
        layers = block_first_layers(4)
        shared = {**layers, "window.0": layers["layer.0"], "window.1": layers["layer.1"]}
        layout, rows = describe_layers(shared)
        expected_layout, expected_rows = describe_layers(layers)
        assert layout == expected_layout
        assert torch.equal(rows, expected_rows)
        with pytest.raises(ValueError, match="not block-first: layer 0 of 3"):
            describe_layers({**layers, "other": layers["layer.0"][:, :1]})

    def test_order_of_names_does_not_matter(self) -> None:
        layers = block_first_layers(2)
        _, rows = describe_layers(dict(reversed(layers.items())))
        assert torch.equal(rows, describe_layers(layers)[1])

    def test_layer_first_caches_are_refused(self) -> None:
        pool = torch.zeros(LAYERS, 5, HEADS, TOKENS, CONTENT)
        with pytest.raises(ValueError, match="not block-first"):
            describe_layers({str(index): pool[index] for index in range(LAYERS)})

    def test_token_major_interiors_are_refused(self) -> None:
        pool = torch.zeros(5, LAYERS, TOKENS, HEADS, CONTENT).transpose(2, 3)
        with pytest.raises(ValueError, match="not block-first"):
            describe_layers({str(index): pool[:, index] for index in range(LAYERS)})

    def test_a_stage_without_layers_is_refused(self) -> None:
        with pytest.raises(ValueError, match="nothing to transfer"):
            describe_layers({})


@pytest.fixture
def gpu() -> ByteRows:
    return describe_layers(block_first_layers(6))[1].numpy()


@pytest.fixture
def host() -> HostPool:
    pool = HostPool(describe_layers(block_first_layers(6))[0], 8)
    pool.rows[:] = 0xFF
    return pool


class TestCpuBackend:
    def test_a_block_is_prefetched_as_it_was_stored(self, gpu: ByteRows, host: HostPool) -> None:
        original = gpu[2].copy()
        backend = CpuCopyBackend(gpu, host.rows)
        backend.submit_stores([store(2, 7)])
        backend.wait()
        gpu[2] = 0
        backend.submit_prefetches([prefetch(7, 4)])
        (seconds,) = backend.wait()
        backend.close()
        assert np.array_equal(gpu[4], original)
        assert seconds > 0
        counts = backend.counts
        assert (counts.loaded_bytes, counts.stored_bytes) == (gpu[2].nbytes, gpu[2].nbytes)

    def test_a_failed_copy_is_raised_where_it_is_waited_for(self, gpu: ByteRows, host: HostPool) -> None:
        backend = CpuCopyBackend(gpu, host.rows)
        backend.submit_prefetches([prefetch(99, 0)])
        with pytest.raises(TransferError, match="99"):
            backend.wait()
        backend.close()
        backend.close()

    def test_pools_of_different_blocks_are_refused(self, gpu: ByteRows) -> None:
        with pytest.raises(ValueError, match="blocks differ"):
            CpuCopyBackend(gpu, np.zeros((3, 1, 1, 1), dtype=np.uint8))


class TestOrchestrator:
    def test_a_step_waits_for_the_prefetches_before_it(self, gpu: ByteRows, host: HostPool) -> None:
        host.rows[:] = 7
        backend = CpuCopyBackend(gpu, host.rows)
        held = threading.Event()
        orchestrator = Orchestrator(backend)
        orchestrator.begin_step(StepCopies())
        backend._jobs.put(lambda: held.wait() and None)  # a copy that takes long
        orchestrator.end_step(StepCopies())
        threading.Timer(0.05, held.set).start()
        copies = StepCopies(step_id=StepId(6), prefetches=(prefetch(1, 2),))
        wait = orchestrator.begin_step(copies)
        assert wait.stall_s > 0.03
        assert wait.prefetches == ()
        orchestrator.start_prefetches(copies)
        orchestrator.end_step(StepCopies())
        (timing,) = orchestrator.begin_step(StepCopies()).prefetches
        assert (timing.step_id, timing.num_blocks) == (6, 1)
        assert (gpu[2] == 7).all()
        orchestrator.close()

    def test_a_victim_s_tokens_are_stored_before_its_block_is_overwritten(
        self, gpu: ByteRows, host: HostPool
    ) -> None:
        victim = gpu[3].copy()
        host.rows[0] = 9
        orchestrator = Orchestrator(CpuCopyBackend(gpu, host.rows))
        orchestrator.begin_step(StepCopies())
        orchestrator.end_step(StepCopies(stores=(store(3, 5),)))  # computed while it was being evicted
        copies = StepCopies(prefetches=(prefetch(0, 3),))
        orchestrator.begin_step(copies)
        orchestrator.start_prefetches(copies)
        orchestrator.end_step(copies)
        orchestrator.begin_step(StepCopies())
        assert np.array_equal(host.rows[5], victim)
        assert (gpu[3] == 9).all()
        orchestrator.close()

    def test_a_save_is_done_before_the_step_computes(self, gpu: ByteRows, host: HostPool) -> None:
        tail = gpu[3].copy()
        orchestrator = Orchestrator(CpuCopyBackend(gpu, host.rows))
        orchestrator.begin_step(StepCopies(saves=(store(3, 5),)))
        gpu[3] = 1  # the step writes to it
        orchestrator.end_step(StepCopies())
        assert np.array_equal(host.rows[5], tail)
        orchestrator.close()

    def test_a_wave_overwrites_each_group_of_layers_once_it_is_computed(
        self, gpu: ByteRows, host: HostPool
    ) -> None:
        victim = gpu[3].copy()
        host.rows[1], host.rows[0] = 7, 9
        groups = host.layout.group_spans(2)
        backend = CpuCopyBackend(gpu, host.rows)
        orchestrator = Orchestrator(backend, groups)
        copies = StepCopies(
            step_id=StepId(6), prefetches=(prefetch(0, 2),), wave_prefetches=(prefetch(1, 3),), in_groups=True
        )
        orchestrator.begin_step(copies)
        orchestrator.start_prefetches(copies)
        for group, (first_byte, num_bytes) in enumerate(groups):
            orchestrator.begin_group(group)
            assert np.array_equal(gpu[3, first_byte:], victim[first_byte:])
            orchestrator.end_group(copies, group)
            backend.wait()
            assert (gpu[3, first_byte : first_byte + num_bytes] == 7).all()
        orchestrator.end_step(copies)
        (timing,) = orchestrator.begin_step(StepCopies()).prefetches
        assert (timing.step_id, timing.num_blocks) == (6, 2)
        assert (gpu[2] == 9).all()
        assert backend.counts.loaded_bytes == 2 * gpu[2].nbytes
        orchestrator.close()

    def test_a_step_that_does_not_tell_of_its_groups_fails(self, gpu: ByteRows, host: HostPool) -> None:
        """As it would in an engine whose layers call no hooks: the wave's copies were never made."""
        orchestrator = Orchestrator(CpuCopyBackend(gpu, host.rows), host.layout.group_spans(2))
        copies = StepCopies(wave_prefetches=(prefetch(1, 3),), in_groups=True)
        orchestrator.begin_step(copies)
        with pytest.raises(AssertionError, match="ends in group 0"):
            orchestrator.end_step(copies)
        orchestrator.close()
        unwatched = Orchestrator(CpuCopyBackend(gpu, host.rows))
        with pytest.raises(AssertionError, match="nobody watches"):
            unwatched.begin_step(copies)
        unwatched.close()

    def test_steps_alternate(self, gpu: ByteRows, host: HostPool) -> None:
        orchestrator = Orchestrator(CpuCopyBackend(gpu, host.rows))
        with pytest.raises(AssertionError, match="no step"):
            orchestrator.end_step(StepCopies())
        with pytest.raises(AssertionError, match="no step"):
            orchestrator.start_prefetches(StepCopies())
        orchestrator.begin_step(StepCopies())
        with pytest.raises(AssertionError, match="not ended"):
            orchestrator.begin_step(StepCopies())
        orchestrator.end_step(StepCopies())
        copies = StepCopies(prefetches=(prefetch(0, 3),))
        orchestrator.begin_step(copies)
        with pytest.raises(AssertionError, match="were not started"):
            orchestrator.end_step(copies)
        orchestrator.close()
