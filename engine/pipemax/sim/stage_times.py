"""Models how long a step takes on each stage: reading weights, computing, attention and all-reduce.

The linear part follows a staircase measured on one L20 (TD-Pipe's published profile): products of b tokens cost as much
as those of a number rounded to tiles, and reading weights overlaps with computing only partly,
``(weights_s**p + compute_s**p)**(1/p)``. The same table and p serve every GPU, model and system.
"""

from bisect import bisect_left
from dataclasses import dataclass

from pipemax.domain.hardware import GpuSpec
from pipemax.domain.layer_kinds import LayerKind, Mixer
from pipemax.domain.specs import ModelSpec, NodeSpec, Parallelism

EXPERT_TILE_TOKENS = 16
"""Grouped products of a mixture of experts pad each expert's tokens only to a small tile."""
_OPERATIONS_OF_STATE_BYTE = 4
RESIDUAL_STREAMS = 2
"""vLLM sends hidden states and residual from stage to stage."""


@dataclass(slots=True, kw_only=True)
class StepWork:
    """The work of one step."""

    decode_requests: int = 0
    decode_context_tokens: int = 0
    """KV tokens that all decoding requests attend to together."""
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """(token, attended token) pairs of the prompts in this step."""
    decode_window_tokens: int | None = None
    """As ``decode_context_tokens``, in layers with windows; None means as many as these could be."""
    prefill_window_pairs: float | None = None
    """As ``prefill_pairs``, in layers with windows; None means as many as these could be."""
    prefill_outputs: int = 0
    """Prompts that end in this step: only these pass the output head."""

    @property
    def tokens(self) -> int:
        return self.decode_requests + self.prefill_tokens

    @property
    def outputs(self) -> int:
        return self.decode_requests + self.prefill_outputs

    @property
    def decodes(self) -> "StepWork":
        """The work without its prompts."""
        return StepWork(
            decode_requests=self.decode_requests,
            decode_context_tokens=self.decode_context_tokens,
            decode_window_tokens=self.decode_window_tokens,
        )

    def within_window(self, window_tokens: int) -> tuple[int, float]:
        """Return what layers with this window have of decode's context tokens and of the prompts' pairs."""
        tokens, pairs = self.decode_window_tokens, self.prefill_window_pairs
        if tokens is None:
            tokens = min(self.decode_context_tokens, self.decode_requests * window_tokens)
        if pairs is None:
            pairs = min(self.prefill_pairs, self.prefill_tokens * window_tokens)
        return tokens, pairs


def prompt_pairs(first_token: int, num_tokens: int) -> float:
    """Return the causal attention pairs of a prompt's tokens ``[first_token, first_token + num_tokens)``."""
    return num_tokens * (first_token + (num_tokens + 1) / 2)


def window_pairs(first_token: int, num_tokens: int, window_tokens: int) -> float:
    """Return the pairs of the same tokens in a layer that attends to a window."""
    filling = min(max(0, window_tokens - first_token), num_tokens)
    return prompt_pairs(first_token, filling) + (num_tokens - filling) * window_tokens


def product_tokens(gpu: GpuSpec, tokens: int) -> float:
    """Return the number of tokens whose arithmetic a matrix product of ``tokens`` costs."""
    rows = gpu.product_tokens
    after = bisect_left(rows, (tokens, 0))
    if after == len(rows):
        return float(max(tokens, rows[-1][1]))
    (high, high_cost) = rows[after]
    if high <= tokens or after == 0:
        return float(high_cost)
    (low, low_cost) = rows[after - 1]
    return low_cost + (high_cost - low_cost) * (tokens - low) / (high - low)


def smooth_max_s(gpu: GpuSpec, weights_s: float, compute_s: float) -> float:
    """Return the seconds of reading weights and computing, which overlap only partly."""
    p = gpu.smoothing
    return float((weights_s**p + compute_s**p) ** (1 / p))


