"""The thin seam to a CUDA device: three lanes of work, events that order them, copies and kernels on them.

Everything above this seam says which bytes of which pool it reads and writes, and names each wait after the hazard
that it prevents. So a device that only records its calls can prove that no two conflicting accesses are unordered, and
a test can take any one fence away. This module knows nothing of blocks, steps or requests.

    # one pool, block-first: block b is the bytes [b · block_bytes, (b + 1) · block_bytes)
"""

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol


class Pool(Enum):
    """The two memories between which KV moves."""

    GPU = auto()
    HOST = auto()
    """Pinned, and mapped into the device's addresses."""


class Lane(Enum):
    """A queue of work. Work on one lane runs in the order of its submission; lanes run in parallel."""

    COMPUTE = auto()
    """The model's own stream: the current one of the thread that runs the model."""
    PREFETCH = auto()
    """Host → GPU."""
    STORE = auto()
    """GPU → host: copies, and kernels that write to the host."""


class Fence(Enum):
    """A wait of one lane for an event of another. Each is needed: without it some step's bytes are wrong."""

    COMPUTE_AFTER_PREFETCH = auto()
    """A step reads, or overwrites, blocks that earlier steps' prefetches write."""
    COMPUTE_AFTER_STORE = auto()
    """A step overwrites blocks that were freed while a store still reads them."""
    PREFETCH_AFTER_COMPUTE = auto()
    """A prefetch overwrites blocks that earlier steps' kernels still use."""
    GROUP_AFTER_WAVE = auto()
    """A group of layers reads, or overwrites, blocks that an earlier step's wave writes there."""
    WAVE_AFTER_GROUP = auto()
    """A wave overwrites, in a group of layers, blocks that its own step reads there."""
    PREFETCH_AFTER_STORE = auto()
    """A prefetch reads host blocks that a store still writes, or overwrites blocks that a store still reads."""
    STORE_AFTER_COMPUTE = auto()
    """A store reads what its step computes."""
    SAVE_AFTER_COMPUTE = auto()
    """A save, made before its step computes, reads what earlier steps computed."""


class Span(NamedTuple):
    """The bytes ``[first_byte, first_byte + num_bytes)`` of a pool."""

    pool: Pool
    first_byte: int
    num_bytes: int


class Copy(NamedTuple):
    """One contiguous copy; both spans have the same length."""

    source: Span
    target: Span


class DeviceEvent(Protocol):
    """A mark on a lane, done once all work submitted to the lane before it is done. Opaque to its users."""


class KernelCall(Protocol):
    """A kernel with its arguments, already checked; it runs where the device puts it."""

    def launch(self, stream: int) -> None:
        """Enqueue it on a CUDA stream, given by its handle; returns at once."""

    def reads(self) -> Sequence[Span]:
        """Return the spans of the pools that it reads. Only the checker asks, so it may be slow."""

    def writes(self) -> Sequence[Span]:
        """Return the spans of the pools that it writes, as for ``reads``."""


class CopyDevice(Protocol):
    """One GPU and its two pools. All methods but ``synchronize`` return at once.

    ``TransferError`` if CUDA refuses, or reports that something submitted earlier has failed.
    """

    def record(self, lane: Lane) -> DeviceEvent:
        """Put a mark behind everything on the lane."""

    def wait(self, lane: Lane, event: DeviceEvent, reason: Fence) -> None:
        """Have all later work on the lane run after the event; the caller does not wait."""

    def is_done(self, event: DeviceEvent) -> bool:
        """Tell whether the event is done, without waiting."""

    def elapsed_s(self, begin: DeviceEvent, end: DeviceEvent) -> float:
        """Return the seconds between two events that are done, by the device's clock."""

    def copy(self, lane: Lane, copies: Iterable[Copy]) -> None:
        """Enqueue copies, in no order among themselves, behind everything on the lane.

        The sources are read in the lane's order, never earlier. ``ValueError`` if a span leaves its pool or two
        lengths differ.
        """

    def give_way(self, lane: Lane) -> None:
        """Have later copies on the lane begin only after the lane's copy engine was free for a moment.

        Copies of other streams that wait for the engine then go first. It orders nothing between lanes.
        """

    def launch(self, lane: Lane, call: KernelCall) -> None:
        """Enqueue a kernel behind everything on the lane."""

    def synchronize(self) -> None:
        """Wait until everything on the prefetch and the store lane is done."""


class HostRegistry(Protocol):
    """Pins memory that is already allocated. ``TransferError`` if the system refuses."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin it, for all devices, and map it into their addresses."""

    def unregister(self, address: int) -> None:
        """Undo one earlier ``register``."""
