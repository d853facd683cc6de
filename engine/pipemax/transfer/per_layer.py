"""Offload KV layer by layer, as the paper does (Section 3.4.2).

Each layer's keys and values leave the GPU straight after the QKV projection, contiguous as the projection made them; a
CPU puts them into block-first rows.

    # staging, pinned: (layers, 2, max_tokens, kv_heads, head_dim), keys then values
    # target, the host pool: (num_blocks, layers, kv_heads, block_tokens, keys then values)

This needs a hook in every layer, so it cannot run within a CUDA graph, and a CPU that keeps up. The copy after the
step (``csrc``) needs neither, so that one is the default. An engine offloads by layer with ``kv_offload: per_layer``
(``per_layer_steps``). CPU tensors work as well; their copies are ordinary ones.
"""

import torch

from pipemax.transfer.layout import BlockLayout, layer_views


class PerLayerOffload:
    """Staging of one step at a time: ``offload_layer`` for each layer, then ``pack``."""

    def __init__(
        self,
        layout: BlockLayout,
        dtype: torch.dtype,
        *,
        max_tokens: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Allocate staging for ``max_tokens`` of the KV cache's ``dtype``.

        Copies run on ``stream`` while the model computes; it is ``None`` for CPU tensors. ``ValueError`` if keys and
        values do not make up the layout's content.
        """
        head_dim, rest = divmod(layout.content_bytes, 2 * dtype.itemsize)
        if rest or head_dim < 1:
            raise ValueError(
                f"content of {layout.content_bytes} bytes is no pair of keys and values of {dtype}: per-layer "
                "offload needs them side by side"
            )
        if max_tokens < 1:
            raise ValueError(f"max_tokens is at least 1, not {max_tokens}")
        self._layout = layout
        self._dtype = dtype
        self._stream = stream
        self._num_tokens = 0
        self._copied: torch.cuda.Event | None = None
        self._staging = torch.empty(
            (layout.num_layers, 2, max_tokens, layout.num_kv_heads, head_dim),
            dtype=dtype,
            pin_memory=stream is not None,
        )

    def offload_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Start the copy of one layer's new tokens; returns at once if there is a stream.

        ``keys``, ``values``: ``(num_tokens, kv_heads, head_dim)``, just enqueued on the current stream.
        """
        if keys.shape != values.shape or keys.dtype != self._dtype or values.dtype != self._dtype:
            raise ValueError(
                f"layer {layer}: keys {keys.dtype} {tuple(keys.shape)} and values {values.dtype} "
                f"{tuple(values.shape)} must be {self._dtype} of one shape"
            )
        num_tokens = len(keys)
        room = tuple(self._staging.shape[2:])
        if num_tokens > room[0] or tuple(keys.shape[1:]) != room[1:]:
            raise ValueError(f"layer {layer}: keys of {tuple(keys.shape)} do not fit into staging of {room}")
        self._num_tokens = num_tokens
        target = self._staging[layer, :, :num_tokens]
        if self._stream is None:
            target[0].copy_(keys)
            target[1].copy_(values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(keys.device))
        with torch.cuda.stream(self._stream):
            target[0].copy_(keys, non_blocking=True)
            target[1].copy_(values, non_blocking=True)
            # The model may free them once it has used them; their memory must stay until the copy is done.
            keys.record_stream(self._stream)
            values.record_stream(self._stream)
        self._copied = self._stream.record_event()

    def wait(self) -> None:
        """Wait for the last layer's copy. Only the packing thread may call it, never the one that runs the model."""
        if self._copied is not None:
            self._copied.synchronize()

    def pack(self, host_rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put the step's tokens of all layers into their blocks of the host pool.

        ``host_rows``: ``(num_blocks, block_bytes)`` bytes. ``tokens``: integers ``(num_tokens, 3)`` of (GPU block,
        slot, host block), in the order of the keys. Call ``wait`` first: the copies must be done.
        """
        if tuple(tokens.shape) != (self._num_tokens, 3):
            raise ValueError(f"{self._num_tokens} tokens were copied, the table is {tuple(tokens.shape)}")
        _, slot, block = (column.long() for column in tokens.unbind(1))
        views = layer_views(host_rows, self._layout, self._dtype)
        for view, staged in zip(views, self._staging[:, :, : self._num_tokens], strict=True):
            keys, values = staged
            # (tokens, kv_heads, keys then values) on both sides
            view[block, :, slot] = torch.cat((keys, values), dim=-1)
