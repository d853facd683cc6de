"""lab/bench/transfer.py at a size for CPUs: every section for CPUs runs, and the copies are the right ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.bench import transfer
from lab.bench.stage.offload import Offloader, Way
from lab.bench.stage.pools import KvLayout, PoolPlan, stage_layout
from lab.bench.stage.prefetch import scattered_parts
from lab.tests.test_stage_model import TINY
from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, TokenStore
from tests.gpu import kernel_reference

SETUP = transfer.Setup(
    model=TINY,
    num_layers=2,
    device=torch.device("cpu"),
    dtype=torch.float32,
    gpu_blocks=64,
    host_blocks=80,
    peak_bytes=1 << 16,
    prefetch_blocks=8,
    block_tokens=(4, 8),
    prompt_tokens=(1, 6),
    prefill_tokens=12,
    decode_batches=(2, 4),
    context_tokens=11,
    repeats=1,
)


def plan_of(layout: KvLayout, gpu_blocks: int = 12, host_blocks: int = 14) -> PoolPlan:
    return PoolPlan(
        layout=layout,
        block=stage_layout(TINY, 2, 4, torch.float32),
        gpu_blocks=gpu_blocks,
        host_blocks=host_blocks,
    )


class TestSections:
    def test_every_section_that_a_cpu_supports_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        saved: list[list[str]] = []
        rows = transfer.run(
            transfer.Bench(SETUP),
            ["peak", "prefetch", "breakdown", "overlap"],
            lambda rows: saved.append([*rows]),
        )
        assert saved[:2] == [["peak"], ["peak", "prefetch"]], "written after each section"
        assert [row["direction"] for row in rows["peak"]] == ["host → GPU", "GPU → host"]
        kinds = [(row["layout"], row["block_tokens"], row["pieces"]) for row in rows["prefetch"]]
        assert kinds == [
            ("block_first", 4, 8),
            ("layer_first", 4, 16),
            ("block_first", 8, 4),
            ("layer_first", 8, 8),
        ]
        steps = [(row["phase"], row["size"], row["tokens"]) for row in rows["breakdown"]]
        one_way = [("prefill", 1, 12), ("prefill", 6, 12), ("decode", 2, 2), ("decode", 4, 4)]
        assert steps == [step for step in one_way for _ in Way]
        assert {row["way"] for row in rows["breakdown"]} == set(Way)
        assert all(0 <= row["hidden"] <= 1 for row in rows["breakdown"] + rows["overlap"])
        assert [row["batch"] for row in rows["overlap"]] == [2, 4]
        assert all(row["loaded_blocks"] >= 1 for row in rows["overlap"])
        printed = capsys.readouterr().out
        assert "## breakdown\n\n| phase | size | tokens | way | compute_ms |" in printed

    def test_an_unknown_section_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no section 'speed'; there are peak"):
            transfer.Bench(replace(SETUP, num_layers=1)).section("speed")

    def test_without_a_gpu_it_says_so_in_one_sentence(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("this machine has a CUDA GPU")
        with pytest.raises(
            SystemExit,
            match=r"lab/bench/transfer\.py needs a CUDA device, and torch .* finds none: run it where",
        ):
            transfer.main([])

    def test_the_blocks_are_640_kib(self) -> None:
        setup = transfer.make_setup(transfer.parse([]), torch.device("cpu"))
        sizes = [setup.plan(KvLayout.BLOCK_FIRST, tokens).part.block_bytes // 1024 for tokens in (16, 32, 64)]
        assert sizes == [640, 1280, 2560]
        assert setup.plan(KvLayout.LAYER_FIRST, 16).part.block_bytes == 64 * 1024
        assert setup.plan(KvLayout.BLOCK_FIRST, 64).gpu_blocks * 4 == setup.gpu_blocks


class TestWays:
    @pytest.mark.parametrize("way", Way)
    def test_every_way_brings_the_tokens_to_their_blocks(self, way: Way) -> None:
        plan = plan_of(KvLayout.BLOCK_FIRST)
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(2, 5, 2, 16, generator=generator)
        values = torch.randn(2, 5, 2, 16, generator=generator)
        table = np.array([(3, 0, 9), (3, 1, 9), (3, 2, 9), (3, 3, 9), (7, 0, 2)], dtype=np.int32)
        gpu = torch.zeros(plan.part.pool_shape(12), dtype=torch.uint8)
        on_gpu = torch.from_numpy(table[:, [2, 1, 0]].copy())  # as if the GPU's blocks were the host's
        kernel_reference.pack_tokens(gpu, plan.block, on_gpu, keys, values)
        host = torch.zeros(plan.part.pool_shape(14), dtype=torch.uint8)
        offloader = Offloader(way, plan, gpu, host, table)
        offloader.after_step()
        offloader.finish()
        expected = torch.zeros_like(host)
        kernel_reference.pack_tokens(expected, plan.block, torch.from_numpy(table), keys, values)
        assert torch.equal(host, expected)
        assert host.any()

    def test_moved_bytes_count_tokens_or_whole_blocks(self) -> None:
        plan = plan_of(KvLayout.BLOCK_FIRST)
        table = np.array([(3, 0, 9), (3, 1, 9), (7, 0, 2)], dtype=np.int32)
        pools = [torch.zeros(plan.part.pool_shape(n), dtype=torch.uint8) for n in (12, 14)]
        moved = {way: Offloader(way, plan, *pools, table).moved_bytes for way in Way}
        assert moved[Way.KERNEL] == 3 * plan.block.token_bytes
        assert moved[Way.WHOLE_BLOCKS] == 2 * plan.block.block_bytes


class TestParts:
    def test_block_first_copies_are_unchanged(self) -> None:
        plan = plan_of(KvLayout.BLOCK_FIRST)
        prefetch = BlockPrefetch(HostBlockId(13), GpuBlockId(2))
        assert plan.prefetches([prefetch]) == (prefetch,)
        assert plan.part == plan.block

    def test_a_layer_first_block_is_a_part_of_each_layer(self) -> None:
        plan = plan_of(KvLayout.LAYER_FIRST)
        assert plan.prefetches([BlockPrefetch(HostBlockId(13), GpuBlockId(2))]) == (
            (13, 2),
            (14 + 13, 12 + 2),
        )
        assert plan.stores([BlockStore(GpuBlockId(2), HostBlockId(13))]) == ((2, 13), (12 + 2, 14 + 13))
        token = TokenStore(GpuBlockId(2), HostBlockId(13), first_slot=1, num_slots=2)
        assert plan.token_stores([token]) == ((2, 13, 1, 2), (12 + 2, 14 + 13, 1, 2))
        rows = torch.arange(24 * plan.part.block_bytes).to(torch.uint8).view(plan.part.pool_shape(24))
        views = plan.layer_views(rows, 12, torch.float32)
        assert [tuple(view.shape) for view in views] == [(12, 2, 4, 32)] * 2
        assert torch.equal(views[1][2].flatten().view(torch.uint8), rows[12 + 2])

    def test_scattered_blocks_have_no_neighbours(self) -> None:
        plan = plan_of(KvLayout.LAYER_FIRST)
        parts = scattered_parts(plan, 6, np.random.default_rng(0))
        assert len(parts) == len(set(parts)) == 12
        for side, count in ((0, 14), (1, 12)):
            places = [part[side] for part in parts]
            assert len(set(places)) == 12
            assert max(places) < 2 * count
            assert all(place % count % 2 == 0 for place in places)
        with pytest.raises(ValueError, match="7 scattered blocks need pools of 14"):
            scattered_parts(plan, 7, np.random.default_rng(0))
