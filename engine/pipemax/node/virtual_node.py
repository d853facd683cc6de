"""What an engine config says of a virtual node, with its profiles loaded. Knows neither vLLM nor the simulator."""

from dataclasses import dataclass
from typing import Self

from pipemax.config import EngineConfig
from pipemax.domain.specs import KvCapacity, ModelSpec, NodeSpec, Parallelism, kv_capacity
from pipemax.domain.workload import WorkloadSpec
from pipemax.presets import load_model, load_node, load_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualNodeSetup:
    """A node that is not there, and the model that it only seems to run."""

    node: NodeSpec
    model: ModelSpec
    parallelism: Parallelism
    output_tokens: int | WorkloadSpec
    """Tokens of each answer, or the workload whose lengths answers have."""
    capacity: KvCapacity
    """KV blocks of each GPU and of the host."""

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Load the profiles. ``ValueError`` if there is none of a name, or if the model does not fit on the node."""
        virtual = config.virtual_node
        assert virtual is not None, "the engine config names no virtual node"
        try:
            node = load_node(virtual.node)
            model = load_model(virtual.model).with_kv_dtype(config.kv_cache_dtype)
            if model.latent_size is not None:
                raise ValueError(f"{model.name} has latent attention, which a virtual node does not imitate")
            answers = virtual.output_tokens
            outputs = load_workload(answers) if isinstance(answers, str) else answers
        except OSError as error:
            raise ValueError(f"virtual_node: {error}") from error
        except ValueError as error:
            raise ValueError(f"virtual_node: {error}") from None
        tensor = config.tensor_degree
        pipeline = config.pipeline_parallel_size or max(1, node.num_gpus // tensor)
        if pipeline * tensor > node.num_gpus:
            raise ValueError(
                f"pipeline_parallel_size {pipeline} × tensor_parallel_size {tensor} needs {pipeline * tensor} GPUs, "
                f"and the virtual node {node.name} has {node.num_gpus}: lower one of the two"
            )
        parallelism = Parallelism(pipeline=pipeline, tensor=tensor)
        return cls(
            node=node,
            model=model,
            parallelism=parallelism,
            output_tokens=outputs,
            capacity=kv_capacity(node, model, parallelism),
        )

    def __str__(self) -> str:
        return f"the virtual node {self.node.name} as if it ran {self.model.name}: nothing was computed"
