"""The table of nodes, ``nodes.yaml``, and the three ways to name a node: by its name, by its GPUs, by a file.

A node is a number of GPUs of the table of GPUs, with host memory. All else that the simulator needs of a node follows
from these, or is the same assumption for all nodes (``common`` in ``nodes.yaml``).
"""

import re
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from pipemax.domain.hardware import AllReduceSpec
from pipemax.domain.specs import NodeSpec
from pipemax.domain.units import GIB
from pipemax.presets.gpus import GpuEntry, load_gpus
from pipemax.presets.yaml_specs import build_spec, read_yaml

_NUM_NEAREST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What is assumed of all nodes."""

    gpus_per_root: int
    host_dram_bytes_per_s: float
    host_memory_bytes_per_gpu: float
    pcie_peer_bytes_per_s: float
    peer_latency_s: float
    pcie_all_reduce_latency_s: float
    nvlink_all_reduce_latency_s: float
    host_kv_fraction: float
    gpu_memory_fraction: float
    gpu_reserve_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEntry:
    """A machine with GPUs, as a cloud describes it."""

    name: str
    gpu: str
    """Name or alias of a GPU of ``gpus.yaml``, spaces, dashes and case aside."""
    num_gpus: int
    host_memory_gib: float | None = None
    host_memory_bytes: float | None = None
    """In place of ``host_memory_gib``."""
    vcpus: int | None = None
    nvlink: bool | None = None
    """NVLink joins all GPUs; ``None``: where the GPU has NVLink that is no bridge."""
    peer_bytes_per_s: float | None = None
    """GPU to GPU; ``None``: NVLink's, or that of all nodes without."""

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ValueError(f"num_gpus is {self.num_gpus}, must be at least 1")
        if (self.host_memory_gib is None) == (self.host_memory_bytes is None):
            raise ValueError("give one of host_memory_gib and host_memory_bytes")

    @property
    def memory_bytes(self) -> float:
        """Host memory in bytes."""
        if self.host_memory_bytes is not None:
            return self.host_memory_bytes
        assert self.host_memory_gib is not None, self
        return self.host_memory_gib * GIB

    def spec(self) -> NodeSpec:
        """Return the node's profile. Raise ``ValueError`` for a GPU that is not listed."""
        gpu = find_gpu(self.gpu)
        has_nvlink = gpu.nvlink_bytes_per_s is not None and not gpu.nvlink_is_bridge
        return node_spec(
            gpu,
            name=self.name,
            num_gpus=self.num_gpus,
            host_memory_bytes=self.memory_bytes,
            nvlink=has_nvlink if self.nvlink is None else self.nvlink,
            peer_bytes_per_s=self.peer_bytes_per_s,
        )


def node_spec(
    gpu: GpuEntry,
    *,
    name: str,
    num_gpus: int,
    host_memory_bytes: float,
    nvlink: bool,
    peer_bytes_per_s: float | None = None,
    server_gpus: int = 8,
) -> NodeSpec:
    """Return the profile of a node of these GPUs. ``nvlink``: it joins all of them.

    A node of fewer than ``server_gpus`` has their share of the bandwidth of a server's memory.

    Raise ``ValueError`` for NVLink that the GPU does not have.
    """
    common, nvlink_rate = _common(), gpu.nvlink_bus_bytes_per_s
    if nvlink and nvlink_rate is None:
        raise ValueError(f"{name}: a {gpu.name} has no NVLink")
    link = gpu.link(peer_bytes_per_s=common.pcie_peer_bytes_per_s, peer_latency_s=common.peer_latency_s)
    bus_rate = min(common.pcie_peer_bytes_per_s, link.host_to_gpu_bytes_per_s)
    all_reduce = AllReduceSpec(bus_bytes_per_s=bus_rate, latency_s=common.pcie_all_reduce_latency_s)
    if nvlink and nvlink_rate is not None:
        all_reduce = AllReduceSpec(bus_bytes_per_s=nvlink_rate, latency_s=common.nvlink_all_reduce_latency_s)
    dram_rate = common.host_dram_bytes_per_s * min(1.0, num_gpus / server_gpus)
    if gpu.host_nvlink_bytes_per_s is not None:  # each such GPU has a host's memory of its own
        dram_rate = num_gpus * link.duplex_bytes_per_s
    return NodeSpec(
        name=name,
        gpu=gpu.spec(),
        num_gpus=num_gpus,
        link=replace(link, peer_bytes_per_s=peer_bytes_per_s or all_reduce.bus_bytes_per_s),
        gpus_per_root=common.gpus_per_root,
        root_bytes_per_s=link.host_to_gpu_bytes_per_s,
        host_dram_bytes_per_s=dram_rate,
        host_memory_bytes=host_memory_bytes,
        host_kv_fraction=common.host_kv_fraction,
        gpu_memory_fraction=common.gpu_memory_fraction,
        gpu_reserve_bytes=common.gpu_reserve_bytes,
        all_reduce=all_reduce,
    )


