"""A stage whose model reads and writes the KV of a random schedule through a recording device."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from pipemax.transfer.commands import TokenStore
from pipemax.transfer.cuda.backend import CudaTransfers
from pipemax.transfer.cuda.device import Fence, KernelCall, Lane, Pool, Span
from pipemax.transfer.cuda.queue import ChunkQueue, CopyLimits
from pipemax.transfer.cuda.submitter import Submitter
from tests.fakes.kv_schedule import BLOCK_TOKENS, RandomSchedule, Run, Step
from tests.fakes.recording_device import FakeKernel, RecordingDevice

TOKEN_BYTES = 4
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
GPU_BLOCKS, HOST_BLOCKS = 24, 40


class KvStage:
    """Drives ``CudaTransfers`` through ``num_steps`` steps; between its calls the copies and the GPU go on at will."""

    def __init__(
        self,
        seed: int,
        *,
        dropped: Fence | None = None,
        writes_through: bool | None = None,
        queue_type: Callable[..., ChunkQueue] = ChunkQueue,
        threaded: bool = False,
    ) -> None:
        self._rng = random.Random(seed)
        if writes_through is None:
            writes_through = self._rng.random() < 0.5
        self.schedule = RandomSchedule(
            self._rng, gpu_blocks=GPU_BLOCKS, host_blocks=HOST_BLOCKS, writes_through=writes_through
        )
        self.device = RecordingDevice(
            gpu_blocks=GPU_BLOCKS, host_blocks=HOST_BLOCKS, block_bytes=BLOCK_BYTES, dropped=dropped
        )
        limits = CopyLimits(chunk_bytes=3 * BLOCK_BYTES, in_flight_bytes=6 * BLOCK_BYTES)
        self.queue = queue_type(self.device, limits)
        self.submitter = Submitter(self.queue) if threaded else None
        self.transfers = CudaTransfers(
            self.device,
            self.queue,
            block_bytes=BLOCK_BYTES,
            make_token_store=self._token_store,
            submitter=self.submitter,
        )

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.run_step(self.schedule.next_step())

    def run_step(self, step: Step) -> None:
        self.transfers.begin_step(step.copies)
        self._go_on()
        for run in step.runs:
            self.device.launch(Lane.COMPUTE, self._model(run))
            self._go_on()
        self.transfers.end_step(step.copies)
        if self._rng.random() < 0.5:
            sent = self.device.foreign_event()
            self.transfers.hold_for_send(sent)
            self._go_on()
            self.device.finish(sent)
        self._go_on()

    def _go_on(self) -> None:
        for _ in range(self._rng.randint(0, 8)):
            if self._rng.random() < 0.4 and self.submitter is None:
                self.queue.pump()
            else:
                self.device.advance(self._rng.choice(list(Lane)))

    def _model(self, run: Run) -> FakeKernel:
        """Reads what it attends to, which must be what was computed, and writes its new tokens."""
        spans = [
            Span(Pool.GPU, (block * BLOCK_TOKENS + slot) * TOKEN_BYTES, TOKEN_BYTES)
            for block in run.gpu_blocks
            for slot in range(BLOCK_TOKENS)
        ][: run.end_token]

        def compute() -> None:
            for token in range(run.first_token):
                found = int(self.device.bytes_of(spans[token]).view(np.int32)[0])
                expected = _value(run.owners[token], token)
                assert found == expected, (
                    f"sequence {run.sequence_id}, token {token}: {found}, not {expected}"
                )
            for token in range(run.first_token, run.end_token):
                self.device.bytes_of(spans[token]).view(np.int32)[0] = _value(run.owners[token], token)

        return FakeKernel(spans[: run.first_token], spans[run.first_token :], compute)

    def _token_store(self, stores: Sequence[TokenStore]) -> tuple[KernelCall, int]:
        sources = [_slots(Pool.GPU, store.source, store) for store in stores]
        targets = [_slots(Pool.HOST, store.target, store) for store in stores]

        def copy() -> None:
            for source, target in zip(sources, targets, strict=True):
                self.device.bytes_of(target)[:] = self.device.bytes_of(source)

        return FakeKernel(sources, targets, copy), sum(span.num_bytes for span in sources)


def _slots(pool: Pool, block: int, store: TokenStore) -> Span:
    first = (block * BLOCK_TOKENS + store.first_slot) * TOKEN_BYTES
    return Span(pool, first, store.num_slots * TOKEN_BYTES)


def _value(sequence_id: int, token: int) -> int:
    return sequence_id * 1000 + token + 1
