"""CUDA over ordinary memory: what ``transfer.cuda`` calls of torch's streams and events and of CUDA's runtime.

The compute stream is the calling thread: what is enqueued there has run. Work on any other stream runs as late as CUDA
may run it, that is, when something waits for it. So bytes that are read without a wait are not there yet. A copy to the
GPU's pool whose stream has nothing else to do begins at once, and its target is NaN until it ends.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime

from pipemax.transfer.cuda.launch_checks import TokenTable, check_pool, check_tokens
from pipemax.transfer.layout import BlockLayout

POISON = 0xFF
"""All bits set is NaN in every KV dtype."""
_SUCCESS = runtime.cudaError_t.cudaSuccess


class LateEvent:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._stream = COMPUTE
        self.done_s: float | None = None

    def record(self, stream: "LateStream") -> None:
        self._stream, self.done_s = stream, None
        stream.submit(self._finish)

    def query(self) -> bool:
        return self.done_s is not None

    def run(self) -> None:
        """Run what the event is behind."""
        while self.done_s is None:
            self._stream.run_next()

    def elapsed_time(self, end: "LateEvent") -> float:
        assert self.done_s is not None, "elapsed time of an event that is not done"
        assert end.done_s is not None, "elapsed time of an event that is not done"
        return (end.done_s - self.done_s) * 1e3

    def _finish(self) -> None:
        self.done_s = time.perf_counter()


class LateStream:
    """``torch.cuda.Stream``."""

    by_handle: dict[int, "LateStream"] = {}  # noqa: RUF012  # of the process, as CUDA's are

    def __init__(self, device: object = None) -> None:
        self.cuda_stream = len(self.by_handle) + 1
        self.by_handle[self.cuda_stream] = self
        self._todo: deque[LateEvent | Callable[[], None]] = deque()
        """Events to wait for, and work."""

    @property
    def is_idle(self) -> bool:
        """Whether what is submitted now can begin."""
        while self._todo and isinstance(event := self._todo[0], LateEvent) and event.query():
            self._todo.popleft()
        return not self._todo

    def submit(self, work: Callable[[], None]) -> None:
        self._todo.append(work)

    def wait_event(self, event: LateEvent) -> None:
        self._todo.append(event)

    def run_next(self) -> None:
        todo = self._todo.popleft()
        if isinstance(todo, LateEvent):
            todo.run()
        else:
            todo()

    def synchronize(self) -> None:
        while self._todo:
            self.run_next()


class _ComputeStream(LateStream):
    def submit(self, work: Callable[[], None]) -> None:
        work()

    def wait_event(self, event: LateEvent) -> None:
        event.run()


COMPUTE = _ComputeStream()


class LateRuntime:
    """CUDA's calls that need a device; all others are the real ones."""

    def __init__(self) -> None:
        self._pinned: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(runtime, name)

    def cudaDriverGetVersion(self) -> tuple[Any, int]:  # noqa: N802
        return _SUCCESS, 13000

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[Any]:  # noqa: N802
        self._pinned[address] = num_bytes
        return (_SUCCESS,)

    def cudaHostUnregister(self, address: int) -> tuple[Any]:  # noqa: N802
        del self._pinned[address]
        return (_SUCCESS,)

    def cudaMemcpyBatchAsync(  # noqa: N802
        self, targets: list[int], sources: list[int], sizes: list[int], count: int, *more: Any
    ) -> tuple[Any]:
        stream = LateStream.by_handle[more[-1]]
        copies = [*zip(targets, sources, sizes, strict=True)]
        assert len(copies) == count
        assert all(
            self._is_pinned(target, size) != self._is_pinned(source, size) for target, source, size in copies
        )
        if stream.is_idle and not self._is_pinned(targets[0], sizes[0]):
            for target, _, size in copies:
                ctypes.memset(target, POISON, size)

        def copy() -> None:
            for target, source, size in copies:
                ctypes.memmove(target, source, size)

        stream.submit(copy)
        return (_SUCCESS,)

    def _is_pinned(self, address: int, num_bytes: int) -> bool:
        return any(
            begin <= address and address + num_bytes <= begin + size for begin, size in self._pinned.items()
        )


class WholeBlockKernels:
    """In place of ``KvKernels``: stores whole blocks, for attention on a CPU mixes a block's tokens."""

    def __init__(self, device: torch.device) -> None:
        pass

    def offload_tokens(
        self, gpu_rows: torch.Tensor, host_rows: torch.Tensor, layout: BlockLayout, tokens: TokenTable
    ) -> SimpleNamespace:
        check_pool("GPU", gpu_rows, layout)
        check_pool("host", host_rows, layout)
        check_tokens(tokens, layout, num_gpu_blocks=len(gpu_rows), num_host_blocks=len(host_rows))
        pairs = np.unique(tokens[:, [0, 2]], axis=0)

        def store() -> None:
            host_rows.numpy()[pairs[:, 1]] = gpu_rows.numpy()[pairs[:, 0]]

        return SimpleNamespace(launch=lambda stream: LateStream.by_handle[stream].submit(store))


class OnGpu(torch.Tensor):
    """Ordinary memory that says that it is a GPU's."""

    is_cuda = True


def put_in_place_of_cuda() -> None:
    """For the rest of this process: it is a worker's."""
    from pipemax.transfer.cuda import assemble, cuda_device

    replaced: Any = cuda_device
    replaced._Event, replaced._Stream, replaced.runtime = LateEvent, LateStream, LateRuntime()
    replaced.torch = SimpleNamespace(
        cuda=SimpleNamespace(
            Event=LateEvent, current_stream=lambda device: COMPUTE, device=lambda device: nullcontext()
        )
    )
    replaced = assemble
    replaced.torch = SimpleNamespace(cuda=SimpleNamespace(set_device=lambda device: None))
    replaced.numa_node_of_gpu = lambda device: None
    replaced.KvKernels = WholeBlockKernels
