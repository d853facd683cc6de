"""A pool is registered in pieces of whole blocks and pages, and what the system refuses or lacks is said."""

import logging
import mmap
import os
from pathlib import Path

import pytest

from pipemax.domain.errors import EngineStartError, TransferError
from pipemax.domain.units import GIB, MIB
from pipemax.transfer.cuda.numa import bind_memory, read_numa_node
from pipemax.transfer.cuda.pinned_pool import (
    PinnedHostPool,
    blocks_of_a_piece,
    huge_page_bytes,
    require_memory,
    require_pools,
)
from pipemax.transfer.host_memory import available_host_bytes
from pipemax.transfer.layout import compact_layout

LAYOUT = compact_layout(num_layers=3, num_kv_heads=1, block_tokens=16, content_bytes=64)  # 3 KiB


def grants_huge_pages() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


class Registry:
    """Implements ``HostRegistry``: remembers what is pinned, refuses after ``limit`` pieces."""

    def __init__(self, limit: int | None = None) -> None:
        self.pinned: dict[int, int] = {}
        self._limit = limit

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.pinned) == self._limit:
            raise TransferError("out of locked memory")
        assert address % mmap.PAGESIZE == 0
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


def test_pieces_cover_the_pool_and_no_block_lies_on_a_seam() -> None:
    registry = Registry()
    pool = PinnedHostPool(LAYOUT, 100, registry, max_piece_bytes=50_000)
    assert LAYOUT.block_bytes == 3072
    assert pool.piece_blocks == 16  # 4 blocks are 3 pages
    piece_bytes = 16 * 3072
    begins = sorted(registry.pinned)
    assert begins[0] == pool.tensor.data_ptr() == pool.rows.ctypes.data
    assert [b - begins[0] for b in begins] == [piece * piece_bytes for piece in range(7)]
    assert sum(registry.pinned.values()) == 75 * mmap.PAGESIZE  # 100 blocks are whole pages, as it happens
    assert pool.start_up.num_pieces == 7
    pool.close()
    assert not registry.pinned
    pool.close()


def test_rows_and_tensor_are_one_memory_of_zeros() -> None:
    pool = PinnedHostPool(LAYOUT, 5, Registry())
    assert pool.tensor.shape == (5, 3072)
    assert not pool.tensor.any()
    pool.tensor[4, 7] = 9
    assert pool.rows[4, 7] == 9


def test_refused_pinning_ends_the_start_with_the_limit_and_leaves_nothing_pinned() -> None:
    registry = Registry(limit=2)
    with pytest.raises(
        EngineStartError, match=r"cannot be pinned, .*ulimit -l\) is .*: out of locked memory"
    ):
        PinnedHostPool(LAYOUT, 100, registry, max_piece_bytes=50_000)
    assert not registry.pinned


@pytest.mark.skipif(not grants_huge_pages(), reason="this machine grants no transparent huge pages")
def test_the_pool_is_in_huge_pages_and_the_log_counts_them() -> None:
    pool = PinnedHostPool(LAYOUT, 4096, Registry())
    assert pool.start_up.huge_bytes >= 6 * MIB  # of 12; the ends of the mapping lie where they lie


