"""A stage whose model reads and writes the KV of a random schedule: on a recording device, or on a real one."""

import random
from collections.abc import Callable, Sequence

import torch

from pipemax.transfer.checks.poisoned_prefetches import NAN_BYTE
from pipemax.transfer.commands import TokenStore
from pipemax.transfer.cuda.device import CopyDevice, Fence, KernelCall, Lane, Pool, Span
from pipemax.transfer.cuda.transfers import CudaTransfers, MakeTokenStore
from pipemax.transfer.layout import BlockLayout, compact_layout
from tests.fakes.kv_schedule import BLOCK_TOKENS, RandomSchedule, Run, Step
from tests.fakes.recording_device import FakeKernel, RecordingDevice

TINY = compact_layout(num_layers=1, num_kv_heads=1, block_tokens=BLOCK_TOKENS, content_bytes=4)
GROUPED = compact_layout(num_layers=3, num_kv_heads=1, block_tokens=BLOCK_TOKENS, content_bytes=4)
"""For waves of two groups: a layer, and two layers."""
GPU_BLOCKS, HOST_BLOCKS = 24, 40


class KvModel:
    """Writes a number of its own for each token, to each layer and head, and counts what it reads wrong.

    ``gpu_rows``: ``(num_blocks, block_bytes)`` bytes in a compact layout.
    """

    def __init__(self, gpu_rows: torch.Tensor, layout: BlockLayout) -> None:
        self._layout = layout
        # (num_blocks, layers, heads, tokens, content)
        shape = (-1, layout.num_layers, layout.num_kv_heads, layout.block_tokens, layout.content_bytes // 4)
        self._kv = gpu_rows.view(torch.int32).view(shape)
        self.num_wrong = torch.zeros((), dtype=torch.int64, device=gpu_rows.device)

    def step(self, run: Run, layers: slice = slice(None)) -> FakeKernel:
        """Compute some of the layers."""
        tokens = range(run.end_token)
        values = [owner * 1000 + token + 1 for owner, token in zip(run.owners, tokens, strict=True)]
        blocks = [run.gpu_blocks[token // BLOCK_TOKENS] for token in tokens]
        slots = [token % BLOCK_TOKENS for token in tokens]
        first = run.first_token

        def compute() -> None:
            at, slot, value = (self._to_device(numbers) for numbers in (blocks, slots, values))
            value = value.int().view(-1, 1, 1, 1)
            kv = self._kv[:, layers]
            self.num_wrong += (kv[at[:first], :, :, slot[:first]] != value[:first]).sum()
            kv[at[first:], :, :, slot[first:]] = value[first:]

        places = list(zip(blocks, slots, strict=True))
        return FakeKernel(
            token_spans(Pool.GPU, self._layout, places[:first], layers),
            token_spans(Pool.GPU, self._layout, places[first:], layers),
            compute,
        )

    def _to_device(self, numbers: list[int]) -> torch.Tensor:
        tensor = torch.tensor(numbers)
        if self._kv.is_cuda:  # from ordinary memory the copy would wait for the stream
            tensor = tensor.pin_memory().to(self._kv.device, non_blocking=True)
        return tensor


class KvStage:
    """Drives ``CudaTransfers`` through steps; ``go_on`` is called between its calls, for whatever happens meanwhile."""

    def __init__(
        self,
        rng: random.Random,
        device: CopyDevice,
        model: KvModel,
        *,
        layout: BlockLayout,
        make_token_store: MakeTokenStore | None,
        writes_through: bool,
        num_groups: int = 0,
        piece_bytes: int | None = None,
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """``num_groups``: of layers, in which steps with waves compute; 0 without waves."""
        self.device = device
        self.model = model
        self.schedule = RandomSchedule(
            rng,
            gpu_blocks=GPU_BLOCKS,
            host_blocks=HOST_BLOCKS,
            writes_through=writes_through,
            has_waves=num_groups > 0,
        )
        self._groups = layout.group_spans(num_groups) if num_groups else ()
        self.transfers = CudaTransfers(
            device,
            block_bytes=layout.block_bytes,
            make_token_store=make_token_store,
            groups=self._groups,
            piece_bytes=piece_bytes,
        )
        self._layer_bytes = layout.layer_stride_bytes
        self._go_on = go_on

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.run_step(self.schedule.next_step())

    def run_step(self, step: Step) -> None:
        self.transfers.begin_step(step.copies)
        self._go_on()
        self.transfers.start_prefetches(step.copies)
        self._go_on()
        if step.copies.in_groups:
            for group in range(len(self._groups)):
                self._run_group(step, group)
        else:
            self._launch(step.runs)
        self.transfers.end_step(step.copies)
        self._go_on()

    def _run_group(self, step: Step, group: int) -> None:
        first_byte, num_bytes = self._groups[group]
        first, size = first_byte // self._layer_bytes, -(-num_bytes // self._layer_bytes)
        self.transfers.begin_group(group)
        self._go_on()
        self._launch(step.runs, slice(first, first + size))
        self.transfers.end_group(step.copies, group)
        self._go_on()

    def _launch(self, runs: Sequence[Run], layers: slice = slice(None)) -> None:
        for run in runs:
            self.device.launch(Lane.COMPUTE, self.model.step(run, layers))
            self._go_on()

    @property
    def num_wrong(self) -> int:
        """Tokens that a step read and that were not what had been computed, times layers, heads and content."""
        return int(self.model.num_wrong)


class RecordedStage(KvStage):
    """On a recording device, where the copies and the GPU go on at random between two calls."""

    device: RecordingDevice

    def __init__(
        self,
        seed: int,
        *,
        dropped: Fence | None = None,
        writes_through: bool | None = None,
        has_waves: bool = False,
        piece_bytes: int | None = None,
    ) -> None:
        self._rng = rng = random.Random(seed)
        layout = GROUPED if has_waves else TINY
        block_bytes = layout.block_bytes
        device = RecordingDevice(
            gpu_blocks=GPU_BLOCKS, host_blocks=HOST_BLOCKS, block_bytes=block_bytes, dropped=dropped
        )
        for pool in Pool:
            device.memory[pool][:] = NAN_BYTE
        super().__init__(
            rng,
            device,
            KvModel(torch.from_numpy(device.memory[Pool.GPU]).view(-1, block_bytes), layout),
            layout=layout,
            make_token_store=fake_token_store(device, layout),
            writes_through=rng.random() < 0.5 if writes_through is None else writes_through,
            num_groups=2 if has_waves else 0,
            piece_bytes=piece_bytes,
            go_on=self._go_on_at_random,
        )

    def _go_on_at_random(self) -> None:
        for _ in range(self._rng.randint(0, 8)):
            self.device.advance(self._rng.choice(list(Lane)))


def fake_token_store(device: RecordingDevice, layout: BlockLayout) -> MakeTokenStore:
    """In the place of the kernel that stores single tokens."""

    def spans(pool: Pool, block: int, store: TokenStore) -> list[Span]:
        slots = range(store.first_slot, store.first_slot + store.num_slots)
        return token_spans(pool, layout, [(block, slot) for slot in slots])

    def make(stores: Sequence[TokenStore]) -> tuple[KernelCall, int]:
        sources = [span for store in stores for span in spans(Pool.GPU, store.source, store)]
        targets = [span for store in stores for span in spans(Pool.HOST, store.target, store)]

        def copy() -> None:
            for source, target in zip(sources, targets, strict=True):
                device.bytes_of(target)[:] = device.bytes_of(source)

        return FakeKernel(sources, targets, copy), sum(span.num_bytes for span in sources)

    return make


def token_spans(
    pool: Pool, layout: BlockLayout, places: Sequence[tuple[int, int]], layers: slice = slice(None)
) -> list[Span]:
    """The bytes of tokens at (block, slot): a run for each of the layers and for each head."""
    return [
        Span(
            pool,
            block * layout.block_bytes
            + layer * layout.layer_stride_bytes
            + head * layout.head_bytes
            + slot * layout.content_bytes,
            layout.content_bytes,
        )
        for block, slot in places
        for layer in range(layout.num_layers)[layers]
        for head in range(layout.num_kv_heads)
    ]