def load_node(name: str) -> NodeSpec:
    """Return the profile of a node: a name of ``nodes.yaml``, COUNTxGPU, or the path of a .yaml file.

    A file has the keys of ``NodeEntry``, or all of ``NodeSpec`` with a GPU in numbers. Raise ``ValueError`` as
    ``build_spec`` and ``node_entry`` do.
    """
    if not name.endswith((".yaml", ".yml")):
        return node_entry(name).spec()
    values = read_yaml(Path(name), "")
    if not isinstance(values, dict):
        raise ValueError(f"{name}: expected 'name: value' lines, got a {type(values).__name__}")
    if isinstance(values.get("gpu"), str):
        return build_spec(NodeEntry, values, f"node profile {name}").spec()
    return build_spec(NodeSpec, values, f"node profile {name}")


def node_entry(name: str) -> NodeEntry:
    """Return the node of a name, or of COUNTxGPU such as ``8xL4``.

    COUNTxGPU is the first node of the table with as many of that GPU, whose host memory it has; where there is none,
    it has ``host_memory_bytes_per_gpu`` for each GPU. Raise ``ValueError`` that lists the nearest names.
    """
    for entry in load_nodes():
        if entry.name.lower() == name.lower():
            return entry
    counted = re.fullmatch(r"(\d+)\s*[x×X*]\s*(.+)", name.strip())
    if counted is None:
        raise ValueError(_unknown("node", name, _node_names()))
    num_gpus, gpu = int(counted[1]), find_gpu(counted[2], node=name)
    for entry in load_nodes():
        if entry.num_gpus == num_gpus and find_gpu(entry.gpu) == gpu:
            return entry
    return NodeEntry(
        name=f"{num_gpus}x{gpu.name.replace(' ', '-')}",
        gpu=gpu.name,
        num_gpus=num_gpus,
        host_memory_bytes=num_gpus * _common().host_memory_bytes_per_gpu,
    )


def find_gpu(name: str, *, node: str | None = None) -> GpuEntry:
    """Return the GPU of this name or alias. Raise ``ValueError`` that lists the nearest names, for ``node`` as such."""
    named = _gpus_by_name()
    if _plain(name) in named:
        return named[_plain(name)]
    if node is None:
        raise ValueError(_unknown("GPU", name, [gpu.name for gpu in load_gpus()]))
    count = node[: -len(name)] or "1x"
    raise ValueError(_unknown("node", node, [count + gpu.name.replace(" ", "-") for gpu in load_gpus()]))


@cache
def load_nodes() -> tuple[NodeEntry, ...]:
    """Return the table of nodes. Raise ``ValueError`` as ``build_spec`` does."""
    listed = read_yaml(None, "nodes.yaml")["nodes"]
    return tuple(build_spec(NodeEntry, values, f"nodes.yaml: {values.get('name')}") for values in listed)


@cache
def _common() -> _Common:
    return build_spec(_Common, read_yaml(None, "nodes.yaml")["common"], "nodes.yaml: common")


@cache
def _gpus_by_name() -> dict[str, GpuEntry]:
    return {_plain(name): gpu for gpu in load_gpus() for name in (gpu.name, *gpu.aliases)}


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _node_names() -> list[str]:
    return [entry.name for entry in load_nodes()]


def _unknown(kind: str, name: str, known: list[str]) -> str:
    """Return a sentence with the names that are most like this one; those that begin with it come first."""
    plain_name = _plain(name)

    def distance(other: str) -> tuple[bool, float]:
        return not other.startswith(plain_name), -SequenceMatcher(a=plain_name, b=other).ratio()

    alike = sorted(known, key=lambda one: distance(_plain(one)))
    return (
        f"no {kind} {name!r}; the nearest are {', '.join(alike[:_NUM_NEAREST])}. "
        "A node is a name of presets/nodes.yaml, COUNTxGPU such as 8xL4, or a .yaml file"
    )
