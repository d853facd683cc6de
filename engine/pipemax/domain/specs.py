"""Machines and models in numbers: the profiles that the simulator and the choice of policy read.

Rates are *achieved*, not data-sheet figures: ``pipemax/presets/gpus.yaml`` has both, and the source of each. Nothing
here knows how long a step takes: that is ``pipemax.sim.stage_times``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Self

from pipemax.domain.hardware import AllReduceSpec, GpuSpec, LinkSpec, WeightDtype, check_positive
from pipemax.domain.kv_groups import WHOLE_KV, KvGroups, group_layers
from pipemax.domain.tuned import FREED_ROWS_THAT_PAY


class KvLayout(StrEnum):
    """The order of a block's KV in memory, which decides how many pieces a copy of it needs (paper, Section 3.4.2)."""

    BLOCK_FIRST = "block_first"
    """All layers of a stage in one piece."""
    LAYER_FIRST = "layer_first"
    """One piece per layer, keys and values packed, as in vLLM."""


class KvCacheDtype(StrEnum):
    """The type in which the KV cache keeps keys and values."""

    AUTO = "auto"
    """As the checkpoint says, otherwise the type of the activations."""
    FP8 = "fp8"
    """vLLM's choice for the device, which is e4m3."""
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A server: equal GPUs, their links, and the host they share."""

    name: str
    gpu: GpuSpec
    num_gpus: int
    link: LinkSpec
    gpus_per_root: int
    """GPUs behind one PCIe root complex or switch."""
    root_bytes_per_s: float
    """Limit of all copies behind one root, in each direction."""
    host_dram_bytes_per_s: float
    """Limit of all copies of the node, both directions together."""
    host_memory_bytes: float
    host_kv_fraction: float
    """Share of host memory that the KV replicas may take."""
    gpu_memory_fraction: float
    """Share of GPU memory that the engine may take."""
    gpu_reserve_bytes: float
    """Activations, graphs and communication buffers within that share."""
    all_reduce: AllReduceSpec

    def __post_init__(self) -> None:
        check_positive(self, zero_allowed=frozenset({"gpu_reserve_bytes"}))
        for name in ("host_kv_fraction", "gpu_memory_fraction"):
            if getattr(self, name) > 1:
                raise ValueError(f"NodeSpec.{name} is {getattr(self, name)}, must be at most 1")

    @property
    def host_kv_bytes(self) -> float:
        return self.host_memory_bytes * self.host_kv_fraction

    def part(self, num_gpus: int) -> "NodeSpec":
        """Return one engine's part of a node that is divided among as many engines as fit.

        ``ValueError`` unless ``num_gpus`` divide the node's.
        """
        if num_gpus < 1 or self.num_gpus % num_gpus:
            raise ValueError(f"{self.name} has {self.num_gpus} GPUs, which {num_gpus} do not divide")
        share = num_gpus / self.num_gpus
        return replace(
            self,
            num_gpus=num_gpus,
            gpus_per_root=min(self.gpus_per_root, num_gpus),
            host_memory_bytes=self.host_memory_bytes * share,
            host_dram_bytes_per_s=self.host_dram_bytes_per_s * share,
        )


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

    def __post_init__(self) -> None:
        check_positive(self)
        if self.full_layers and self.window_tokens is None:
            raise ValueError(f"{self.name}: full_layers are given without window_tokens")
        if any(not 0 <= layer < self.num_layers for layer in self.full_layers):
            raise ValueError(f"{self.name}: full_layers {self.full_layers} of {self.num_layers} layers")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"{self.name}: {self.experts_per_token} experts a token of {self.num_experts}")

    @property
    def attention_params_per_layer(self) -> int:
        if self.attention_params is not None:
            return self.attention_params
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def expert_params(self) -> int:
        """The parameters of one expert of one layer: gate, up and down projections."""
        return 3 * self.hidden_size * self.ffn_size

    @property
    def expert_weight_bytes(self) -> float:
        """The bytes of one expert of one layer; of a dense model, of the layer's feed-forward part."""
        per_value = self.expert_bytes_per_value
        return self.expert_params * (self.bytes_per_value if per_value is None else per_value)

    @property
    def layer_weight_bytes(self) -> float:
        """The bytes of one layer's weights, all experts included."""
        return self.attention_weight_bytes + self.num_experts * self.expert_weight_bytes

    @property
    def attention_weight_bytes(self) -> float:
        """The bytes of one layer's attention."""
        per_value = self.attention_bytes_per_value
        return self.attention_params_per_layer * (self.bytes_per_value if per_value is None else per_value)

    @property
    def head_params(self) -> int:
        """The parameters of the output head; the input embedding has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def head_weight_bytes(self) -> int:
        return self.head_params * self.bytes_per_value

    @property
    def weight_bytes(self) -> float:
        return self.num_layers * self.layer_weight_bytes + 2 * self.head_weight_bytes

    @property
    def active_params(self) -> int:
        """The parameters multiplied for each token, the head included."""
        per_layer = self.attention_params_per_layer + self.experts_per_token * self.expert_params
        return self.num_layers * per_layer + self.head_params

    @property
    def kv_value_bytes(self) -> int:
        return self.bytes_per_value if self.kv_bytes_per_value is None else self.kv_bytes_per_value

    @property
    def kv_bytes_per_token_and_layer(self) -> int:
        values = 2 * self.num_kv_heads * self.head_dim if self.latent_size is None else self.latent_size
        return values * self.kv_value_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * self.kv_bytes_per_token_and_layer

    def in_grains(self, grain: int) -> Self:
        """Return the model with the KV of ``grain`` tokens in each, and windows of as much KV as before."""
        windows = None if self.window_tokens is None else self.window_tokens // grain
        return replace(self, kv_bytes_per_value=grain * self.kv_value_bytes, window_tokens=windows)

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

    def windows_of(self, first: int, end: int) -> int:
        """Return how many of the layers ``[first, end)`` have a window."""
        if self.window_tokens is None:
            return 0
        return end - first - sum(first <= layer < end for layer in self.full_layers)

    def kv_shards(self, tensor: int) -> int:
        """Return into how many parts ``tensor`` GPUs split a stage's KV; more GPUs than KV heads hold copies."""
        return min(tensor, self.num_kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """``pipeline`` stages of ``tensor`` GPUs each."""

    pipeline: int
    tensor: int

    def __post_init__(self) -> None:
        check_positive(self)

    def layers_of(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the number of layers on each stage.

        The remainder goes to the first stages, never to the last if others can take it: the last stage has the output
        head as well.
        """
        whole, rest = divmod(model.num_layers, self.pipeline)
        return tuple(whole + (stage < rest) for stage in range(self.pipeline))

    def layer_ranges(self, model: ModelSpec) -> list[tuple[int, int]]:
        """Return the layers ``[first, end)`` of each stage."""
        ends = [*accumulate(self.layers_of(model))]
        return [*zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """The KV blocks that fit, under one parallelism."""

    block_tokens: int
    gpu_blocks: int
    """The minimum over the stages: every stage holds its layers of every block."""
    host_blocks: int
    groups: KvGroups = WHOLE_KV
    """The block tables of a row, which all draw on these blocks."""

    @property
    def gpu_tokens(self) -> int:
        """Tokens of rows that are no longer than a window."""
        return self.gpu_blocks * self.block_tokens // self.groups.count

    def gpu_rows(self, tokens: float) -> float:
        """Return how many rows of this many tokens the GPUs hold."""
        if not self.groups.window:
            return self.gpu_tokens / tokens
        return self.gpu_blocks / self.groups.running_blocks(max(1, round(tokens)), self.block_tokens)

    def pays_over(self, whole: "KvCapacity", tokens_per_row: float) -> bool:
        """Return whether freeing what has left windows, as here, holds so many more rows that it pays."""
        return self.gpu_rows(tokens_per_row) > FREED_ROWS_THAT_PAY * whole.gpu_rows(tokens_per_row)

    def with_freed_windows(
        self,
        stages: Sequence[tuple[int, int]],
        full_layers: Sequence[int],
        *,
        window_tokens: int,
        keeps_gpu_blocks: bool = False,
    ) -> Self:
        """Return what the same memory holds if layers with windows have block tables of their own, as in stock vLLM.

        ``stages`` are the layers ``[first, end)`` of each. ``keeps_gpu_blocks``: the number of blocks is given.
        """
        grouped = group_layers(stages[-1][1], full_layers)
        ratio = min((end - first) / grouped.most_layers(first, end) for first, end in stages)
        return replace(
            self,
            gpu_blocks=self.gpu_blocks if keeps_gpu_blocks else int(ratio * self.gpu_blocks),
            groups=grouped.tables(window_tokens),
        )


def block_layers(model: ModelSpec, parallelism: Parallelism, *, frees_windows: bool) -> list[int]:
    """Return for how many layers a KV block has room, by stage: for all of them, or for those of one group."""
    if not frees_windows or model.window_tokens is None:
        return [*parallelism.layers_of(model)]
    grouped = group_layers(model.num_layers, model.full_layers)
    return [grouped.most_layers(first, end) for first, end in parallelism.layer_ranges(model)]


def kv_capacity(
    node: NodeSpec,
    model: ModelSpec,
    parallelism: Parallelism,
    *,
    block_tokens: int = 16,
    frees_windows: bool = False,
) -> KvCapacity:
    """Return how many KV blocks the GPUs and the host hold. Raise ``ValueError`` if even the weights do not fit.

    Each GPU has its own pools for its part of the KV; more GPUs than KV heads keep copies on the host as well.
    ``frees_windows``: layers with windows have block tables of their own, as under stock vLLM; otherwise their KV is
    kept whole, as under PipeMax by default.
    """
    groups, stage_layers = WHOLE_KV, parallelism.layers_of(model)
    if frees_windows and model.window_tokens is not None:
        groups = group_layers(model.num_layers, model.full_layers).tables(model.window_tokens)
    room_layers = block_layers(model, parallelism, frees_windows=frees_windows)
    layer_bytes = block_tokens * model.kv_bytes_per_token_and_layer / model.kv_shards(parallelism.tensor)
    budget = node.gpu.memory_bytes * node.gpu_memory_fraction - node.gpu_reserve_bytes
    blocks = []
    for stage, num_layers in enumerate(stage_layers):
        num_heads = (stage == 0) + (stage == len(stage_layers) - 1)
        weight_bytes = num_layers * model.layer_weight_bytes + num_heads * model.head_weight_bytes
        free_bytes = budget - weight_bytes / parallelism.tensor
        blocks.append(int(free_bytes // (room_layers[stage] * layer_bytes)))
    if min(blocks) < 1:
        raise ValueError(
            f"{model.name} does not fit on {node.name} with {parallelism.pipeline} stages of "
            f"{parallelism.tensor} GPUs: the weights leave no room for the KV cache"
        )
    host_blocks = int(node.host_kv_bytes // (layer_bytes * sum(room_layers) * parallelism.tensor))
    return KvCapacity(
        block_tokens=block_tokens, gpu_blocks=min(blocks), host_blocks=host_blocks, groups=groups
    )


def freeing_windows_pays(
    node: NodeSpec,
    model: ModelSpec,
    parallelism: Parallelism,
    *,
    block_tokens: int,
    tokens_per_row: float,
) -> bool:
    """Return whether freeing what has left windows pays for such rows. ``ValueError``: see ``kv_capacity``."""
    whole, freed = (
        kv_capacity(node, model, parallelism, block_tokens=block_tokens, frees_windows=frees)
        for frees in (False, True)
    )
    return freed.pays_over(whole, tokens_per_row)
