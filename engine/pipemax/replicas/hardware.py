"""Read what replicas can share: the GPUs and cores that this process may use, and the NUMA node of each.

Linux tells the NUMA nodes of cores and of PCI devices in /sys, NVIDIA's own tool the PCI address of a GPU. What cannot
be read is not known, and then treated as near to everything.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from pipemax.node.gpus import engine_gpus
from pipemax.node.nvidia_tool import csv_rows, nvidia_smi

log = logging.getLogger(__name__)

_SYS = Path("/sys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that an engine may use."""

    uuid: str
    numa_node: int | None = None
    pci_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The GPUs and cores of this process."""

    gpus: tuple[Gpu, ...] = ()
    cores_of_nodes: dict[int, tuple[int, ...]]
    """NUMA node → its cores, hyperthreads of one core next to each other; nodes without a core of ours are left out."""


def read_hardware(sys: Path = _SYS) -> Hardware:
    """Return the GPUs and cores that this process may use."""
    addresses = _pci_addresses() if (uuids := engine_gpus(os.environ)) else {}
    gpus = tuple(
        Gpu(
            uuid=uuid,
            numa_node=numa_node_of(addresses.get(uuid, ""), sys),
            pci_address=addresses.get(uuid, ""),
        )
        for uuid in uuids
    )
    return Hardware(gpus=gpus, cores_of_nodes=cores_of_nodes(os.sched_getaffinity(0), sys))


def cores_of_nodes(allowed: set[int], sys: Path = _SYS) -> dict[int, tuple[int, ...]]:
    """Return the allowed cores of each NUMA node; all under node 0 where Linux tells of none."""
    nodes: dict[int, tuple[int, ...]] = {}
    for directory in sorted((sys / "devices/system/node").glob("node[0-9]*")):
        cores = _read_list(directory / "cpulist") & allowed
        if cores:
            nodes[int(directory.name.removeprefix("node"))] = _siblings_together(cores, sys)
    if set().union(*nodes.values()) != allowed:
        return {0: _siblings_together(allowed, sys)}
    return nodes


def numa_node_of(pci_address: str, sys: Path = _SYS) -> int | None:
    """Return the NUMA node of a PCI device; None if Linux does not say."""
    # NVIDIA writes 00000000:3B:00.0, Linux 0000:3b:00.0.
    domain, _, place = pci_address.lower().partition(":")
    try:
        node = int((sys / "bus/pci/devices" / f"{domain[-4:]}:{place}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _siblings_together(cores: set[int], sys: Path) -> tuple[int, ...]:
    def place(core: int) -> tuple[int, int]:
        siblings = _read_list(sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        return min(siblings, default=core), core

    return tuple(sorted(cores, key=place))


def _read_list(file: Path) -> set[int]:
    """Read numbers such as ``0-3,8``; none if the file cannot be read."""
    numbers: set[int] = set()
    try:
        for part in filter(None, file.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return numbers


def _pci_addresses() -> dict[str, str]:
    """Return the PCI address of each GPU by its UUID."""
    try:
        listed = nvidia_smi(os.environ, "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader")
    except ValueError as error:
        log.warning("nvidia-smi does not tell where the GPUs are (%s): replicas get any cores", error)
        return {}
    return {row[0]: row[1] for row in csv_rows(listed or "") if len(row) == 2}
