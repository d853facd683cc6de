"""A decoder's shapes: the bytes of its weights and of its KV, and the operations of a token.

Nothing here knows GPUs, or how many stages run the model.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from pipemax.domain.hardware import WeightDtype, check_positive
from pipemax.domain.layer_kinds import DenseLayers, LayerKind, Mixer, RecurrentLayers


class KvCacheDtype(StrEnum):
    """The type in which the KV cache keeps keys and values."""

    AUTO = "auto"
    """As the checkpoint says, otherwise the type of the activations."""
    FP8 = "fp8"
    """vLLM's choice for the device, which is e4m3."""
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"


_BYTES_OF_WEIGHT = {WeightDtype.FP8: 1.0, WeightDtype.FP4: 0.5 + 1 / 16}
"""Scales included: one for a block of 128 × 128 values in FP8, which is nothing, eight bits for 16 values in NVFP4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder's shapes: enough for its bytes and its operations."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Feed-forward size; of one expert, if there are several."""
    num_experts: int
    """1 for a dense model."""
    experts_per_token: int
    vocab_size: int
    bytes_per_value: int
    """Bytes of one value of weights and activations."""
    kv_bytes_per_value: int | None = None
    """Bytes of one value of KV; ``None`` means ``bytes_per_value``."""
    expert_bytes_per_value: float | None = None
    """Bytes of one weight of an expert, scales included; ``None`` means ``bytes_per_value``."""
    attention_bytes_per_value: float | None = None
    """Bytes of one weight of attention, scales included; ``None`` means ``bytes_per_value``."""
    weight_dtype: WeightDtype = WeightDtype.BF16
    """In which the layers' products are computed. The head's are in 16 bits, as checkpoints leave it."""
    latent_size: int | None = None
    """Values that a layer keeps of a token under latent attention (MLA); ``None``: keys and values of each KV head.
    ``num_kv_heads`` is then 1, and ``head_dim`` the mean of the sizes of keys and values, for the arithmetic."""
    attention_params: int | None = None
    """Parameters of one layer's attention, where they do not follow from the heads."""
    window_tokens: int | None = None
    """Tokens, a layer's own one included, to which layers with a sliding window attend; ``None``: there are none."""
    full_layers: tuple[int, ...] = ()
    """With windows, the layers that attend to all tokens, by number from 0."""
    ffn_matrices: int = 3
    """Matrices of a feed-forward part: gate, up and down projections; 2 without a gate."""
    dense: DenseLayers | None = None
    """The layers without experts, of a model with experts."""
    recurrent: RecurrentLayers | None = None
    """The layers without KV. Stock vLLM runs them, PipeMax does not."""
    has_tied_embeddings: bool = False
    """The output head is the input embedding, so that an engine of one stage holds them once."""
    grain: int = 1
    """Tokens of KV that each token has and attends to: a simulation's (``in_grains``), never a checkpoint's."""

    def __post_init__(self) -> None:
        check_positive(self, zero_allowed=frozenset({"has_tied_embeddings"}))
        if self.full_layers and self.window_tokens is None:
            raise ValueError(f"{self.name}: full_layers are given without window_tokens")
        if any(not 0 <= layer < self.num_layers for layer in self.full_layers):
            raise ValueError(f"{self.name}: full_layers {self.full_layers} of {self.num_layers} layers")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"{self.name}: {self.experts_per_token} experts a token of {self.num_experts}")

    def layer_kinds(self, first: int, end: int) -> dict[LayerKind, int]:
        """Return how many of the layers ``[first, end)`` are of each kind."""
        dense = () if self.dense is None else self.dense.layers
        recurrent = () if self.recurrent is None else self.recurrent.layers
        kinds: dict[LayerKind, int] = {}
        for layer in range(first, end):
            mixer = Mixer.FULL
            if layer in recurrent:
                mixer = Mixer.RECURRENT
            elif self.window_tokens is not None and layer not in self.full_layers:
                mixer = Mixer.WINDOW
            kind = LayerKind(mixer, layer in dense)
            kinds[kind] = kinds.get(kind, 0) + 1
        return dict(sorted(kinds.items(), key=lambda item: ([*Mixer].index(item[0].mixer), item[0].is_dense)))

    def mixer_params(self, kind: LayerKind) -> int:
        """Return the parameters of such a layer's attention, or of its recurrent mixer."""
        if kind.mixer is Mixer.RECURRENT and self.recurrent is not None:
            return self.recurrent.params
        return self.attention_params_per_layer

    def ffn_params(self, kind: LayerKind, num_experts: int) -> int:
        """Return the parameters of so many experts of such a layer; of its whole feed-forward part if it is dense."""
        if kind.is_dense and self.dense is not None:
            return self.ffn_matrices * self.hidden_size * self.dense.ffn_size
        return num_experts * self.expert_params

    def weight_bytes_of(self, first: int, end: int) -> float:
        """Return the bytes of the weights of the layers ``[first, end)``."""
        return sum(
            number
            * (
                self.mixer_params(kind) * self.attention_value_bytes
                + self.ffn_params(kind, self.num_experts) * self.expert_value_bytes
            )
            for kind, number in self.layer_kinds(first, end).items()
        )

    def kv_layers(self, first: int, end: int) -> int:
        """Return how many of the layers ``[first, end)`` keep KV."""
        return end - first - self.recurrent_layers(first, end)

    def recurrent_layers(self, first: int, end: int) -> int:
        """Return how many of the layers ``[first, end)`` keep a state."""
        layers = () if self.recurrent is None else self.recurrent.layers
        return sum(first <= layer < end for layer in layers)

    @property
    def attention_params_per_layer(self) -> int:
        if self.attention_params is not None:
            return self.attention_params
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def expert_params(self) -> int:
        """The parameters of one expert of one layer."""
        return self.ffn_matrices * self.hidden_size * self.ffn_size

    @property
    def expert_value_bytes(self) -> float:
        return self.bytes_per_value if self.expert_bytes_per_value is None else self.expert_bytes_per_value

    @property
    def attention_value_bytes(self) -> float:
        per_value = self.attention_bytes_per_value
        return self.bytes_per_value if per_value is None else per_value

    @property
    def expert_weight_bytes(self) -> float:
        """The bytes of one expert of one layer; of a dense model, of the layer's feed-forward part."""
        return self.expert_params * self.expert_value_bytes

    @property
    def layer_weight_bytes(self) -> float:
        """The bytes of one layer's weights, all experts included; of a layer of the usual kind."""
        return self.attention_weight_bytes + self.num_experts * self.expert_weight_bytes

    @property
    def attention_weight_bytes(self) -> float:
        """The bytes of one layer's attention."""
        return self.attention_params_per_layer * self.attention_value_bytes

    @property
    def head_params(self) -> int:
        """The parameters of the output head; the input embedding has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def head_weight_bytes(self) -> int:
        return self.head_params * self.bytes_per_value

    @property
    def weight_bytes(self) -> float:
        return self.weight_bytes_of(0, self.num_layers) + self.num_heads_held(1) * self.head_weight_bytes

    def num_heads_held(self, num_stages: int) -> int:
        """Return how many matrices of the vocabulary's size an engine of so many stages holds: head and embedding."""
        return 1 if self.has_tied_embeddings and num_stages == 1 else 2

    @property
    def num_params(self) -> int:
        """All parameters but norms, biases and routers, which are less than a hundredth."""
        return self._layer_params(self.num_experts) + self.num_heads_held(1) * self.head_params

    @property
    def active_params(self) -> int:
        """The parameters multiplied for each token, the head included."""
        return self._layer_params(self.experts_per_token) + self.head_params

    def _layer_params(self, num_experts: int) -> int:
        """Return the parameters of all layers with so many experts in each."""
        kinds = self.layer_kinds(0, self.num_layers)
        return sum(
            number * (self.mixer_params(kind) + self.ffn_params(kind, num_experts))
            for kind, number in kinds.items()
        )

    @property
    def kv_value_bytes(self) -> int:
        return self.bytes_per_value if self.kv_bytes_per_value is None else self.kv_bytes_per_value

    @property
    def kv_bytes_per_token_and_layer(self) -> int:
        values = 2 * self.num_kv_heads * self.head_dim if self.latent_size is None else self.latent_size
        return values * self.kv_value_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_layers(0, self.num_layers) * self.kv_bytes_per_token_and_layer

    def in_grains(self, grain: int) -> Self:
        """Return the model with the KV of ``grain`` tokens in each, and windows of as much KV as before."""
        windows = None if self.window_tokens is None else self.window_tokens // grain
        return replace(
            self, grain=grain, kv_bytes_per_value=grain * self.kv_value_bytes, window_tokens=windows
        )

    def with_kv_dtype(self, dtype: KvCacheDtype) -> Self:
        """Return the model with its KV in ``dtype``; ``auto`` leaves the profile's."""
        return self if dtype is KvCacheDtype.AUTO else replace(self, kv_bytes_per_value=1)

    def with_weights(self, dtype: WeightDtype) -> Self:
        """Return the model with its layers' weights in ``dtype``, scales included; ``bf16`` leaves the profile's."""
        if dtype is WeightDtype.BF16:
            return self
        per_value = _BYTES_OF_WEIGHT[dtype]
        return replace(
            self,
            expert_bytes_per_value=per_value,
            attention_bytes_per_value=per_value,
            weight_dtype=dtype,
        )

    def kv_shards(self, tensor: int) -> int:
        """Return into how many parts ``tensor`` GPUs split a stage's KV; more GPUs than KV heads hold copies."""
        return min(tensor, self.num_kv_heads)
