"""Divide GPUs, cores and memory for KV among replicas.

All replicas get the same: as many GPUs, as many cores and as much memory. So they are equally fast, and what one has
measured of itself holds for all, which find it in the cache of calibrations by the number of cores, too. What is left
over stays free. GPUs of one NUMA node stay together as far as they go, and a replica's cores are those of its GPUs'
node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from pipemax.config import EngineConfig
from pipemax.domain.units import GIB
from pipemax.node.gpus import pipeline_parallel_size
from pipemax.node.host_pool_size import host_pool_bytes
from pipemax.replicas.hardware import Gpu, Hardware

SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
"""vLLM's ``speculative_config``; ``pipemax tune`` tries the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one replica runs, and on what."""

    config: EngineConfig
    """Of one engine."""
    gpus: tuple[str, ...] = ()
    """UUIDs; empty on a machine without GPUs."""
    cores: tuple[int, ...] = ()


def divide(config: EngineConfig, hardware: Hardware) -> list[Share]:
    """Return the share of each replica. ``ValueError`` if there are fewer GPUs than needed."""
    count = config.num_replicas
    gpus = _divide_gpus(hardware.gpus, count)
    nodes = [_common_node(share) for share in gpus]
    cores = _divide_cores(hardware.cores_of_nodes, nodes)
    own_config = config_of_replica(config, num_gpus=len(hardware.gpus))
    return [
        Share(config=own_config, gpus=tuple(gpu.uuid for gpu in own_gpus), cores=own_cores)
        for own_gpus, own_cores in zip(gpus, cores, strict=True)
    ]


def config_of_replica(config: EngineConfig, *, num_gpus: int) -> EngineConfig:
    """Return the config of each replica, so that all together take the memory for KV that one engine would take.

    ``num_gpus`` are those of all replicas. ``ValueError`` if there are fewer than needed.
    """
    count = config.num_replicas
    if count == 1:
        return config.model_copy(update={"replicas": None})
    num_stages = stages_of_replica(config, num_gpus=num_gpus)
    changes: dict[str, object] = {"replicas": None}
    if num_gpus:
        # An explicit host_kv_gib is that of one GPU, however many engines they are divided among.
        num_workers = count * num_stages * config.tensor_degree
        host_bytes = host_pool_bytes(config, num_workers=num_workers, has_gpus=True)
        changes["host_kv_gib"] = host_bytes / GIB
    else:
        changes["cpu_kv_gib"] = config.cpu_kv_gib / count
        changes["host_kv_gib"] = None if config.host_kv_gib is None else config.host_kv_gib / count
    lengths = config.row_lengths
    if lengths is not None and lengths.rows is not None:
        changes["row_lengths"] = lengths.model_copy(update={"rows": ceil(lengths.rows / count)})
    return config.model_copy(update=changes)


def stages_of_replica(config: EngineConfig, *, num_gpus: int) -> int:
    """Return the pipeline stages of each replica. ``ValueError`` if there are fewer GPUs than needed."""
    count = config.num_replicas
    if num_gpus and num_gpus < count:
        raise ValueError(
            f"replicas {count} need a GPU each, and this executor has {num_gpus}: lower replicas, or give each "
            f"executor {count} GPUs (spark.executor.resource.gpu.amount)"
        )
    try:
        return pipeline_parallel_size(config, num_gpus=num_gpus // count)
    except ValueError as error:
        if count == 1 or not num_gpus:
            raise
        raise ValueError(
            f"each of {count} replicas gets {num_gpus // count} of {num_gpus} GPUs: {error}"
        ) from None


def speculating(share: Share) -> Share:
    """Return the share of a replica that runs the same with n-gram speculation."""
    arguments = {**share.config.vllm, "speculative_config": SPECULATION}
    return replace(share, config=share.config.model_copy(update={"vllm": arguments}))


def _divide_gpus(gpus: Sequence[Gpu], count: int) -> list[tuple[Gpu, ...]]:
    near = sorted(
        gpus, key=lambda gpu: (gpu.numa_node is None, gpu.numa_node or 0, gpu.pci_address, gpu.uuid)
    )
    share = len(near) // count
    return [tuple(near[replica * share : (replica + 1) * share]) for replica in range(count)]


def _common_node(gpus: Sequence[Gpu]) -> int | None:
    nodes = {gpu.numa_node for gpu in gpus}
    return nodes.pop() if len(nodes) == 1 else None


def _divide_cores(
    cores_of_nodes: dict[int, tuple[int, ...]], nodes: Sequence[int | None]
) -> list[tuple[int, ...]]:
    """Return equally many cores for each replica, given the NUMA node that each should be near."""
    everything = [core for cores in cores_of_nodes.values() for core in cores]
    count = len(nodes)
    if len(everything) < count:  # they take turns
        return [(everything[replica % len(everything)],) for replica in range(count)]
    if any(node not in cores_of_nodes for node in nodes):
        return _without_gpus(cores_of_nodes, count)
    sharing = {
        node: [i for i, node_of_replica in enumerate(nodes) if node_of_replica == node]
        for node in cores_of_nodes
    }
    share = min(len(cores_of_nodes[node]) // len(replicas) for node, replicas in sharing.items() if replicas)
    if share == 0:
        return _in_equal_parts(everything, count)
    shares: dict[int, tuple[int, ...]] = {}
    for node, replicas in sharing.items():
        for place, replica in enumerate(replicas):
            shares[replica] = cores_of_nodes[node][place * share : (place + 1) * share]
    return [shares[replica] for replica in range(count)]


def _without_gpus(cores_of_nodes: dict[int, tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Keep each replica on one node if the nodes can be divided so, with as many replicas on each."""
    sizes = {len(cores) for cores in cores_of_nodes.values()}
    if len(sizes) == 1 and count % len(cores_of_nodes) == 0 and sizes.pop() >= count // len(cores_of_nodes):
        per_node = count // len(cores_of_nodes)
        return [part for cores in cores_of_nodes.values() for part in _in_equal_parts(cores, per_node)]
    return _in_equal_parts([core for cores in cores_of_nodes.values() for core in cores], count)


def _in_equal_parts(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    share = len(cores) // count
    return [tuple(cores[part * share : (part + 1) * share]) for part in range(count)]
