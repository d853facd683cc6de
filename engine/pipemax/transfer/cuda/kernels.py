"""The KV kernels of ``transfer/csrc``, ready to launch on one GPU.

Each call is checked when it is made (``launch_checks``), on the thread that makes it, and is a ``KernelCall`` of the
device's seam, which can be launched anywhere later. ``tests/gpu/kernel_reference.py`` computes the same in torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cuda.core import Device, Kernel, LaunchConfig, ObjectCode, Stream, launch

from pipemax.domain.errors import TransferError
from pipemax.transfer.cuda.compile import compile_kernels
from pipemax.transfer.cuda.device import Pool, Span
from pipemax.transfer.cuda.launch_checks import (
    Geometry,
    TokenTable,
    check_devices,
    check_pool,
    check_tokens,
    token_geometry,
)
from pipemax.transfer.layout import BlockLayout

Argument = int | np.int32 | np.int64
"""An address, or a number of the width that the kernel declares for it."""


class KvKernels:
    """The kernels, compiled for one device (at first use on a machine, which takes about half a second)."""

    def __init__(self, device: torch.device) -> None:
        """Compile the kernels. ``TransferError`` if the device cannot reach registered host memory by its address."""
        cuda_device = Device(device.index)
        cuda_device.set_current()
        if not cuda_device.properties.can_use_host_pointer_for_registered_mem:
            raise TransferError(
                f"{cuda_device.name} cannot use host addresses of pinned memory: KV cannot be offloaded by kernels"
            )
        self._device = device
        self._code: ObjectCode = compile_kernels(f"sm_{cuda_device.arch}")

    def offload_tokens(
        self, gpu_rows: torch.Tensor, host_rows: torch.Tensor, layout: BlockLayout, tokens: TokenTable
    ) -> "OffloadTokens":
        """Copy all layers' KV of single tokens to their host blocks.

        ``gpu_rows`` and ``host_rows``: ``(num_blocks, block_bytes)`` bytes, the latter pinned. ``tokens``: int32
        ``(num_tokens, 3)`` of (GPU block, slot, host block); no two with the same target. ``ValueError`` for the
        first thing that does not fit.
        """
        check_pool("GPU", gpu_rows, layout)
        check_pool("host", host_rows, layout)
        check_devices(gpu_rows, host_rows, self._device)
        check_tokens(tokens, layout, num_gpu_blocks=len(gpu_rows), num_host_blocks=len(host_rows))
        geometry = token_geometry(layout, len(tokens), gpu_rows.data_ptr(), host_rows.data_ptr())
        kernel = self._code.get_kernel(f"offload_tokens_{geometry.word_bytes}")
        return OffloadTokens(kernel, geometry, gpu_rows, host_rows, layout, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class OffloadTokens:
    """One checked launch; implements ``KernelCall``."""

    kernel: Kernel
    geometry: Geometry
    gpu_rows: torch.Tensor
    host_rows: torch.Tensor
    layout: BlockLayout
    tokens: TokenTable

    def launch(self, stream: int) -> None:
        """Upload the table and run the kernel behind it, both on ``stream``. Does nothing for an empty table.

        torch keeps the table's pinned and device memory until the stream no longer needs them.
        """
        if len(self.tokens) == 0:
            return
        device = self.gpu_rows.device
        with torch.cuda.stream(torch.cuda.get_stream_from_external(stream, device)):
            on_device = torch.from_numpy(self.tokens).pin_memory().to(device, non_blocking=True)
            launch(
                Stream.from_handle(stream),
                LaunchConfig(grid=self.geometry.num_groups, block=self.geometry.num_threads),
                self.kernel,
                *self.arguments(on_device.data_ptr()),
            )

    def arguments(self, table_address: int) -> list[Argument]:
        """Return the arguments as ``kv_copy.cu`` declares them, with the token table's address on the device."""
        layout = self.layout
        return [
            self.gpu_rows.data_ptr(),
            self.host_rows.data_ptr(),
            table_address,
            np.int32(len(self.tokens)),
            np.int64(layout.block_bytes),
            np.int64(layout.layer_stride_bytes),
            np.int32(layout.num_layers),
            np.int32(layout.num_kv_heads),
            np.int32(layout.block_tokens),
            np.int32(layout.content_bytes),
        ]

    def reads(self) -> Sequence[Span]:
        return token_spans(Pool.GPU, self.layout, self.tokens[:, 0], self.tokens[:, 1])

    def writes(self) -> Sequence[Span]:
        return token_spans(Pool.HOST, self.layout, self.tokens[:, 2], self.tokens[:, 1])


def token_spans(pool: Pool, layout: BlockLayout, blocks: np.ndarray, slots: np.ndarray) -> list[Span]:
    """Return the bytes of single tokens: one span for each token, layer and head."""
    return [
        Span(
            pool,
            int(block) * layout.block_bytes
            + layer * layout.layer_stride_bytes
            + head * layout.head_bytes
            + int(slot) * layout.content_bytes,
            layout.content_bytes,
        )
        for block, slot in zip(blocks, slots, strict=True)
        for layer in range(layout.num_layers)
        for head in range(layout.num_kv_heads)
    ]
