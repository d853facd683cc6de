"""A node profile from what NVIDIA's tool prints, compared with the profiles that ship."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pipemax.domain.specs import NodeSpec
from pipemax.node.machine import machine_profile, smallest_gpu_bytes
from pipemax.presets import driver_gpu, load_gpus, load_node

H100 = "NVIDIA H100 80GB HBM3, 81559, 5, 16"
RTX_5090 = "NVIDIA GeForce RTX 5090, 32607, 5, 16"
L20 = "NVIDIA L20, 46068, 4, 16"


def profile(kinds: Sequence[str], cells: str, tmp_path: Path, *, mine: Sequence[int] = ()) -> NodeSpec:
    """Return the profile of a machine with these GPUs, each pair of which is connected by ``cells``."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1056784568 kB\nMemFree:        1 kB\n", encoding="ascii")
    names = [f"GPU{index}" for index in range(len(kinds))]
    rows = [f"{one} {' '.join(' X ' if one == other else cells for other in names)} 0-31 0" for one in names]
    topology = "\n".join(
        [
            "\t\x1b[4m" + " ".join(names) + " CPU Affinity NUMA Affinity\x1b[0m",
            *rows,
            "",
            "Legend:",
            "  X = Self",
        ]
    )
    query = "\n".join(f"GPU-{index}, {kind}" for index, kind in enumerate(kinds))

    def run(environ: Mapping[str, str], *arguments: str) -> str:
        return topology if arguments[0] == "topo" else query

    gpus = [f"GPU-{index}" for index in (mine or range(len(kinds)))]
    return machine_profile({}, gpus, run=run, meminfo=meminfo)


@pytest.mark.parametrize(
    ("kind", "cells", "shipped"),
    [(H100, "NV18", "h100x8"), (RTX_5090, "NODE", "rtx5090x8"), (L20, "SYS", "l20x8")],
)
def test_the_driver_describes_the_nodes_whose_profiles_ship(
    kind: str, cells: str, shipped: str, tmp_path: Path
) -> None:
    found, known = profile([kind] * 8, cells, tmp_path), load_node(shipped)
    assert (found.num_gpus, found.gpus_per_root) == (known.num_gpus, known.gpus_per_root)
    assert found.gpu.memory_bytes == pytest.approx(known.gpu.memory_bytes, rel=0.01)
    assert found.gpu.hbm_bytes_per_s == known.gpu.hbm_bytes_per_s
    assert found.gpu.flops_per_s == known.gpu.flops_per_s
    assert found.link.host_to_gpu_bytes_per_s == pytest.approx(known.link.host_to_gpu_bytes_per_s, rel=0.08)
    assert found.all_reduce.bus_bytes_per_s == pytest.approx(known.all_reduce.bus_bytes_per_s, rel=0.25)
    assert found.host_memory_bytes == pytest.approx(1.08e12, rel=0.01)


def test_the_smallest_gpu_of_several_kinds_counts() -> None:
    def run(environ: Mapping[str, str], *arguments: str) -> str:
        return "GPU-0, 81559\nGPU-1, 46068\nGPU-2, 16000\nMIG-3, [N/A]\n"

    def fails(environ: Mapping[str, str], *arguments: str) -> str:
        raise ValueError("nvidia-smi failed")

    assert smallest_gpu_bytes({}, ["GPU-0", "GPU-1"], run=run) == 46068 * 1024**2
    assert smallest_gpu_bytes({}, ["MIG-3"], run=run) is None
    assert smallest_gpu_bytes({}, ["GPU-0"], run=fails) is None


def test_gpus_behind_one_switch_share_its_link(tmp_path: Path) -> None:
    assert profile([L20] * 4, "PIX", tmp_path).gpus_per_root == 4


def test_only_the_gpus_of_this_engine_count(tmp_path: Path) -> None:
    found = profile([L20, RTX_5090, RTX_5090, L20], "PIX", tmp_path, mine=[1, 2])
    assert (found.name, found.num_gpus, found.gpus_per_root) == ("2 × NVIDIA GeForce RTX 5090", 2, 2)


def test_a_link_that_the_driver_does_not_tell_is_the_tables(tmp_path: Path) -> None:
    for name, node in (("NVIDIA L20, 46068", "l20x8"), ("NVIDIA H100 80GB HBM3, 81559", "h100x8")):
        found = profile([f"{name}, [N/A], [N/A]"] * 2, "SYS", tmp_path)
        assert found.link.host_to_gpu_bytes_per_s == load_node(node).link.host_to_gpu_bytes_per_s


def test_a_gpu_in_a_slot_of_fewer_lanes_has_their_rate(tmp_path: Path) -> None:
    found = profile(["NVIDIA GeForce RTX 5090, 32607, 4, 8"] * 2, "SYS", tmp_path)
    link = found.link
    assert link.host_to_gpu_bytes_per_s == link.gpu_to_host_bytes_per_s == pytest.approx(0.82 * 8 * 1.969e9)
    assert link.duplex_bytes_per_s < 2 * link.host_to_gpu_bytes_per_s
    assert found.all_reduce.bus_bytes_per_s == link.peer_bytes_per_s == link.host_to_gpu_bytes_per_s
    assert found.root_bytes_per_s == link.host_to_gpu_bytes_per_s


def test_a_bridge_counts_only_where_the_driver_shows_it(tmp_path: Path) -> None:
    a100 = "NVIDIA A100 80GB PCIe, 81920, 4, 16"
    bridged, apart = (profile([a100] * 2, cells, tmp_path) for cells in ("NV12", "SYS"))
    assert bridged.all_reduce.bus_bytes_per_s > 10 * apart.all_reduce.bus_bytes_per_s


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the rates of a Voodoo 2 are not known"):
        profile(["Voodoo 2, 12, 1, 1"], "SYS", tmp_path)
    with pytest.raises(ValueError, match="several kinds: NVIDIA GeForce RTX 5090, NVIDIA L20"):
        profile([L20, RTX_5090], "SYS", tmp_path)
    with pytest.raises(ValueError, match="does not describe all of the GPUs"):
        profile([L20], "SYS", tmp_path, mine=[0, 7])
    with pytest.raises(ValueError, match="there is no NVIDIA driver"):
        machine_profile({"PATH": str(tmp_path)}, ["GPU-0"])


def test_the_figures_are_those_of_the_kind_of_gpu_and_of_no_other() -> None:
    names = {
        "NVIDIA L4": "L4",
        "NVIDIA L40S": "L40S",
        "NVIDIA L20": "L20",
        "Tesla T4": "T4",
        "NVIDIA A10G": "A10G",
        "NVIDIA A10": "A10",
        "NVIDIA H200": "H200",
        "NVIDIA H20": "H20",
        "NVIDIA GH200 480GB": "GH200",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA H100 NVL": "H100 NVL",
        "NVIDIA H100 80GB HBM3": "H100 SXM",
        "NVIDIA A100-SXM4-80GB": "A100 SXM 80GB",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX PRO 6000 Server",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    }
    for driver_name, name in names.items():
        found = driver_gpu(driver_name)
        assert found is not None
        assert found.name == name
    for gpu in load_gpus():
        assert driver_gpu(f"NVIDIA {gpu.driver_name}") == gpu, "no entry hides another"
    assert driver_gpu("NVIDIA V100") is None
