"""The ways to divide a node's GPUs among engines, and which of them can run a model. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipemax.domain.specs import ModelSpec, NodeSpec, Parallelism, kv_capacity

LARGEST_STEP_TOKENS = 4096
"""Of the sizes of a step from which one is chosen: a window is kept for all tokens in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to divide a node's GPUs."""

    replicas: int
    """Engines that run next to one another, each with its part of the rows."""
    tensor_parallel: int
    """GPUs that share each layer."""
    pipeline_parallel: int
    """Stages of an engine."""

    @property
    def gpus_per_engine(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def parallelism(self) -> Parallelism:
        """Of one engine."""
        return Parallelism(pipeline=self.pipeline_parallel, tensor=self.tensor_parallel)

    def __str__(self) -> str:
        return f"{self.replicas} × tp {self.tensor_parallel} × pp {self.pipeline_parallel}"


def possible_layouts(node: NodeSpec, gpus_per_engine: Sequence[int] = ()) -> list[Layout]:
    """Return all layouts of engines of these sizes, default all that divide the node; the largest engines first.

    ``ValueError`` for a size that does not divide the node.
    """
    for num_gpus in gpus_per_engine:
        node.part(num_gpus)
    sizes = gpus_per_engine or [size for size in range(1, node.num_gpus + 1) if node.num_gpus % size == 0]
    return [
        Layout(replicas=node.num_gpus // size, tensor_parallel=tensor, pipeline_parallel=size // tensor)
        for size in sorted(set(sizes), reverse=True)
        for tensor in range(1, size + 1)
        if size % tensor == 0
    ]


def layout_refusal(
    node: NodeSpec,
    model: ModelSpec,
    layout: Layout,
    *,
    longest_request: int = 1,
    keeps_windows: bool = False,
) -> str | None:
    """Return why no engine of this layout can run the model, or None.

    vLLM does not start unless its KV cache holds one request of ``longest_request`` tokens. ``keeps_windows``: the
    engine runs PipeMax, which keeps the whole KV of layers with windows.
    """
    tensor, pipeline = layout.tensor_parallel, layout.pipeline_parallel
    if model.num_heads % tensor:
        return f"{model.name} has {model.num_heads} heads, which {tensor} GPUs do not divide"
    if max(model.num_kv_heads, tensor) % min(model.num_kv_heads, tensor):
        return (
            f"{model.name} has {model.num_kv_heads} KV heads, which {tensor} GPUs neither divide nor repeat"
        )
    if pipeline > model.num_layers:
        return f"{model.name} has {model.num_layers} layers, fewer than {pipeline} stages"
    try:
        capacity = kv_capacity(
            node.part(layout.gpus_per_engine),
            model,
            layout.parallelism,
            frees_windows=not keeps_windows,
        )
    except ValueError as error:
        return str(error)
    in_flight_tokens = (pipeline + 1) * LARGEST_STEP_TOKENS
    needed = capacity.groups.prompt_blocks(
        longest_request, capacity.block_tokens, in_flight_tokens=in_flight_tokens
    )
    if capacity.gpu_blocks < needed:
        return (
            f"an engine's KV cache has room for {capacity.gpu_tokens:,} tokens, and one request may have "
            f"{longest_request:,} (max_model_len)"
        )
    return None
