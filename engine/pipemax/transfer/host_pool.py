"""The host pool of one stage: pageable memory in the layout of the GPU's pool."""

import torch

from pipemax.transfer.layout import BlockLayout, ByteRows


class HostPool:
    """``num_blocks`` rows of bytes. Who may use which row, the scheduler knows."""

    def __init__(self, layout: BlockLayout, num_blocks: int) -> None:
        """``ValueError`` without blocks; ``RuntimeError`` of torch where memory does not suffice."""
        if num_blocks < 1:
            raise ValueError(f"the host pool has at least 1 block, not {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.tensor = torch.empty(layout.pool_shape(num_blocks), dtype=torch.uint8)

    @property
    def rows(self) -> ByteRows:
        """The same memory for numpy."""
        rows: ByteRows = self.tensor.numpy()
        return rows
