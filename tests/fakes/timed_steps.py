"""A stage's steps on a timed device, by a host that runs some steps ahead of it."""

from dataclasses import dataclass

from pipemax.domain.units import GpuBlockId, HostBlockId
from pipemax.transfer.commands import BlockPrefetch, BlockStore, PrefetchTiming, StepCopies
from pipemax.transfer.cuda.device import Copy, Fence, Lane, Pool, Span
from pipemax.transfer.cuda.transfers import CudaTransfers
from pipemax.transfer.layout import LayerSpan
from tests.fakes.timed_device import Costs, Stream, TimedDevice, TimedEvent, TimedKernel, Work


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """What one step computes and copies; copies in blocks."""

    compute_s: float
    prefetches: int = 0
    later_prefetches: int = 0
    wave: int = 0
    """Blocks that the step overwrites behind its computation; only where it computes in groups."""
    saves: int = 0
    stores: int = 0
    store_fence: int | None = None
    sent_bytes: int = 1
    """Activations."""
    received_bytes: int = 0
    """Activations of the stage before, which come by the copy engine; 0 for a first stage."""
    before_s: float = 0.0
    """How long the stage before computes the step."""
    input_bytes: int = 0
    """Token ids, block tables and the like, which the runner copies to the GPU before the forward pass."""


@dataclass(frozen=True, kw_only=True)
class RanStep:
    """The same step's work, with its times."""

    inputs: list[Work]
    compute: Work
    """Of a step in groups, the last group's."""
    groups: list[Work]
    """What it computes: one piece of work, or one for each group of layers."""
    waves: list[Work]
    """By group."""
    prefetches: list[Work]
    later_prefetches: list[Work]
    saves: list[Work]
    stores: list[Work]
    send: Work
    received: Work | None
    """By the copy engine; its ``submitted_s`` is when the stage before had computed them."""


class TimedSteps:
    """``steps_ahead``: a step is submitted as soon as the device has computed all but so many of those before it.

    ``num_groups``: of layers, in which all steps compute; 0 for steps without groups.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        steps_ahead: int,
        costs: Costs | None = None,
        dropped: Fence | None = None,
        num_groups: int = 0,
        piece_bytes: int | None = None,
    ) -> None:
        self.device = TimedDevice(costs or Costs(), dropped)
        size = block_bytes // max(1, num_groups)
        self._groups = [LayerSpan(group * size, size) for group in range(num_groups)]
        self._transfers = CudaTransfers(
            self.device, block_bytes=block_bytes, groups=self._groups, piece_bytes=piece_bytes
        )
        self._block_bytes = block_bytes
        self._steps_ahead = steps_ahead
        self._next_block = 0
        self._inputs: dict[int, list[Work]] = {}
        self._received: dict[int, Work] = {}
        self._kernels: list[list[Work]] = []
        self._computed: list[TimedEvent] = []
        self._sent = TimedEvent()
        self.prefetch_timings: list[PrefetchTiming] = []
        """As reported to the estimator."""
        self.stall_s = 0.0
        """As reported."""

    def run(self, steps: list[TimedStep], *, host_s: float = 1e-3) -> list[RanStep]:
        """Run them; enqueuing the kernels of one takes the host ``host_s``. Blocks never repeat."""
        copies = [self._submit(index, step, host_s) for index, step in enumerate(steps)]
        self.device.host_waits_for(self._sent)
        self._transfers.close()
        return [self._ran(index, copied) for index, copied in enumerate(copies)]

    def _submit(self, index: int, step: TimedStep, host_s: float) -> StepCopies:
        if len(self._computed) > self._steps_ahead:
            self.device.host_waits_for(self._computed[-1 - self._steps_ahead])
        copies = StepCopies(
            prefetches=self._prefetches(step.prefetches),
            later_prefetches=self._prefetches(step.later_prefetches),
            wave_prefetches=self._prefetches(step.wave),
            in_groups=bool(self._groups),
            saves=self._stores(step.saves),
            stores=self._stores(step.stores),
            store_fence=step.store_fence,
        )
        wait = self._transfers.begin_step(copies)
        self.prefetch_timings += wait.prefetches
        self.stall_s += wait.stall_s
        if step.input_bytes:
            inputs = Copy(Span(Pool.HOST, 0, step.input_bytes), Span(Pool.GPU, 0, step.input_bytes))
            self.device.copy(Lane.COMPUTE, [inputs])
            self._inputs[index] = [self.device.ran[Lane.COMPUTE][-1]]
        if step.received_bytes:
            # vLLM has the compute lane wait for them before the forward pass, and so before the prefetches start.
            self.device.wait(Lane.COMPUTE, self._receive(index, step), "the stage before")
        self._transfers.start_prefetches(copies)
        self.device.host_works(host_s)
        self._kernels.append(self._compute(step, copies))
        self._computed.append(self.device.record(Lane.COMPUTE))
        self._transfers.end_step(copies)
        self._sent = self.device.send(step.sent_bytes, after=self._computed[-1])
        return copies

    def _receive(self, index: int, step: TimedStep) -> TimedEvent:
        arrived = self.device.receive(step.received_bytes, after_s=step.before_s)
        self._received[index] = self.device.ran[Stream.RECEIVE][-1]
        return arrived

    def _compute(self, step: TimedStep, copies: StepCopies) -> list[Work]:
        kernels = []
        for group in range(max(1, len(self._groups))):
            if self._groups:
                self._transfers.begin_group(group)
            seconds = step.compute_s / max(1, len(self._groups))
            self.device.launch(Lane.COMPUTE, TimedKernel(seconds=seconds))
            kernels.append(self.device.ran[Lane.COMPUTE][-1])
            if self._groups:
                self._transfers.end_group(copies, group)
        return kernels

    def _prefetches(self, count: int) -> tuple[BlockPrefetch, ...]:
        return tuple(BlockPrefetch(HostBlockId(b), GpuBlockId(b)) for b in self._take(count))

    def _stores(self, count: int) -> tuple[BlockStore, ...]:
        return tuple(BlockStore(GpuBlockId(b), HostBlockId(b)) for b in self._take(count))

    def _take(self, count: int) -> range:
        """Every other block, so that no two copies become one."""
        blocks = range(self._next_block, self._next_block + 2 * count, 2)
        self._next_block += 2 * count
        return blocks

    def _ran(self, index: int, copies: StepCopies) -> RanStep:
        prefetched, stored = self.device.ran[Lane.PREFETCH], self.device.ran[Lane.STORE]
        return RanStep(
            inputs=self._inputs.get(index, []),
            compute=self._kernels[index][-1],
            groups=self._kernels[index],
            waves=[work for span in self._groups for work in self._part(prefetched, copies, span)],
            prefetches=self._of(prefetched, copies.prefetches),
            later_prefetches=self._of(prefetched, copies.later_prefetches),
            saves=self._of(stored, copies.saves),
            stores=self._of(stored, copies.stores),
            send=self.device.ran[Stream.SEND][index],
            received=self._received.get(index),
        )

    def _part(self, works: list[Work], copies: StepCopies, span: LayerSpan) -> list[Work]:
        first_bytes = {copy.source * self._block_bytes + span.first_byte for copy in copies.wave_prefetches}
        return [work for work in works if first_bytes.intersection(work.blocks)]

    def _of(
        self, works: list[Work], copies: tuple[BlockPrefetch, ...] | tuple[BlockStore, ...]
    ) -> list[Work]:
        first_bytes = {copy.source * self._block_bytes for copy in copies}
        return [work for work in works if first_bytes.intersection(work.blocks)]
