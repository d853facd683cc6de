"""Machines and models in numbers: the profiles that the simulator and the choice of policy read.

Rates are *achieved*, not data-sheet figures: ``pipemax/presets/gpus.yaml`` has both, and the source of each. Nothing
here knows how long a step takes: that is ``pipemax.sim.stage_times``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from pipemax.domain.hardware import AllReduceSpec, GpuSpec, LinkSpec, check_positive
from pipemax.domain.kv_groups import WHOLE_KV, KvGroups, group_layers
from pipemax.domain.model_spec import KvCacheDtype as KvCacheDtype
from pipemax.domain.model_spec import ModelSpec as ModelSpec
from pipemax.domain.tuned import FREED_ROWS_THAT_PAY
from pipemax.domain.units import ceil_div


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
        if not self.groups.window and not self.groups.fixed_blocks:
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
        # A stage without KV has blocks of one layer's size, for its states.
        return [max(1, model.kv_layers(first, end)) for first, end in parallelism.layer_ranges(model)]
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
    groups, ranges = WHOLE_KV, parallelism.layer_ranges(model)
    if frees_windows and model.window_tokens is not None:
        groups = group_layers(model.num_layers, model.full_layers).tables(model.window_tokens)
    room_layers = block_layers(model, parallelism, frees_windows=frees_windows)
    layer_bytes = block_tokens * model.kv_bytes_per_token_and_layer / model.kv_shards(parallelism.tensor)
    budget = node.gpu.memory_bytes * node.gpu_memory_fraction - node.gpu_reserve_bytes
    blocks = []
    if model.recurrent is not None:
        states = (model.recurrent_layers(first, end) * model.recurrent.state_bytes for first, end in ranges)
        stage_blocks = (
            ceil_div(round(state / parallelism.tensor), round(room * layer_bytes))
            for state, room in zip(states, room_layers, strict=True)
        )
        groups = replace(groups, fixed_blocks=max(stage_blocks))
    for stage, (first, end) in enumerate(ranges):
        num_heads = (stage == 0) + (stage == len(ranges) - 1)
        num_heads = min(num_heads, model.num_heads_held(len(ranges)))
        weight_bytes = model.weight_bytes_of(first, end) + num_heads * model.head_weight_bytes
        free_bytes = budget - weight_bytes / parallelism.tensor
        blocks.append(int(free_bytes // (room_layers[stage] * layer_bytes)))
    if min(blocks) < 1:
        raise ValueError(
            f"{model.name} does not fit on {node.name} with {parallelism.pipeline} "
            f"stage{'s' * (parallelism.pipeline > 1)} of {parallelism.tensor} "
            f"GPU{'s' * (parallelism.tensor > 1)}: the weights leave no room for the KV cache"
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
