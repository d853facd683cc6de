"""The kernels, run on the CPU, copy what the torch reference copies, over random shapes; a changed kernel is found."""

import mmap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("cuda.core", reason="cuda-core is not installed: the kernels' source and calls need it")

from pipemax.transfer.cuda.compile import kernel_source
from pipemax.transfer.cuda.device import Span
from pipemax.transfer.cuda.kernels import OffloadTokens
from pipemax.transfer.cuda.launch_checks import Geometry, check_tokens, token_geometry
from pipemax.transfer.layout import KV_DTYPES, BlockLayout, compact_layout
from tests.gpu import kernel_reference
from tests.gpu.kernels_on_cpu import CpuKernels
from tests.gpu.pools import CASES, POISON, random_tokens

MARGIN_BYTES = 1 << 17
"""Poisoned memory on both sides of a pool: a kernel that leaves the pool is found, and hits nothing else."""
MAP_NORESERVE = 0x4000
"""Linux's flag for memory that counts only where it is touched; Python 3.11's ``mmap`` does not name it."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    return CpuKernels(kernel_source(), tmp_path_factory.mktemp("kernels"))


class GuardedPool:
    """A pool of ``num_blocks`` that begins ``offset`` bytes behind a multiple of 64."""

    def __init__(self, layout: BlockLayout, num_blocks: int, *, offset: int) -> None:
        num_bytes = num_blocks * layout.block_bytes
        self.memory = np.full(num_bytes + 2 * MARGIN_BYTES + 64 + offset, POISON, np.uint8)
        begin = MARGIN_BYTES + -(self.memory.ctypes.data + MARGIN_BYTES) % 64 + offset
        self.rows = torch.from_numpy(self.memory[begin : begin + num_bytes]).view(
            layout.pool_shape(num_blocks)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    layout: BlockLayout
    num_blocks: tuple[int, int]
    """Of the GPU's and the host's pool."""
    offsets: tuple[int, int]
    """Of the pools' first bytes from aligned ones."""
    num_tokens: int
    max_groups: int
    num_threads: int
    seed: int

    def run(self, kernels: CpuKernels, *, word_bytes: int | None = None) -> None:
        """Hold the kernel's run to the reference's, byte for byte; ``word_bytes`` None is what we would launch."""
        rng = np.random.default_rng(self.seed)
        gpu, host = (
            GuardedPool(self.layout, count, offset=offset)
            for count, offset in zip(self.num_blocks, self.offsets, strict=True)
        )
        gpu.rows.numpy()[:] = rng.integers(0, 256, gpu.rows.shape, dtype=np.uint8)
        gpu_before, host_before = gpu.memory.copy(), host.memory.copy()
        tokens = random_tokens(self.layout, self.num_tokens, *self.num_blocks, rng)
        kernel_reference.offload_tokens(gpu.rows, host.rows, self.layout, torch.from_numpy(tokens))
        expected = host.memory.copy()
        host.memory[:] = host_before

        geometry = replace(self.geometry(gpu, host), num_threads=self.num_threads)
        if word_bytes is not None:
            geometry = replace(geometry, word_bytes=word_bytes)
        call = OffloadTokens(None, geometry, gpu.rows, host.rows, self.layout, tokens)
        order = rng.permutation(geometry.num_groups * self.num_threads).astype(np.int32)
        kernels.launch(geometry, call.arguments(tokens.ctypes.data), order)
        assert np.array_equal(host.memory, expected)
        assert np.array_equal(gpu.memory, gpu_before)

    def geometry(self, gpu: GuardedPool, host: GuardedPool) -> Geometry:
        addresses = (gpu.rows.data_ptr(), host.rows.data_ptr())
        return token_geometry(self.layout, self.num_tokens, *addresses, max_groups=self.max_groups)


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    size = draw(st.sampled_from(KV_DTYPES)).itemsize
    compact = compact_layout(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        block_tokens=draw(st.integers(1, 9)),
        content_bytes=2 * size * draw(st.integers(1, 12) | st.just(32)),
    )
    layer_stride = compact.layer_bytes + size * draw(st.integers(0, 5) | st.sampled_from((16, 64)))
    block_pad = size * draw(st.integers(0, 5) | st.sampled_from((16, 64)))
    layout = replace(
        compact,
        layer_stride_bytes=layer_stride,
        block_bytes=compact.num_layers * layer_stride + block_pad,
    )
    num_blocks = (draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    offset = st.sampled_from((0, 0, 16, 4, 1))
    return Launch(
        layout=layout,
        num_blocks=num_blocks,
        offsets=(draw(offset), draw(offset)),
        num_tokens=draw(st.integers(1, num_blocks[1] * layout.block_tokens)),
        max_groups=draw(st.integers(1, 9)),
        num_threads=draw(st.integers(1, 48) | st.just(256)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@given(launch=launches())
def test_tokens_arrive_and_nothing_else_is_touched(kernels: CpuKernels, launch: Launch) -> None:
    launch.run(kernels)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("blockIdx.x", "threadIdx.x"),
        ("static_cast<int>(gridDim.x)", "1 + static_cast<int>(gridDim.x)"),
        ("static_cast<int>(blockDim.x)", "2 * static_cast<int>(blockDim.x)"),
        ("<kv::Word##SIZE>", "<kv::Word16>"),
        ("block_bytes, layer_stride, num_layers, num_heads,", "block_bytes, layer_stride, num_heads, num_layers,"),
        ("gpu_pool + token.gpu_block", "gpu_pool + token.host_block"),
        ("* shape.layer_stride", "* shape.num_heads * head_bytes"),
        ("(token.slot)", "(part % shape.block_tokens)"),
        ("part < num_parts", "part < num_parts - 1"),
        ("word < num_words", "word <= num_words"),
        ("offset = head * head_bytes", "offset = head * (head_bytes - 1)"),
        ("(word - head * words_per_run)", "word"),
        ("*reinterpret_cast<Word*>(target", "*reinterpret_cast<Word*>(target + sizeof(Word)"),
    ],
)  # fmt: skip
def test_a_kernel_with_one_change_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert kernel_source().count(old) == 1
    changed = CpuKernels(kernel_source().replace(old, new), tmp_path)

    @settings(database=None, derandomize=True, phases=[Phase.generate])
    @given(launch=launches())
    def run(launch: Launch) -> None:
        launch.run(changed)

    with pytest.raises(AssertionError):
        run()


def test_words_that_are_too_large_are_found(kernels: CpuKernels) -> None:
    layout = compact_layout(num_layers=2, num_kv_heads=2, block_tokens=3, content_bytes=16)
    aligned = Launch(
        layout=layout, num_blocks=(2, 2), offsets=(0, 0), num_tokens=3, max_groups=2, num_threads=8, seed=0
    )
    aligned.run(kernels, word_bytes=16)
    with pytest.raises(AssertionError, match="misaligned"):
        replace(aligned, offsets=(0, 4)).run(kernels, word_bytes=16)


def test_blocks_beyond_4_gib_are_copied(kernels: CpuKernels) -> None:
    small = compact_layout(num_layers=2, num_kv_heads=2, block_tokens=4, content_bytes=32)
    layout = replace(small, layer_stride_bytes=3 << 29, block_bytes=3 << 30)
    gpu, host, expected = (_sparse_pool(layout, 2) for _ in range(3))
    tokens = np.array([(1, 3, 1), (0, 2, 1), (1, 1, 0)], np.int32)
    check_tokens(tokens, layout, num_gpu_blocks=2, num_host_blocks=2)
    geometry = token_geometry(layout, len(tokens), gpu.data_ptr(), host.data_ptr())
    call = OffloadTokens(None, geometry, gpu, host, layout, tokens)
    rng = np.random.default_rng(0)
    for span in call.reads():
        _bytes_of(gpu, span)[:] = torch.from_numpy(rng.integers(0, 256, span.num_bytes, dtype=np.uint8))
    kernel_reference.offload_tokens(gpu, expected, layout, torch.from_numpy(tokens))
    order = np.arange(geometry.num_groups * geometry.num_threads, dtype=np.int32)
    kernels.launch(geometry, call.arguments(tokens.ctypes.data), order)
    for span in call.writes():
        assert torch.equal(_bytes_of(host, span), _bytes_of(expected, span))


@given(launch=launches())
def test_a_call_s_spans_are_what_the_kernel_reads_and_writes(kernels: CpuKernels, launch: Launch) -> None:
    """The checker of the copies' order trusts them."""
    rng = np.random.default_rng(launch.seed)
    layout, (gpu_blocks, host_blocks) = launch.layout, launch.num_blocks
    tokens = random_tokens(layout, launch.num_tokens, gpu_blocks, host_blocks, rng)
    gpu = torch.from_numpy(rng.integers(0, 256, layout.pool_shape(gpu_blocks), dtype=np.uint8))
    results = []
    for poison in (0x00, 0xFF):
        host = torch.full(layout.pool_shape(host_blocks), poison, dtype=torch.uint8)
        geometry = token_geometry(layout, len(tokens), gpu.data_ptr(), host.data_ptr())
        call = OffloadTokens(None, geometry, gpu, host, layout, tokens)
        order = np.arange(geometry.num_groups * geometry.num_threads, dtype=np.int32)
        kernels.launch(geometry, call.arguments(tokens.ctypes.data), order)
        results.append(host)
        unread = torch.ones(gpu.numel(), dtype=torch.bool)
        for span in call.reads():
            _bytes_of(unread, span)[:] = False
        gpu.view(-1)[unread] ^= 0xFF  # what is not read may change between the two runs
    written = torch.zeros(results[0].numel(), dtype=torch.bool)
    for span in call.writes():
        _bytes_of(written, span)[:] = True
    assert torch.equal((results[0] == results[1]).view(-1), written)


def test_the_largest_aligned_word_is_chosen() -> None:
    words = {case.name: token_geometry(case.layout, 1, 4096, 8192).word_bytes for case in CASES}
    assert words == {
        "bf16": 16, "fp16": 16, "fp32": 16, "fp8": 16, "padded": 16, "words of 4": 4, "words of 1": 1,
    }  # fmt: skip
    layout = CASES[0].layout
    assert token_geometry(layout, 1, 4096, 8192 + 4).word_bytes == 4
    assert token_geometry(layout, 1, 4096 + 1, 8192).word_bytes == 1


def _sparse_pool(layout: BlockLayout, num_blocks: int) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, num_blocks * layout.block_bytes, flags=flags)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(layout.pool_shape(num_blocks))


def _bytes_of(pool: torch.Tensor, span: Span) -> torch.Tensor:
    return pool.view(-1)[span.first_byte : span.first_byte + span.num_bytes]
