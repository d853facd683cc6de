"""Measure the Python that a step's copies cost on its critical path: on the scheduler, between processes, on a worker.

    python lab/bench/step_copies.py [--json FILE] [--steps N] [--prefetches N] [--stores N]

Each step prefetches blocks of parked requests of 32 blocks, and runs requests that each store one token; one in 16 of
those fills its block, which is stored whole. ``gather_ms`` is the scheduler's work, from requests to a message;
``encode_ms`` and ``decode_ms`` are its way to a worker by pickle; ``worker_ms`` is the worker's work before and after a
step: joining copies, the table of the kernel, addresses and checks. CUDA's own calls are not in it, but in
``lab/bench/transfer.py``. Times are CPU time of the thread: other processes of a shared machine lengthen that little.
"""

import argparse
import gc
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pipemax.domain.units import GpuBlockId
from pipemax.transfer.commands import StepCopies, TokenStore
from pipemax.transfer.cuda.copy_lists import PoolMap
from pipemax.transfer.cuda.device import Copy, Fence, KernelCall, Lane, Pool
from pipemax.transfer.cuda.launch_checks import check_tokens, token_table
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.transfer.layout import compact_layout
from pipemax.vllm_ext.scheduler.host_blocks import HostBlocks
from pipemax.vllm_ext.scheduler.step_copies import CopyGatherer

BLOCK_TOKENS = 16
PARKED_BLOCKS = 32
LAYOUT = compact_layout(num_layers=10, num_kv_heads=8, block_tokens=BLOCK_TOKENS, content_bytes=512)


class Tables:
    """Stands for ``GpuBlocks``: every request has the blocks that follow each other from its own first one."""

    def __init__(self, num_blocks: dict[str, int]) -> None:
        self._tables: dict[str, list[GpuBlockId]] = {}
        first = 0
        for request_id, count in num_blocks.items():
            self._tables[request_id] = [GpuBlockId(first + 7 * index % count) for index in range(count)]
            first += count
        self.num_blocks = first

    def kv_blocks(self, request_id: str, num_tokens: int) -> list[GpuBlockId]:
        return self._tables[request_id]

    def new_blocks(self, request_id: str, first: int, end: int) -> list[GpuBlockId]:
        return self._tables[request_id][first:end]

    def block(self, request_id: str, index: int, group: int = 0) -> GpuBlockId:
        return self._tables[request_id][index]