def test_a_forked_process_does_not_inherit_the_pool() -> None:
    pool = PinnedHostPool(LAYOUT, 16, Registry())
    address = pool.tensor.data_ptr()
    child = os.fork()
    if child == 0:
        begins = (line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines())
        os._exit(int(any(int(begin, 16) == address for begin in begins)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_start_up_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pool = PinnedHostPool(LAYOUT, 4096, Registry())
    assert "GiB touched in" in caplog.text
    assert "in 1 pieces" in caplog.text
    assert "% in huge pages" in caplog.text
    assert pool.start_up.num_bytes == 12 * MIB
    assert pool.start_up.touch_s > 0


def test_huge_pages_are_counted_for_the_mapping_only(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "00001000-00003000 rw-p 00000000 00:00 0\nRss: 8 kB\nAnonHugePages:       4 kB\n"
        "00008000-0000a000 rw-p 00000000 00:00 0 [heap]\nAnonHugePages:    2048 kB\n"
    )
    assert huge_page_bytes(0x2000, 0x1000, smaps) == 4 * 1024
    assert huge_page_bytes(0x2000, 0x6001, smaps) == 2052 * 1024
    assert huge_page_bytes(0x3000, 0x5000, smaps) == 0
    assert huge_page_bytes(0x2000, 0x1000, tmp_path / "none") == 0


def test_memory_that_does_not_suffice_is_an_error_with_the_numbers() -> None:
    require_memory(2 * GIB, 2 * GIB)
    require_pools(2 * GIB, 8, 16 * GIB)
    with pytest.raises(
        EngineStartError, match=r"8 host KV pools of 3\.0 GiB .* the 16\.0 GiB .* to 2\.0 or less"
    ):
        require_pools(3 * GIB, 8, 16 * GIB)
    with pytest.raises(EngineStartError, match=r"and 0\.5 GiB that each worker pins .* to 1\.5 or less"):
        require_pools(2 * GIB, 8, 16 * GIB, other_pinned_bytes=GIB / 2)
    with pytest.raises(EngineStartError, match=r"needs 3\.0 GiB, 2\.0 GiB of host memory are available"):
        require_memory(3 * GIB, 2 * GIB)
    with pytest.raises(EngineStartError, match="lower host_kv_gib"):
        PinnedHostPool(LAYOUT, 1 << 40, Registry())
    with pytest.raises(ValueError, match="at least 1 block, not 0"):
        PinnedHostPool(LAYOUT, 0, Registry())


class TestAvailableMemory:
    @pytest.fixture
    def meminfo(self, tmp_path: Path) -> Path:
        path = tmp_path / "meminfo"
        path.write_text("MemTotal: 8192 kB\nMemAvailable:    4096 kB\n")
        return path

    def test_available_memory_is_that_of_the_machine(self, meminfo: Path, tmp_path: Path) -> None:
        assert available_host_bytes(meminfo, tmp_path / "none") == 4 * MIB

    def test_available_memory_respects_the_limit_of_a_container(self, meminfo: Path, tmp_path: Path) -> None:
        (tmp_path / "memory.max").write_text(f"{3 * MIB}\n")
        (tmp_path / "memory.current").write_text(f"{2 * MIB}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {MIB // 2}\n")
        assert available_host_bytes(meminfo, tmp_path) == 3 * MIB // 2
        (tmp_path / "memory.max").write_text("max\n")
        assert available_host_bytes(meminfo, tmp_path) == 4 * MIB


@pytest.mark.parametrize("block_bytes", [655_360, 3072, 1000, 4096, 7])
@pytest.mark.parametrize("max_piece_bytes", [1, 10 * MIB, 64 * GIB])
def test_a_piece_is_whole_blocks_and_pages(block_bytes: int, max_piece_bytes: int) -> None:
    blocks = blocks_of_a_piece(block_bytes, max_piece_bytes)
    assert blocks >= 1
    assert blocks * block_bytes % mmap.PAGESIZE == 0
    fewest = blocks_of_a_piece(block_bytes, 1)
    assert blocks * block_bytes <= max_piece_bytes or blocks == fewest
    assert (blocks + fewest) * block_bytes > max_piece_bytes


class TestNuma:
    def test_a_gpus_node_is_read_where_it_is_known(self, tmp_path: Path) -> None:
        (tmp_path / "numa_node").write_text("1\n")
        assert read_numa_node(tmp_path) == 1
        (tmp_path / "numa_node").write_text("-1\n")
        assert read_numa_node(tmp_path) is None
        assert read_numa_node(tmp_path / "none") is None

    def test_a_node_that_does_not_exist_is_not_bound_to(self) -> None:
        with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
            assert not bind_memory(0, len(mapping), 4711)

    def test_a_pool_starts_on_a_machine_without_the_node(self, caplog: pytest.LogCaptureFixture) -> None:
        pool = PinnedHostPool(LAYOUT, 1, Registry(), numa_node=4711)
        assert pool.start_up.numa_node is None
        assert "not bound to NUMA node 4711" in caplog.text
