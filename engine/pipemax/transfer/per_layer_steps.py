"""A stage's steps with the paper's offload (Section 3.4.2): new KV leaves layer by layer, the CPU packs it.

    model's thread   begin_step … start_prefetches … save_layer(0) … save_layer(1) … … end_step
    each layer       gather its new tokens from their blocks, behind its kernels → staging, pinned
    packing thread   once all layers of a step are staged: staging → rows of the host pool

Prefetches, saves and what staging cannot hold are copied the ordinary way (``inner``), whose fences know nothing of
the packing thread. So there is one more rule, for which the caller waits: before a step's other copies touch a host
block, what earlier steps put into it must be packed. A request's KV is seldom prefetched right after the step that made
it, so such waits are rare.

A block's tokens are taken from the cache, not from the QKV projection itself: vLLM's hook comes after each layer's
attention. With kernels that order a block's tokens in their own way, only whole blocks may be copied; all slots of a
block together are the block, in any order.
"""

import time
from dataclasses import replace
from itertools import chain

import torch

from pipemax.domain.errors import TransferError
from pipemax.transfer.backend import StepTransfers
from pipemax.transfer.commands import CopyCounts, StepCopies, StepWait, TokenStore
from pipemax.transfer.cuda.launch_checks import TokenTable, check_tokens, token_table
from pipemax.transfer.layout import BlockLayout, layer_views
from pipemax.transfer.packing import PackingThread
from pipemax.transfer.per_layer import PerLayerOffload


class PerLayerSteps:
    """Implements ``StepTransfers`` over another one, and adds ``save_layer`` for each layer of a step."""

    packing_type: type[PackingThread] = PackingThread
    """Tests put a faulty one here."""

    def __init__(
        self,
        inner: StepTransfers,
        layout: BlockLayout,
        gpu_rows: torch.Tensor,
        host_rows: torch.Tensor,
        *,
        max_tokens: int,
        steps_in_flight: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Allocate staging and start the packing thread.

        ``gpu_rows``, ``host_rows``: ``(num_blocks, block_bytes)`` bytes, the pools of ``inner``. ``max_tokens``: how
        many tokens of one step staging holds; it takes ``steps_in_flight + 1`` times their bytes, pinned. ``stream``:
        where ``inner`` stores, ``None`` for CPU tensors.
        """
        self.inner = inner
        self._layout = layout
        self._layers = layer_views(gpu_rows, layout, torch.uint8)
        self._num_blocks = (len(gpu_rows), len(host_rows))
        self._max_tokens = max_tokens
        stagings = [self._make_staging(stream) for _ in range(steps_in_flight + 1)]
        self._packing = self.packing_type(host_rows, stagings)
        self._staging: PerLayerOffload | None = None  # of the current step, if it stores anything
        self._tokens: TokenTable = token_table(())
        self._blocks = self._slots = torch.empty(0, dtype=torch.int64)
        self._saved_layers: set[int] = set()
        self._rest = StepCopies()
        self._packed_bytes = 0

    @property
    def counts(self) -> CopyCounts:
        counts = self.inner.counts
        return replace(
            counts, stored_bytes=counts.stored_bytes + self._packed_bytes, packed_bytes=self._packed_bytes
        )

    def begin_step(self, copies: StepCopies) -> StepWait:
        self._tokens, self._rest = self._split(copies)
        self._saved_layers.clear()
        begin_s = time.perf_counter()
        self._packing.wait_for(
            [prefetch.source for prefetch in chain(copies.prefetches, copies.later_prefetches)]
            + [store.target for store in chain(self._rest.saves, self._rest.stores)]
            + [store.target for store in self._rest.token_stores]
        )
        if len(self._tokens):
            self._staging = self._packing.take_staging()
            table = self._to_device(torch.from_numpy(self._tokens).long())
            self._blocks, self._slots = table[:, 0], table[:, 1]
        waited_s = time.perf_counter() - begin_s
        wait = self.inner.begin_step(self._rest)
        return replace(wait, stall_s=wait.stall_s + waited_s)

    def start_prefetches(self, copies: StepCopies) -> None:
        self.inner.start_prefetches(self._rest)

    def save_layer(self, layer: int) -> None:
        """Copy a layer's new KV, whose kernels are enqueued or have run. Layers come in any order, each once."""
        if self._staging is None:
            return
        half = self._layout.content_bytes // 2
        cache = self._layers[layer]
        # (num_tokens, kv_heads, half the content): copied out of the blocks, so that these may change at once
        keys = cache[self._blocks, :, self._slots, :half]
        values = cache[self._blocks, :, self._slots, half:]
        self._staging.offload_layer(layer, keys, values)
        self._saved_layers.add(layer)

    def end_step(self, copies: StepCopies) -> None:
        if self._staging is not None:
            if len(self._saved_layers) < len(self._layers):
                raise TransferError(
                    f"only {len(self._saved_layers)} of {len(self._layers)} layers told of their new KV, as where full "
                    "CUDA graphs bypass vLLM's hook: set kv_offload after_step, or cudagraph_mode PIECEWISE"
                )
            self._packing.submit(self._staging, self._tokens)
            self._packed_bytes += len(self._tokens) * self._layout.token_bytes
            self._staging = None
        self.inner.end_step(self._rest)

    def close(self) -> None:
        """Finish packing. The owner of ``inner`` closes that, after this."""
        self._packing.close()

    def _make_staging(self, stream: torch.cuda.Stream | None) -> PerLayerOffload:
        """Make the staging of one step; tests put a slow one here."""
        return PerLayerOffload(self._layout, torch.uint8, max_tokens=self._max_tokens, stream=stream)

    def _split(self, copies: StepCopies) -> tuple[TokenTable, StepCopies]:
        """Return what is copied by layer, as much as staging holds, and the rest of the step's copies.

        A step has more new KV than tokens to compute only if it found a prefix's KV on the GPU that the host lacks.
        """
        block_tokens = self._layout.block_tokens
        num_single = sum(store.num_slots for store in copies.token_stores)
        single = copies.token_stores if num_single <= self._max_tokens else ()
        num_blocks = (self._max_tokens - num_single if single else self._max_tokens) // block_tokens
        whole = [
            TokenStore(store.source, store.target, first_slot=0, num_slots=block_tokens)
            for store in copies.stores[:num_blocks]
        ]
        tokens = token_table((*single, *whole))
        num_gpu_blocks, num_host_blocks = self._num_blocks
        check_tokens(tokens, self._layout, num_gpu_blocks=num_gpu_blocks, num_host_blocks=num_host_blocks)
        beyond = () if single else copies.token_stores
        return tokens, replace(copies, stores=copies.stores[num_blocks:], token_stores=beyond)

    def _to_device(self, numbers: torch.Tensor) -> torch.Tensor:
        device = self._layers[0].device
        if device.type == "cpu":
            return numbers
        return numbers.pin_memory().to(device, non_blocking=True)
