"""Measure the transfer engine on one GPU in one run: copy rates, ways of offload, overlap with computation, priority.

    python lab/bench/transfer.py [--json FILE] [--sections NAME ...] [--gpu-blocks N] [--host-blocks N] [--repeats N]

Shapes are those of one of eight stages of LLaMA-2-70B, ten layers with dummy weights in bf16, so a block of 16 tokens
is 640 KiB. Sections: ``peak`` (one large pinned copy), ``prefetch`` (scattered blocks by layout, block size and copy
call), ``breakdown`` (prefill at prompts of 1 and 256 tokens and decode by batch size: computation against offload, by
our kernel and by whole blocks), ``overlap`` (the share of prefetch and offload hidden behind a decode step),
``priority`` (the latency of a host-staged, activation-sized copy next to prefetches in one call and in pieces; a proxy,
since one GPU has no peer). Needs a CUDA GPU with about 35 GB and pinned host memory for the pools (13 GB by default).
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.bench.stage.attention import KERNEL_NAME
from lab.bench.stage.model import LlamaStage, TokenPlaces
from lab.bench.stage.movers import open_mover
from lab.bench.stage.offload import BreakdownRow, Offloader, Way, measure_breakdown
from lab.bench.stage.overlap import OverlapRow, measure_overlap
from lab.bench.stage.pools import KvLayout, PoolPlan, stage_layout
from lab.bench.stage.prefetch import PeakRow, PrefetchRow, measure_peak, measure_prefetch
from lab.bench.stage.priority import PriorityRow, measure_priority
from lab.bench.stage.random_batch import random_batch
from lab.bench.stage.transfers import stage_transfers
from lab.gpu.tables import at_least_one, environment, print_table, require_cuda, write_json
from pipemax.domain.specs import ModelSpec
from pipemax.domain.units import MIB
from pipemax.presets import load_model

SECTIONS = ("peak", "prefetch", "breakdown", "overlap", "priority")
RESIDUAL_STREAMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes and shapes to measure; the defaults of a GPU run are in ``parse`` and ``make_setup``."""

    model: ModelSpec
    num_layers: int
    device: torch.device
    dtype: torch.dtype
    gpu_blocks: int
    """Blocks of 16 tokens; there are fewer of larger blocks."""
    host_blocks: int
    peak_bytes: int
    prefetch_blocks: int
    """Blocks of 16 tokens, moved at once."""
    block_tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    prefill_tokens: int
    """Tokens of one prefill step, whatever the prompts' length."""
    decode_batches: tuple[int, ...]
    context_tokens: int
    repeats: int

    def plan(self, layout: KvLayout, block_tokens: int) -> PoolPlan:
        """Return pools of the same bytes, whatever the block size."""
        return PoolPlan(
            layout=layout,
            block=stage_layout(self.model, self.num_layers, block_tokens, self.dtype),
            gpu_blocks=self.gpu_blocks * self.block_tokens[0] // block_tokens,
            host_blocks=self.host_blocks * self.block_tokens[0] // block_tokens,
        )


