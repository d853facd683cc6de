"""The device's seam over torch's streams and CUDA's copy calls. It decides nothing.

torch.cuda.Stream, Event    lanes and their order
cudaMemcpyBatchAsync        one call for many copies, if the driver has it (12.8): 0.5 µs of CPU each
cudaMemcpyAsync             one call per copy: about 3.5 µs of the link's time each
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
from cuda.bindings import runtime

from pipemax.domain.errors import TransferError
from pipemax.transfer.cuda.copy_lists import CopyList, PoolMap
from pipemax.transfer.cuda.device import Copy, DeviceEvent, Fence, KernelCall, Lane, Pool

_BATCH_COPY_VERSION = 12080
# torch does not type them.
_Event: Any = torch.cuda.Event
_Stream: Any = torch.cuda.Stream


class CopyCall(Enum):
    """The CUDA call by which a batch of copies is submitted."""

    BATCH = auto()
    SINGLE = auto()


class CudaDevice:
    """Implements ``CopyDevice``.

    ``COMPUTE`` is the calling thread's current stream, so the caller must be the model's thread.
    """

    def __init__(
        self,
        gpu_rows: torch.Tensor,
        host_rows: torch.Tensor,
        *,
        host_piece_bytes: int | None = None,
        copy_call: CopyCall | None = None,
    ) -> None:
        """Make the lanes between two pools of ``(num_blocks, block_bytes)`` bytes.

        ``host_rows`` is pinned, in pieces of ``host_piece_bytes`` if given. ``copy_call``: None takes the best that the
        driver has. ``ValueError`` if ``gpu_rows`` is not on a GPU.
        """
        if not gpu_rows.is_cuda:
            raise ValueError(f"the GPU pool is on {gpu_rows.device}, not on a CUDA device")
        self._device = gpu_rows.device
        self._gpu_rows, self.host_rows = gpu_rows, host_rows  # kept alive as long as copies may run
        self._pools = PoolMap(
            addresses={Pool.GPU: gpu_rows.data_ptr(), Pool.HOST: host_rows.data_ptr()},
            num_bytes={Pool.GPU: gpu_rows.numel(), Pool.HOST: host_rows.numel()},
            host_piece_bytes=host_piece_bytes,
        )
        self.copy_call = copy_call or best_copy_call()
        self._streams = {lane: _Stream(self._device) for lane in (Lane.PREFETCH, Lane.STORE)}

    def record(self, lane: Lane) -> DeviceEvent:
        event: DeviceEvent = _Event(enable_timing=True)
        with self._calls("record an event"):
            _torch_event(event).record(self.stream(lane))
        return event

    def wait(self, lane: Lane, event: DeviceEvent, reason: Fence) -> None:
        with self._calls(f"wait ({reason.name})"):
            self.stream(lane).wait_event(_torch_event(event))

    def is_done(self, event: DeviceEvent) -> bool:
        with self._calls("ask for an event"):
            return bool(_torch_event(event).query())

    def elapsed_s(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        with self._calls("ask for a time"):
            return float(_torch_event(begin).elapsed_time(_torch_event(end))) * 1e-3

    def copy(self, lane: Lane, copies: Iterable[Copy]) -> None:
        listed = self._pools.resolve(copies)
        stream = self.stream(lane).cuda_stream
        with self._calls("submit copies"):
            if self.copy_call is CopyCall.BATCH:
                _copy_batch(listed, stream)
            else:
                _copy_singly(listed, stream)

    def give_way(self, lane: Lane) -> None:
        stream, other = self.stream(lane), self._other_stream
        ended, passed = _Event(), _Event()
        with self._calls("let copies give way"):
            ended.record(stream)
            other.wait_event(ended)
            passed.record(other)
            stream.wait_event(passed)

    def launch(self, lane: Lane, call: KernelCall) -> None:
        with self._calls("launch a kernel"):
            call.launch(self.stream(lane).cuda_stream)

    def synchronize(self) -> None:
        with self._calls("finish copies"):
            for stream in self._streams.values():
                stream.synchronize()

    def stream(self, lane: Lane) -> torch.cuda.Stream:
        """Return the lane's stream, for uses that the seam does not cover."""
        return torch.cuda.current_stream(self._device) if lane is Lane.COMPUTE else self._streams[lane]

    @cached_property
    def _other_stream(self) -> Any:
        """Carries marks only."""
        return _Stream(self._device)

    @contextmanager
    def _calls(self, what: str) -> Iterator[None]:
        """Make this device current; ``TransferError`` for CUDA's errors, torch's ``RuntimeError``."""
        try:
            with torch.cuda.device(self._device):
                yield
        except RuntimeError as error:
            raise TransferError(f"CUDA could not {what}: {error}") from error


class CudaHostRegistry:
    """Implements ``HostRegistry``."""

    def register(self, address: int, num_bytes: int) -> None:
        flags = runtime.cudaHostRegisterPortable | runtime.cudaHostRegisterMapped
        _check(runtime.cudaHostRegister(address, num_bytes, flags), f"pin {num_bytes:,} bytes")

    def unregister(self, address: int) -> None:
        _check(runtime.cudaHostUnregister(address), "unpin memory")


def best_copy_call() -> CopyCall:
    """Return the best copy call that the driver has. ``TransferError`` without a driver."""
    (version,) = _check(runtime.cudaDriverGetVersion(), "ask for the driver's version")
    if version == 0:
        raise TransferError("this machine has no CUDA driver")
    return CopyCall.BATCH if version >= _BATCH_COPY_VERSION else CopyCall.SINGLE


def _copy_batch(copies: CopyList, stream: int) -> None:
    attributes = runtime.cudaMemcpyAttributes()
    # "Any" would let the driver read a source before the lane's earlier work has written it.
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    num_copies = len(copies.sizes)
    _check(
        runtime.cudaMemcpyBatchAsync(
            copies.targets, copies.sources, copies.sizes, num_copies, [attributes], [0], 1, stream
        ),
        f"submit {num_copies} copies",
    )


def _copy_singly(copies: CopyList, stream: int) -> None:
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    for target, source, size in zip(copies.targets, copies.sources, copies.sizes, strict=True):
        _check(
            runtime.cudaMemcpyAsync(target, source, size, kind, stream), f"submit a copy of {size:,} bytes"
        )


def _check(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Return a call's values without its status. ``TransferError`` unless that is success."""
    status, *values = result
    if status != runtime.cudaError_t.cudaSuccess:
        _, text = runtime.cudaGetErrorString(status)
        raise TransferError(f"CUDA could not {what}: {text.decode()} ({status.name})")
    return tuple(values)


def _torch_event(event: DeviceEvent) -> Any:
    assert isinstance(event, torch.cuda.Event), event
    return event
