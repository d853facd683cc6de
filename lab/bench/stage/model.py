"""Decoder layers of one pipeline stage: LLaMA's shapes, dummy weights, paged KV. No embeddings, no output head.

Rotary embedding is left out: it moves less than a hundredth of what a layer's products read, and dummy weights need no
positions. Everything else is there: norms, QKV, attention over pages, output projection, gated feed-forward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from lab.bench.stage.attention import gathered_decode, paged_decode_gqa
from pipemax.domain.specs import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlaces:
    """The places of a step's new tokens, one row for each token, on the stage's device."""

    blocks: torch.Tensor
    """int64 (tokens,): GPU blocks."""
    slots: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """One new token for each request."""

    places: TokenPlaces
    tables: torch.Tensor
    """int32 (requests, most blocks): GPU blocks in order."""
    lengths: torch.Tensor
    """int32 (requests,): tokens attended to, the new one included."""


class LlamaStage:
    """``num_layers`` layers of a dense model."""

    def __init__(
        self, model: ModelSpec, num_layers: int, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> None:
        if model.num_experts != 1:
            raise ValueError(f"{model.name} is a mixture of experts: this stage has dense layers only")
        self.model = model
        self.num_layers = num_layers
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device=device).manual_seed(seed)
        head_values = model.num_heads * model.head_dim
        kv_values = 2 * model.num_kv_heads * model.head_dim
        hidden, ffn = model.hidden_size, model.ffn_size
        self._qkv = [self._weight(head_values + kv_values, hidden) for _ in range(num_layers)]
        self._out = [self._weight(hidden, head_values) for _ in range(num_layers)]
        self._gate_up = [self._weight(2 * ffn, hidden) for _ in range(num_layers)]
        self._down = [self._weight(hidden, ffn) for _ in range(num_layers)]
        self._decode_attention = paged_decode_gqa if device.type == "cuda" else gathered_decode

    def hidden(self, num_tokens: int) -> torch.Tensor:
        """Return what the stage before would send: random ``(num_tokens, hidden)``."""
        shape = (num_tokens, self.model.hidden_size)
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32).to(
            self.dtype
        )

    def decode(
        self,
        hidden: torch.Tensor,
        kv: list[torch.Tensor],
        batch: DecodeBatch,
    ) -> torch.Tensor:
        """Compute one decode step.

        ``hidden``: ``(requests, hidden)``; ``kv``: each layer's view of the GPU pool, written and read.
        """

        def attend(
            layer: int, query: torch.Tensor, _keys: torch.Tensor, _values: torch.Tensor
        ) -> torch.Tensor:
            return self._decode_attention(query.contiguous(), kv[layer], batch.tables, batch.lengths)

        return self._run(hidden, kv, batch.places, attend)

    def prefill_prompts(
        self,
        hidden: torch.Tensor,
        kv: list[torch.Tensor],
        places: TokenPlaces,
        prompt_tokens: int,
    ) -> torch.Tensor:
        """Compute whole prompts of one length at once; ``hidden``: ``(prompts · prompt_tokens, hidden)``."""

        def attend(
            _layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            q, k, v = (t.unflatten(0, (-1, prompt_tokens)).transpose(1, 2) for t in (query, keys, values))
            heads = self._attend(q, k, v, None, is_causal=True)
            return heads.transpose(1, 2).flatten(0, 1)

        return self._run(hidden, kv, places, attend)

    def _run(
        self,
        hidden: torch.Tensor,
        kv: list[torch.Tensor],
        places: TokenPlaces,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        for layer in range(self.num_layers):
            query, keys, values = self._project(layer, hidden)
            # (tokens, kv_heads, keys then values) into their pages
            kv[layer][places.blocks, :, places.slots] = torch.cat((keys, values), dim=-1)
            attended = attend(layer, query, keys, values).flatten(1)
            hidden = hidden + functional.linear(attended, self._out[layer])
            gate, up = functional.linear(self._norm(hidden), self._gate_up[layer]).chunk(2, dim=-1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, self._down[layer])
        return hidden

    def _project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, keys and values, ``(tokens, heads, head_dim)`` each."""
        model = self.model
        qkv = functional.linear(self._norm(hidden), self._qkv[layer])
        heads = qkv.unflatten(1, (model.num_heads + 2 * model.num_kv_heads, model.head_dim))
        query, keys, values = heads.split((model.num_heads, model.num_kv_heads, model.num_kv_heads), dim=1)
        return query, keys, values

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        grouped = self.model.num_heads != self.model.num_kv_heads
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
        )

    def _norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, (hidden.shape[-1],))

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        """Return small random values: with zeros, or one value, matrix units would draw less power and clock higher."""
        weight = torch.empty(rows, columns, device=self.device, dtype=self.dtype)
        return weight.normal_(0.0, columns**-0.5, generator=self._generator)
