"""Measure how much a pipeline's sends suffer from prefetches, on one GPU.

    python -m lab.gpu.link [--json FILE] [--seconds S]

An activation of 4 or 12 MiB, or an input of 16 KiB, crosses the link while it is idle, and while 1 GB of KV blocks of
640 KiB is being prefetched by cudaMemcpyBatchAsync, in one call or in calls of so many blocks, all submitted at once or
paced: a thread keeps so many calls ahead of the link. The GPU's copy engine carries it, or the SMs do, which read and
write pinned memory as NCCL does without peer access. Times are the host's, from before the submission until the event
is done, as the next stage would wait. Prefetches are also measured in quarters of blocks, a group of layers after the
other.
"""

import argparse
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from cuda.bindings import runtime

from lab.gpu.criteria import Criterion, print_verdict
from lab.gpu.tables import environment, print_table, require_cuda, write_json

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = 640 * KIB
NUM_BLOCKS = 1600
COPY_ENGINE, SMS = "copy engine", "SMs"
INPUT, SMALL, LARGE = 16 * KIB, 4 * MIB, 12 * MIB
MOST_SLOWDOWN = 3.0
_SM_GROUPS = 16
"""Thread groups of a copy by the SMs; NCCL has 2 to 32 channels."""
_BYTES_PER_GROUP = 32 * KIB


@triton.jit
def _copy_words(target, source, num_words, BLOCK: tl.constexpr):  # noqa: N803
    to = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    from_ = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    for first in range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_inside = at < num_words
        words = tl.load(from_ + at, mask=is_inside, other=0, cache_modifier=".cv")
        tl.store(to + at, words, mask=is_inside)


