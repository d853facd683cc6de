"""A node by its cloud's name, by its GPUs, or by a file: the same GPU is the same node."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from pipemax.presets import load_node, load_nodes, node_entry
from pipemax.presets.nodes import find_gpu


def test_every_node_of_the_table_loads_under_its_own_name() -> None:
    names = [entry.name for entry in load_nodes()]
    assert [load_node(name).name for name in names] == names
    assert len({name.lower() for name in names}) == len(names)


def test_the_nodes_that_people_rent_are_there() -> None:
    families = ("g4dn.", "g5.", "g6.", "g6e.", "p4d.", "p4de.", "p5.", "p5en.", "p6-", "g2-", "a2-", "a3-")
    families += ("Standard_NC96ads_A100", "Standard_ND96isr_H100", "Standard_NC80adis_H100")
    for family in families:
        assert any(entry.name.startswith(family) for entry in load_nodes()), family
    for entry in load_nodes():
        assert 15e9 < entry.memory_bytes < 4e12
        if not entry.name.endswith("x8"):  # the paper's
            assert entry.vcpus is not None


@pytest.mark.parametrize("gpus", ["8xL4", "8xl4", "8×L4", "8 x l4"])
def test_eight_l4_are_the_rented_node_of_eight_l4(gpus: str) -> None:
    assert load_node(gpus) == load_node("g6.48xlarge")


@pytest.mark.parametrize(
    ("gpus", "node"),
    [
        ("8xL20", "l20x8"),
        ("8xRTX5090", "rtx5090x8"),
        ("8xA100-80GB", "p4de.24xlarge"),
        ("8xh100", "p5.48xlarge"),
    ],
)
def test_a_count_of_gpus_is_the_first_node_of_the_table_with_as_many(gpus: str, node: str) -> None:
    assert load_node(gpus) == load_node(node)


def test_where_no_node_has_as_many_each_gpu_has_128_gb_of_host_memory() -> None:
    node = load_node("3xRTX-4090")
    assert (node.num_gpus, node.host_memory_bytes) == (3, 3 * 128e9)
    assert node.gpu == find_gpu("RTX 4090").spec()


def test_names_are_found_whatever_their_case() -> None:
    assert load_node("standard_nd96isr_h100_V5") == load_node("Standard_ND96isr_H100_v5")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("g6.49xlarge", "g6.24xlarge, g6.48xlarge, g6.xlarge"),
        ("8xL5", "8xL4, 8xL20, 8xL40"),
        ("8xA100", "8xA100-SXM-40GB, 8xA100-SXM-80GB, 8xA100-PCIe-40GB"),
        ("h100", "h100x8"),
    ],
)
def test_an_unknown_name_lists_the_nearest_three(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no node '{name}'; the nearest are {nearest}") as caught:
        load_node(name)
    listed = str(caught.value).partition("nearest are ")[2].partition(". A node is")[0]
    assert len(listed.split(", ")) == 3


def test_no_gpu_at_all_is_no_node() -> None:
    with pytest.raises(ValueError, match="num_gpus is 0, must be at least 1"):
        load_node("0xL4")


def test_a_file_names_a_gpu_or_gives_all_its_numbers(tmp_path: Path) -> None:
    named, numbers = tmp_path / "named.yaml", tmp_path / "numbers.yml"
    entry = node_entry("g6.48xlarge")
    named.write_text(f"{{name: g6.48xlarge, gpu: L4, num_gpus: 8, host_memory_gib: {entry.host_memory_gib}}}")
    assert load_node(str(named)) == load_node("g6.48xlarge")
    values = asdict(load_node("g6.48xlarge"))
    values["gpu"]["product_tokens"] = [list(row) for row in values["gpu"]["product_tokens"]]
    numbers.write_text(yaml.safe_dump(values))
    assert load_node(str(numbers)) == load_node("g6.48xlarge")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "{name: own, gpu: L5, num_gpus: 8, host_memory_gib: 64}",
            "no GPU 'L5'; the nearest are L4, L20, L40",
        ),
        ("{name: own, gpu: L4, num_gpus: 8}", "give one of host_memory_gib and host_memory_bytes"),
        ("{name: own, gpu: L4, num_gpus: 2, host_memory_gib: 64, nvlink: true}", "own: a L4 has no NVLink"),
        ("{name: own, gpu: L4, num_gpus: 2, host_memory_gib: 64, gpus: 2}", r"unknown keys \['gpus'\]"),
        ("- L4", "expected 'name: value' lines, got a list"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=fault):
        load_node(str(path))


def test_nvlink_is_where_the_gpu_or_the_node_has_it() -> None:
    def bus_rate(name: str) -> float:
        return load_node(name).all_reduce.bus_bytes_per_s

    assert bus_rate("p4de.24xlarge") == pytest.approx(0.77 * 300e9)
    assert bus_rate("Standard_NC96ads_A100_v4") == 20e9, "four cards, and bridges join two"
    assert bus_rate("Standard_NC80adis_H100_v5") > 100e9, "two cards with a bridge"
    assert bus_rate("g4dn.12xlarge") < 20e9, "no faster than its PCIe"


def test_a_node_of_fewer_gpus_has_its_share_of_a_servers_memory_bandwidth() -> None:
    half, whole = load_node("g6.12xlarge"), load_node("g6.48xlarge")
    assert 2 * half.host_dram_bytes_per_s == whole.host_dram_bytes_per_s
    assert load_node("a2-megagpu-16g").host_dram_bytes_per_s == whole.host_dram_bytes_per_s


def test_the_papers_nodes_are_what_they_were() -> None:
    """The results of ``lab/results`` were simulated with these figures."""
    l20, rtx = load_node("l20x8"), load_node("rtx5090x8")
    assert (l20.gpu.memory_bytes, l20.gpu.hbm_bytes_per_s, l20.gpu.flops_per_s) == (
        48306000000,
        740e9,
        105e12,
    )
    assert (l20.link.host_to_gpu_bytes_per_s, l20.link.duplex_bytes_per_s) == (25.5e9, 41e9)
    assert (rtx.gpu.memory_bytes, rtx.gpu.hbm_bytes_per_s, rtx.gpu.flops_per_s) == (
        34191000000,
        1560e9,
        200e12,
    )
    assert (rtx.link.host_to_gpu_bytes_per_s, rtx.link.duplex_bytes_per_s) == (55e9, 88e9)
    assert (rtx.link.peer_bytes_per_s, rtx.all_reduce.bus_bytes_per_s) == (25e9, 20e9)
    for node in (l20, rtx, load_node("h100x8")):
        assert (node.host_memory_bytes, node.host_dram_bytes_per_s, node.gpus_per_root) == (1024e9, 400e9, 1)
    assert replace(l20, name="") == replace(load_node("8xL20"), name="")