class Bench:
    """The sections, over one stage. Each leaves the device as it found it."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        self._rng = np.random.default_rng(seed)
        self._peak: list[PeakRow] | None = None
        self._stage = LlamaStage(setup.model, setup.num_layers, setup.device, setup.dtype, seed)

    def section(self, name: str) -> list[Any]:
        match name:
            case "peak":
                return self.peak()
            case "prefetch":
                return list(self.prefetch())
            case "breakdown":
                return list(self.breakdown())
            case "overlap":
                return list(self.overlap())
            case "priority":
                return self.priority()
            case _:
                raise ValueError(f"no section {name!r}; there are {', '.join(SECTIONS)}")

    def peak(self) -> list[PeakRow]:
        if self._peak is None:
            self._peak = measure_peak(self.setup.device, self.setup.peak_bytes, self.setup.repeats)
        return self._peak

    def prefetch(self) -> Iterator[PrefetchRow]:
        setup = self.setup
        h2d_peak = self.peak()[0].gb_per_s
        for block_tokens in setup.block_tokens:
            for layout in KvLayout:
                plan = setup.plan(layout, block_tokens)
                with open_mover(plan, setup.device) as mover:
                    yield from measure_prefetch(
                        plan,
                        mover,
                        num_blocks=max(1, setup.prefetch_blocks * setup.block_tokens[0] // block_tokens),
                        peak_gb_per_s=h2d_peak,
                        repeats=setup.repeats,
                        rng=self._rng,
                    )

    def breakdown(self) -> Iterator[BreakdownRow]:
        setup = self.setup
        plan = setup.plan(KvLayout.BLOCK_FIRST, setup.block_tokens[0])
        with _pools(plan, setup.device, setup.dtype) as (gpu_rows, host_rows, _):
            kv = plan.layer_views(gpu_rows, plan.gpu_blocks, setup.dtype)
            for prompt_tokens in setup.prompt_tokens:
                places = self._prompt_places(plan, prompt_tokens)
                hidden = self._stage.hidden(len(places.blocks))

                def prefill(h=hidden, p=places, n=prompt_tokens) -> None:
                    self._stage.prefill_prompts(h, kv, p, n)

                yield from self._ways("prefill", prompt_tokens, prefill, places, plan, gpu_rows, host_rows)
            for batch in setup.decode_batches:
                decode = random_batch(plan, batch, setup.context_tokens, setup.device, self._rng)
                hidden = self._stage.hidden(batch)

                def step(h=hidden, d=decode) -> None:
                    self._stage.decode(h, kv, d)

                yield from self._ways("decode", batch, step, decode.places, plan, gpu_rows, host_rows)

    def overlap(self) -> Iterator[OverlapRow]:
        setup = self.setup
        plan = setup.plan(KvLayout.BLOCK_FIRST, setup.block_tokens[0])
        gpu_rows = torch.zeros(plan.part.pool_shape(plan.gpu_parts), dtype=torch.uint8, device=setup.device)
        kv = plan.layer_views(gpu_rows, plan.gpu_blocks, setup.dtype)
        with stage_transfers(plan, gpu_rows) as (transfers, _):
            for batch in setup.decode_batches:
                yield measure_overlap(
                    self._stage,
                    plan,
                    kv,
                    transfers,
                    batch=batch,
                    context_tokens=setup.context_tokens,
                    load_share=0.95,
                    repeats=setup.repeats,
                    rng=self._rng,
                )

    def priority(self) -> list[PriorityRow]:
        setup = self.setup
        plan = setup.plan(KvLayout.BLOCK_FIRST, setup.block_tokens[0])
        batch = setup.decode_batches[-1]
        activation = RESIDUAL_STREAMS * batch * setup.model.hidden_size * setup.dtype.itemsize
        with _pools(plan, setup.device, setup.dtype) as (gpu_rows, host_rows, piece_blocks):
            return measure_priority(
                plan,
                gpu_rows,
                host_rows,
                piece_blocks=piece_blocks,
                activation_bytes=activation,
                prefetch_blocks=setup.prefetch_blocks,
                repeats=setup.repeats,
            )

    def _ways(
        self,
        phase: str,
        size: int,
        compute: Callable[[], None],
        places: TokenPlaces,
        plan: PoolPlan,
        gpu_rows: torch.Tensor,
        host_rows: torch.Tensor,
    ) -> Iterator[BreakdownRow]:
        setup = self.setup
        blocks, slots = places.blocks.tolist(), places.slots.tolist()
        host = {block: row for row, block in enumerate(dict.fromkeys(blocks))}
        table = np.array([(b, s, host[b]) for b, s in zip(blocks, slots, strict=True)], dtype=np.int32)
        for way in Way:
            yield measure_breakdown(
                phase,
                size,
                compute,
                Offloader(way, plan, gpu_rows, host_rows, table),
                device=setup.device,
                repeats=setup.repeats,
            )

    def _prompt_places(self, plan: PoolPlan, prompt_tokens: int) -> TokenPlaces:
        """Return the places of prompts of one length, on scattered blocks of their own."""
        block_tokens = plan.block.block_tokens
        num_prompts = max(1, self.setup.prefill_tokens // prompt_tokens)
        each = -(-prompt_tokens // block_tokens)
        tables = self._rng.permutation(plan.gpu_blocks)[: num_prompts * each].reshape(num_prompts, each)
        position = np.arange(prompt_tokens)
        return TokenPlaces(
            blocks=torch.from_numpy(tables[:, position // block_tokens].flatten()).to(self.setup.device),
            slots=torch.from_numpy(np.tile(position % block_tokens, num_prompts)).to(self.setup.device),
        )


@contextmanager
def _pools(
    plan: PoolPlan, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield GPU rows, host rows (pinned for a GPU), and the number of blocks in a registered piece."""
    values = torch.empty(plan.gpu_parts, plan.part.block_bytes // dtype.itemsize, dtype=dtype, device=device)
    gpu_rows = values.normal_(0.0, 0.5).view(torch.uint8)
    if device.type != "cuda":
        yield gpu_rows, torch.zeros(plan.part.pool_shape(plan.host_parts), dtype=torch.uint8), plan.host_parts
        return
    from pipemax.transfer.cuda.cuda_device import CudaHostRegistry  # needs cuda-core
    from pipemax.transfer.cuda.numa import numa_node_of_gpu
    from pipemax.transfer.cuda.pinned_pool import PinnedHostPool

    pool = PinnedHostPool(plan.part, plan.host_parts, CudaHostRegistry(), numa_node=numa_node_of_gpu(device))
    try:
        yield gpu_rows, pool.tensor, pool.piece_blocks
    finally:
        torch.cuda.synchronize(device)
        pool.close()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write all rows as JSON, after each section")
    parser.add_argument(
        "--sections",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        help="what to measure (default all)",
    )
    blocks = {"type": at_least_one, "metavar": "N"}
    parser.add_argument(
        "--gpu-blocks", default=17_700, help="GPU pool, 640 KiB each (default 17700)", **blocks
    )
    parser.add_argument("--host-blocks", default=20_000, help="host pool, likewise (default 20000)", **blocks)
    parser.add_argument(
        "--repeats",
        type=at_least_one,
        default=10,
        help="repetitions after one warm-up (default 10)",
    )
    return parser.parse_args(arguments)


def make_setup(options: argparse.Namespace, device: torch.device) -> Setup:
    """Return the setup of one of eight stages of LLaMA-2-70B."""
    return Setup(
        model=load_model("llama2-70b"),
        num_layers=10,
        device=device,
        dtype=torch.bfloat16,
        gpu_blocks=options.gpu_blocks,
        host_blocks=options.host_blocks,
        peak_bytes=1024 * MIB,
        prefetch_blocks=1250,
        block_tokens=(16, 32, 64),
        prompt_tokens=(1, 256),
        prefill_tokens=2048,
        decode_batches=(64, 128, 256, 384),
        context_tokens=512,
        repeats=options.repeats,
    )


Rows = dict[str, list[dict[str, Any]]]
"""Section → its rows."""


def run(bench: Bench, sections: list[str], on_section: Callable[[Rows], None] = lambda rows: None) -> Rows:
    """Measure and print each section; ``on_section`` gets all rows so far after each."""
    rows: Rows = {}
    for name in sections:
        measured = bench.section(name)
        print_table(name, measured)
        rows[name] = [asdict(row) for row in measured]
        on_section(rows)
    return rows


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # for the host pool's start time
    device = require_cuda("lab/bench/transfer.py")
    measured_on = environment(device, ["python", "lab/bench/transfer.py", *arguments])
    print(f"{measured_on}\nattention: {KERNEL_NAME}")

    def save(rows: Rows) -> None:
        if options.json:
            write_json(options.json, measured_on, {"attention": KERNEL_NAME, **rows})

    run(Bench(make_setup(options, device)), options.sections, save)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
