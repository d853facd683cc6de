"""Describes this machine's GPUs and links as a node profile, by NVIDIA's own tool: for choices before any measurement.

The rates of a known kind of GPU come from ``presets/gpus.yaml``, its memory and PCIe link from the driver, and whether
the GPUs have NVLink or share a switch from the driver's topology. Nothing is measured, and nothing is loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pipemax.domain.specs import NodeSpec
from pipemax.domain.units import GIB
from pipemax.node.nvidia_tool import csv_rows, nvidia_smi
from pipemax.presets.gpus import driver_gpu
from pipemax.presets.nodes import node_spec

_MIB = 1024**2
_QUERY = (
    "--query-gpu=uuid,name,memory.total,pcie.link.gen.max,pcie.link.width.max",
    "--format=csv,noheader,nounits",
)
_TOPOLOGY = ("topo", "-m")
_SAME_SWITCH = ("PIX", "PXB")


def machine_profile(
    environ: Mapping[str, str],
    gpus: Sequence[str],
    *,
    run: Callable[..., str | None] = nvidia_smi,
    meminfo: Path = Path("/proc/meminfo"),
) -> NodeSpec:
    """Return the profile of the ``gpus`` (UUIDs) that an engine of this environment may use.

    ``run`` calls ``nvidia-smi``. Raise ``ValueError`` that says what is
    not known: no driver, GPUs of several kinds, MIG instances, or a kind of GPU without figures.
    """
    listed = run(environ, *_QUERY)
    if listed is None:
        raise ValueError("there is no NVIDIA driver")
    rows = csv_rows(listed)
    mine = [row for row in rows if row[0] in set(gpus)]
    if not mine or len(mine) != len(gpus):
        raise ValueError("the driver does not describe all of the GPUs that this engine may use")
    kinds = {tuple(row[1:]) for row in mine}
    if len(kinds) > 1:
        raise ValueError(f"its GPUs are of several kinds: {', '.join(sorted({row[1] for row in mine}))}")
    ((name, memory_mib, generation, width),) = kinds
    gpu = driver_gpu(name)
    if gpu is None:
        raise ValueError(f"the rates of a {name} are not known (presets/gpus.yaml lists the known GPUs)")
    if generation.isdigit() and width.isdigit():  # [N/A] where the driver does not say
        gpu = gpu.in_slot(int(generation), int(width))
    cells = _topology(
        run(environ, *_TOPOLOGY) or "", [index for index, row in enumerate(rows) if row[0] in set(gpus)]
    )
    joined = bool(cells) and all(cell.startswith("NV") for row in cells for cell in row)
    node = node_spec(
        gpu,
        name=f"{len(mine)} × {name}",
        num_gpus=len(mine),
        host_memory_bytes=_host_memory_bytes(meminfo),
        nvlink=joined and gpu.nvlink_bytes_per_s is not None,
        server_gpus=len(mine),
    )
    return replace(
        node,
        gpu=replace(node.gpu, name=name, memory_bytes=int(memory_mib) * _MIB),
        gpus_per_root=1 + max((sum(cell in _SAME_SWITCH for cell in row) for row in cells), default=0),
    )


def smallest_gpu_bytes(
    environ: Mapping[str, str], gpus: Sequence[str], *, run: Callable[..., str | None] = nvidia_smi
) -> int | None:
    """Return the memory of the smallest of the ``gpus`` (UUIDs), of any kind; ``None`` if the driver does not say."""
    try:
        listed = run(environ, "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits") or ""
    except ValueError:  # a driver that fails is named where the machine is described
        return None
    sizes = [int(size) * _MIB for uuid, size in csv_rows(listed) if uuid in set(gpus) and size.isdigit()]
    return min(sizes, default=None)


def _topology(text: str, indices: Sequence[int]) -> list[list[str]]:
    """Return how each of the GPUs reaches each other one (``NV18``, ``PIX``, ``NODE``, ``SYS``); empty if unknown."""
    wanted = [f"GPU{index}" for index in indices]
    table = [line.split() for line in text.replace("\x1b[4m", "").replace("\x1b[0m", "").splitlines()]
    header = next((row for row in table if row and row[0] == "GPU0"), None)
    rows = {row[0]: row[1:] for row in table if row and row is not header}
    if header is None or not all(name in header and name in rows for name in wanted):
        return []
    columns = {name: header.index(name) for name in wanted}
    return [[rows[one][columns[other]] for other in wanted if other != one] for one in wanted]


def _host_memory_bytes(meminfo: Path) -> float:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            return float(line.split()[1]) * 1024
    return 64.0 * GIB