class StageTimes:
    """The times of one model on one node under one parallelism."""

    def __init__(self, node: NodeSpec, model: ModelSpec, parallelism: Parallelism) -> None:
        self._node = node
        self._model = model
        self._tensor = parallelism.tensor
        self.layers = parallelism.layers_of(model)
        ranges = parallelism.layer_ranges(model)
        self._kinds = [model.layer_kinds(first, end) for first, end in ranges]
        self._all_kinds = [*model.layer_kinds(0, model.num_layers)]
        layer_bytes, shards = model.kv_bytes_per_token_and_layer, model.kv_shards(self._tensor)
        self._kv_bytes_per_token = [model.kv_layers(*layers) * layer_bytes / shards for layers in ranges]

    def stage_s(self, work: StepWork) -> list[float]:
        """Return the seconds on each stage, all-reduce included; of a mixed step with the GPU's ``mixed_cost``."""
        step_s, cost = self._plain_stage_s(work), self._node.gpu.mixed_cost
        if cost == 1.0 or not (work.decode_requests and work.prefill_tokens):
            return step_s
        decode_s = self._plain_stage_s(work.decodes)
        return [decode + cost * (step - decode) for decode, step in zip(decode_s, step_s, strict=True)]

    def _plain_stage_s(self, work: StepWork) -> list[float]:
        layer_s = self._layer_s(work)
        times = [
            sum((number * layer_s[kind] for kind, number in kinds.items()), self._node.gpu.step_overhead_s)
            for kinds in self._kinds
        ]
        times[-1] += self._head_s(work.outputs)
        return times

    def _layer_s(self, work: StepWork) -> dict[LayerKind, float]:
        """Return the seconds of one layer of each kind."""
        reduce_s = self.all_reduce_layer_s(work.tokens)
        linear_s: dict[tuple[bool, bool], float] = {}
        seconds: dict[LayerKind, float] = {}
        for kind in self._all_kinds:
            products = (kind.mixer is Mixer.RECURRENT, kind.is_dense)
            if products not in linear_s:
                linear_s[products] = self._linear_layer_s(kind, work.tokens)
            seconds[kind] = linear_s[products] + reduce_s + self._mixer_s(kind.mixer, work)
        return seconds

    def _mixer_s(self, mixer: Mixer, work: StepWork) -> float:
        """Return the seconds of attention to KV, or of a recurrent layer's state."""
        if mixer is Mixer.RECURRENT:
            return self._recurrent_layer_s(work)
        if mixer is Mixer.WINDOW and self._model.window_tokens is not None:
            return self._attention_layer_s(*work.within_window(self._model.window_tokens))
        return self._attention_layer_s(work.decode_context_tokens, work.prefill_pairs)

    def all_reduce_layer_s(self, tokens: int) -> float:
        """Return the all-reduce seconds of one layer: one after attention and one after the feed-forward part."""
        payload_bytes = tokens * self._model.hidden_size * self._model.bytes_per_value
        return 2 * self._node.all_reduce.time_s(payload_bytes, self._tensor)

    def kv_bytes_per_token(self, stage: int) -> float:
        """Return the KV bytes of one token on one GPU of a stage."""
        return self._kv_bytes_per_token[stage]

    def activation_bytes(self, tokens: int) -> float:
        """Return the bytes that each GPU of a stage sends to the next stage."""
        model = self._model
        return RESIDUAL_STREAMS * tokens * model.hidden_size * model.bytes_per_value / self._tensor

    def _linear_layer_s(self, kind: LayerKind, tokens: int) -> float:
        gpu, model = self._node.gpu, self._model
        params = model.mixer_params(kind)
        weight_bytes = float(params * model.attention_value_bytes)
        operations = params * product_tokens(gpu, tokens)
        if model.num_experts == 1 or kind.is_dense:
            ffn_params = model.ffn_params(kind, 1)
            weight_bytes += ffn_params * model.expert_value_bytes
            operations += ffn_params * product_tokens(gpu, tokens)
        else:
            touched = model.num_experts * (
                1 - (1 - model.experts_per_token / model.num_experts) ** max(1, tokens)
            )
            # Every touched expert pads its share: half a tile on average.
            padded = tokens * model.experts_per_token + touched * EXPERT_TILE_TOKENS / 2
            weight_bytes += touched * model.expert_weight_bytes
            operations += model.expert_params * padded
        weights_s = weight_bytes / gpu.hbm_bytes_per_s
        compute_s = 2 * operations / gpu.product_flops_per_s(model.weight_dtype)
        return smooth_max_s(gpu, weights_s, compute_s) / self._tensor

    def _recurrent_layer_s(self, work: StepWork) -> float:
        """Return the seconds of reading and writing each decoding row's state, and of the prompts' part in it.

        A prompt's token counts as ``_OPERATIONS_OF_STATE_BYTE`` operations for each byte of state, which is a guess.
        """
        gpu, recurrent = self._node.gpu, self._model.recurrent
        assert recurrent is not None
        moved_s = 2 * work.decode_requests * recurrent.state_bytes / gpu.hbm_bytes_per_s
        operations = _OPERATIONS_OF_STATE_BYTE * recurrent.state_bytes * work.prefill_tokens
        return (moved_s + operations / gpu.flops_per_s) / self._tensor

    def _attention_layer_s(self, context_tokens: int, pairs: float) -> float:
        gpu, model = self._node.gpu, self._model
        read_s = context_tokens * model.kv_bytes_per_token_and_layer / gpu.hbm_bytes_per_s
        # A token of a prompt in grains attends to a grain for each token of its context.
        compute_s = 4 * model.num_heads * model.head_dim * model.grain * pairs / gpu.flops_per_s
        return read_s / model.kv_shards(self._tensor) + compute_s / self._tensor

    def _head_s(self, outputs: int) -> float:
        if outputs == 0:
            return 0.0
        gpu, params = self._node.gpu, self._model.head_params
        weights_s = self._model.head_weight_bytes / gpu.hbm_bytes_per_s
        compute_s = 2 * params * product_tokens(gpu, outputs) / gpu.flops_per_s
        return smooth_max_s(gpu, weights_s, compute_s) / self._tensor