def copy_by_sms(target: torch.Tensor, source: torch.Tensor, num_bytes: int) -> None:
    """Enqueue a copy of a multiple of 16 bytes on the current stream."""
    groups = min(_SM_GROUPS, max(1, num_bytes // _BYTES_PER_GROUP))
    assert num_bytes % 16 == 0, num_bytes
    _copy_words[(groups,)](target.data_ptr(), source.data_ptr(), num_bytes // 8, BLOCK=4096, num_warps=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A send, and what the link carries meanwhile."""

    way: str
    """``copy engine`` or ``SMs``."""
    num_bytes: int
    to_host: bool = False
    load: str = "idle"
    """``idle``, ``prefetches`` or ``stores``."""
    blocks_per_call: int = NUM_BLOCKS
    has_priority: bool = False
    """Of the send's stream over that of the KV copies."""
    calls_ahead: int | None = None
    """Calls that are submitted before the first of them has ended; None for all."""
    pieces_per_block: int = 1
    """Equal parts of a block: the first of all blocks is submitted before the second of any."""
    sends_per_load: int = 1
    repeats: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The times of one case."""

    way: str
    to: str
    kib: int
    load: str
    blocks_per_call: int | None
    calls_ahead: int | None
    pieces_per_block: int
    has_priority: bool
    sends: int
    """That were submitted while the load was under way."""
    median_us: float | None
    p90_us: float | None
    worst_us: float | None
    kv_gb_per_s: float | None
    submit_ms: float | None
    """Host time to submit the load."""


def cases() -> Iterator[Case]:
    """Yield what is measured, what the criteria need first."""
    ways = (COPY_ENGINE, SMS)
    for way in ways:
        yield from (Case(way=way, num_bytes=size) for size in (INPUT, SMALL, LARGE))
    for pieces in (1, 4, 10):
        for blocks in (NUM_BLOCKS, 32):
            case = {
                "load": "prefetches",
                "pieces_per_block": pieces,
                "blocks_per_call": blocks,
                "repeats": 10,
            }
            yield Case(way=SMS, num_bytes=INPUT, **case)  # for the rate of the prefetches
    for blocks, ahead in ((32, 1), (64, 1), (128, 1), (32, 2), (64, 2)):
        paced: dict[str, Any] = {"load": "prefetches", "blocks_per_call": blocks, "calls_ahead": ahead}
        for size in (INPUT, SMALL, LARGE):
            yield Case(way=COPY_ENGINE, num_bytes=size, has_priority=True, sends_per_load=5, **paced)
    for size in (INPUT, SMALL, LARGE):
        yield Case(way=SMS, num_bytes=size, load="prefetches", sends_per_load=5)
        yield Case(way=COPY_ENGINE, num_bytes=size, load="prefetches")
    for way in ways:
        yield from (Case(way=way, num_bytes=size, to_host=True) for size in (INPUT, SMALL, LARGE))
    for size in (SMALL, LARGE):
        yield Case(way=SMS, num_bytes=size, to_host=True, load="stores", sends_per_load=5)
    for size in (INPUT, LARGE):
        yield Case(way=COPY_ENGINE, num_bytes=size, to_host=True, load="stores", repeats=25)
    for way in ways:
        yield Case(way=way, num_bytes=LARGE, to_host=True, load="prefetches", sends_per_load=5, repeats=25)
    for blocks in (NUM_BLOCKS, 128, 32, 8):
        pieces: dict[str, Any] = {"load": "prefetches", "blocks_per_call": blocks, "repeats": 25}
        if blocks != NUM_BLOCKS:
            yield Case(way=COPY_ENGINE, num_bytes=SMALL, **pieces)
            yield Case(way=SMS, num_bytes=SMALL, sends_per_load=5, **pieces)
        for size in (INPUT, SMALL):
            yield Case(way=COPY_ENGINE, num_bytes=size, has_priority=True, **pieces)


class Link:
    """The buffers and streams on both sides of the link."""

    def __init__(self) -> None:
        self.gpu = torch.zeros(2 * NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8, device="cuda")
        self.host = torch.zeros(2 * NUM_BLOCKS * BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        self.here = torch.zeros(LARGE, dtype=torch.uint8, device="cuda")
        self.there = torch.randint(0, 255, (LARGE,), dtype=torch.uint8).pin_memory()
        least, most = torch.cuda.Stream.priority_range()
        self.send_streams = {False: torch.cuda.Stream(), True: torch.cuda.Stream(priority=min(least, most))}
        self.kv_streams = {False: torch.cuda.Stream(), True: torch.cuda.Stream(priority=max(least, most))}
        # Every second block, in any order: blocks lie apart on both sides.
        rng = np.random.default_rng(0)
        self.host_blocks, self.gpu_blocks = (2 * rng.permutation(NUM_BLOCKS) for _ in range(2))
        self.attributes = runtime.cudaMemcpyAttributes()
        order = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        self.attributes.srcAccessOrder = order

    def check_copies(self) -> None:
        """Raise ``AssertionError`` if copies by the SMs bring other bytes."""
        copy_by_sms(self.here, self.there, LARGE)
        torch.cuda.synchronize()
        assert torch.equal(self.here.cpu(), self.there)
        self.here.random_(0, 255)
        copy_by_sms(self.there, self.here, LARGE)
        torch.cuda.synchronize()
        assert torch.equal(self.here.cpu(), self.there)

    def submit_load(self, case: Case, stream: torch.cuda.Stream) -> float:
        """Submit all blocks. Return the host's seconds."""
        begin_s = time.perf_counter()
        piece_bytes = BLOCK_BYTES // case.pieces_per_block
        at = piece_bytes * np.arange(case.pieces_per_block)[:, None]
        on_host = (self.host.data_ptr() + BLOCK_BYTES * self.host_blocks + at).flatten().tolist()
        on_gpu = (self.gpu.data_ptr() + BLOCK_BYTES * self.gpu_blocks + at).flatten().tolist()
        targets, sources = (on_host, on_gpu) if case.load == "stores" else (on_gpu, on_host)
        ahead: deque[torch.cuda.Event] = deque()
        for first in range(0, len(targets), case.blocks_per_call):
            if case.calls_ahead is not None and len(ahead) == case.calls_ahead:
                ahead.popleft().synchronize()
            part = slice(first, first + case.blocks_per_call)
            size = len(targets[part])
            (status, *_) = runtime.cudaMemcpyBatchAsync(
                targets[part],
                sources[part],
                [piece_bytes] * size,
                size,
                [self.attributes],
                [0],
                1,
                stream.cuda_stream,
            )
            assert status == runtime.cudaError_t.cudaSuccess, status
            if case.calls_ahead is not None:
                ahead.append(torch.cuda.Event(blocking=True))
                ahead[-1].record(stream)
        return time.perf_counter() - begin_s

    def send(self, case: Case) -> float:
        """Send once. Return the seconds until it is there."""
        end, begin_s = torch.cuda.Event(), time.perf_counter()
        target, source = (self.there, self.here) if case.to_host else (self.here, self.there)
        with torch.cuda.stream(self.send_streams[case.has_priority]):
            if case.way == COPY_ENGINE:
                target[: case.num_bytes].copy_(source[: case.num_bytes], non_blocking=True)
            else:
                copy_by_sms(target, source, case.num_bytes)
            end.record()
        end.synchronize()
        return time.perf_counter() - begin_s

    def measure(self, case: Case) -> Measured:
        """Measure a case, after one round that does not count."""
        seconds, kv_gb_per_s, submit_s = [], [], []
        is_loaded = case.load != "idle"
        stream = self.kv_streams[case.has_priority]
        for number in range(-1, -(-case.repeats // case.sends_per_load)):
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

            def load(begin: torch.cuda.Event = begin, end: torch.cuda.Event = end) -> None:
                begin.record(stream)
                submit_s.append(self.submit_load(case, stream))
                end.record(stream)

            loading = threading.Thread(target=load)
            if is_loaded:
                loading.start()
                if case.calls_ahead is None:
                    loading.join()
                time.sleep(1e-3)  # the load is under way
            for _ in range(case.sends_per_load):
                is_under_way = not is_loaded or loading.is_alive() or not end.query()
                send_s = self.send(case)
                if number >= 0 and is_under_way:
                    seconds.append(send_s)
            if is_loaded:
                loading.join()
                end.synchronize()
                kv_gb_per_s.append(NUM_BLOCKS * BLOCK_BYTES / begin.elapsed_time(end) / 1e6)
        return summarize(case, seconds, kv_gb_per_s, submit_s)


def summarize(
    case: Case, seconds: Sequence[float], kv_gb_per_s: Sequence[float], submit_s: Sequence[float]
) -> Measured:
    """Return a case's row."""
    ordered = sorted(seconds)

    def us(share: float) -> float | None:
        return round(1e6 * ordered[int(share * (len(ordered) - 1))], 1) if ordered else None

    return Measured(
        way=case.way,
        to="host" if case.to_host else "GPU",
        kib=case.num_bytes // KIB,
        load=case.load,
        blocks_per_call=case.blocks_per_call if kv_gb_per_s else None,
        calls_ahead=case.calls_ahead,
        pieces_per_block=case.pieces_per_block,
        has_priority=case.has_priority,
        sends=len(ordered),
        median_us=us(0.5),
        p90_us=us(0.9),
        worst_us=us(1.0),
        kv_gb_per_s=round(median(kv_gb_per_s), 1) if kv_gb_per_s else None,
        submit_ms=round(1e3 * median(submit_s), 2) if submit_s else None,
    )


def judge(rows: Sequence[Measured]) -> list[Criterion]:
    """Compare what the SMs read next to prefetches with what they read while the link is idle."""
    criteria = []
    for size in (SMALL, LARGE):
        idle, loaded = (_median_us(rows, size, load) for load in ("idle", "prefetches"))
        criterion = f"SMs read {size // MIB} MiB next to prefetches in at most {MOST_SLOWDOWN:.0f} times the idle time"
        if idle is None or loaded is None:
            criteria.append(Criterion(criterion=criterion, figure="not measured", passed=False))
            continue
        figure = f"{loaded:,.0f} and {idle:,.0f} us: {loaded / idle:.2f}"
        criteria.append(Criterion(criterion=criterion, figure=figure, passed=loaded <= MOST_SLOWDOWN * idle))
    return criteria


def _median_us(rows: Sequence[Measured], num_bytes: int, load: str) -> float | None:
    wanted = (SMS, "GPU", num_bytes // KIB, load)
    return next((row.median_us for row in rows if (row.way, row.to, row.kib, row.load) == wanted), None)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write all rows as JSON")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no case after these (default 60)")
    options = parser.parse_args(arguments)
    begin_s = time.monotonic()
    device = require_cuda("lab/gpu/link.py")
    link, rows = Link(), list[Measured]()
    link.check_copies()
    for case in cases():
        if time.monotonic() - begin_s > options.seconds:
            print(f"left out: {case}", flush=True)
            continue
        rows.append(link.measure(case))
    if rows:
        print_table("sends next to KV copies", rows)
    if options.json:
        measured_on = environment(device, ["python", "-m", "lab.gpu.link", *arguments])
        write_json(options.json, measured_on, {"link": [asdict(row) for row in rows]})
    return 0 if print_verdict("link", judge(rows)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
