"""What Linux tells of cores, NUMA nodes and GPUs, as files of /sys."""

from pathlib import Path

from pipemax.replicas.hardware import cores_of_nodes, numa_node_of


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def two_nodes(sys: Path) -> None:
    write(sys / "devices/system/node/node0/cpulist", "0-1,4-5")
    write(sys / "devices/system/node/node1/cpulist", "2-3,6-7")
    for core in range(8):
        siblings = f"{core % 4},{core % 4 + 4}"
        write(sys / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", siblings)


def test_the_threads_of_a_core_lie_beside_each_other(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    assert cores_of_nodes(set(range(8)), tmp_path) == {0: (0, 4, 1, 5), 1: (2, 6, 3, 7)}


def test_only_allowed_cores_count(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    assert cores_of_nodes({0, 1}, tmp_path) == {0: (0, 1)}


def test_where_linux_tells_of_no_nodes_all_cores_are_one(tmp_path: Path) -> None:
    assert cores_of_nodes({3, 1}, tmp_path) == {0: (1, 3)}


def test_a_gpu_is_found_by_the_address_that_nvidia_writes(tmp_path: Path) -> None:
    write(tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node", "1")
    write(tmp_path / "bus/pci/devices/0000:5e:00.0/numa_node", "-1")
    assert numa_node_of("00000000:3B:00.0", tmp_path) == 1
    assert numa_node_of("00000000:5E:00.0", tmp_path) is None, "one socket, or a virtual machine"
    assert numa_node_of("", tmp_path) is None