class Device:
    """Implements ``CopyDevice`` but for CUDA's calls: it resolves and checks addresses."""

    def __init__(self, num_gpu_blocks: int, num_host_blocks: int) -> None:
        self._pools = PoolMap(
            addresses={Pool.GPU: 1 << 40, Pool.HOST: 1 << 41},
            num_bytes={
                Pool.GPU: num_gpu_blocks * LAYOUT.block_bytes,
                Pool.HOST: num_host_blocks * LAYOUT.block_bytes,
            },
            host_piece_bytes=64 << 30,
        )

    def record(self, lane: Lane) -> object:
        return lane

    def wait(self, lane: Lane, event: object, reason: Fence) -> None:
        pass

    def is_done(self, event: object) -> bool:
        return True

    def elapsed_s(self, begin: object, end: object) -> float:
        return 0.0

    def copy(self, lane: Lane, copies: Iterable[Copy]) -> None:
        self._pools.resolve(copies)

    def give_way(self, lane: Lane) -> None:
        pass

    def launch(self, lane: Lane, call: KernelCall) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Steps:
    """Both sides of the steps, timed part by part."""

    def __init__(self, num_prefetches: int, num_stores: int) -> None:
        self._running = {
            f"running-{index}": PARKED_BLOCKS * BLOCK_TOKENS + index % 16 for index in range(num_stores)
        }
        self._parked = [f"parked-{index}" for index in range(num_prefetches // PARKED_BLOCKS)]
        blocks = dict.fromkeys(self._running, 64) | dict.fromkeys(self._parked, PARKED_BLOCKS)
        self._tables = Tables(blocks)
        self._host = HostBlocks(
            num_blocks=2 * self._tables.num_blocks, block_tokens=BLOCK_TOKENS, stores_tokens=True
        )
        for request_id in self._parked:
            self._host.extend(request_id, PARKED_BLOCKS * BLOCK_TOKENS, ())
        self._gatherer = CopyGatherer(cast(Any, self._tables), self._host, BLOCK_TOKENS)
        self._transfers = CudaTransfers(
            cast(Any, Device(self._tables.num_blocks, 2 * self._tables.num_blocks)),
            block_bytes=LAYOUT.block_bytes,
            make_token_store=self._token_store,
        )
        self.times_s: dict[str, list[float]] = {
            "gather_ms": [],
            "encode_ms": [],
            "decode_ms": [],
            "worker_ms": [],
        }

    def run(self) -> None:
        requests = {
            name: SimpleNamespace(num_computed_tokens=count, block_hashes=())
            for name, count in self._running.items()
        }
        copies = self._timed("gather_ms", self._gather, requests)
        message = self._timed("encode_ms", pickle.dumps, copies, pickle.HIGHEST_PROTOCOL)
        received = self._timed("decode_ms", pickle.loads, message)
        self._timed("worker_ms", self._carry_out, received)
        for name in self._running:
            self._running[name] += 1
            if self._running[name] == 64 * BLOCK_TOKENS:
                self._host.release(name)
                self._running[name] = PARKED_BLOCKS * BLOCK_TOKENS

    def _gather(self, requests: dict[str, Any]) -> StepCopies:
        for request_id in self._parked:
            self._gatherer.prefetch(request_id, 0, PARKED_BLOCKS, is_last=True)
        self._gatherer.store(requests, dict.fromkeys(requests, 1))
        return self._gatherer.take()

    def _carry_out(self, copies: StepCopies) -> None:
        self._transfers.begin_step(copies)
        self._transfers.start_prefetches(copies)
        self._transfers.end_step(copies)

    def _token_store(self, stores: Any) -> tuple[KernelCall, int]:
        tokens = token_table(stores)
        num_blocks = self._tables.num_blocks
        check_tokens(tokens, LAYOUT, num_gpu_blocks=num_blocks, num_host_blocks=2 * num_blocks)
        return cast(KernelCall, TokenStore), len(tokens) * LAYOUT.token_bytes

    def _timed(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        begin_s = time.thread_time()
        result = function(*arguments)
        self.times_s[name].append(time.thread_time() - begin_s)
        return result


def measure(num_prefetches: int, num_stores: int, num_steps: int) -> dict[str, dict[str, float]]:
    """Return the median and the 99th percentile of each part, in milliseconds."""
    steps = Steps(num_prefetches, num_stores)
    steps.run()
    for times in steps.times_s.values():  # the first step replicates whole prompts
        times.clear()
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        steps.run()
    gc.unfreeze()
    return {
        name: {
            "median": statistics.median(times) * 1e3,
            "p99": sorted(times)[int(0.99 * len(times))] * 1e3,
        }
        for name, times in steps.times_s.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures as JSON")
    parser.add_argument("--steps", type=int, default=400, help="steps timed (default 400)")
    parser.add_argument(
        "--prefetches", type=int, default=1_600, help="blocks prefetched in a step (default 1,600)"
    )
    parser.add_argument(
        "--stores", type=int, default=500, help="requests that store a token in a step (default 500)"
    )
    arguments = parser.parse_args()
    figures = measure(arguments.prefetches, arguments.stores, arguments.steps)
    for name, values in figures.items():
        print(f"{name:<10} median {values['median']:.3f}, p99 {values['p99']:.3f}")
    sums = {
        "scheduler": figures["gather_ms"]["median"] + figures["encode_ms"]["median"],
        "worker": figures["decode_ms"]["median"] + figures["worker_ms"]["median"],
    }
    for side, total in sums.items():
        print(f"{side}: {total:.3f} ms of a step")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
