"""Find the NUMA node of a GPU and bind memory to it: pinned pages cannot migrate later.

Uses libnuma if the machine has it. Otherwise everything here returns None or does nothing.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def numa_node_of_gpu(device: torch.device) -> int | None:
    """Return the GPU's NUMA node; ``None`` if the machine has one node or does not say."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the PCI fields
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return read_numa_node(_PCI_DEVICES / address)


def read_numa_node(pci_device: Path) -> int | None:
    """Read the NUMA node of a PCI device from its directory under ``/sys``."""
    try:
        node = int((pci_device / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # Linux writes -1 for "unknown"


def bind_memory(address: int, num_bytes: int, node: int) -> bool:
    """Take the pages of an untouched mapping from ``node``. Return whether that was possible."""
    try:
        libnuma = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    if libnuma.numa_available() < 0 or node > libnuma.numa_max_node():
        return False
    libnuma.numa_tonode_memory.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libnuma.numa_tonode_memory.restype = None
    libnuma.numa_tonode_memory(address, num_bytes, node)
    return True
