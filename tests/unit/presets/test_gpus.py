"""The table of GPUs: its units, that no figure counts sparsity, and where each figure comes from."""

import pytest

from pipemax.presets import GpuEntry, build_spec, load_gpus
from pipemax.presets.gpus import Basis
from pipemax.presets.nodes import find_gpu
from pipemax.presets.yaml_specs import read_yaml

ASKED = (
    *("T4", "A10G", "L4", "L20", "L40", "L40S", "A100 PCIe 40GB", "A100 PCIe 80GB", "A100 SXM 40GB"),
    *("A100 SXM 80GB", "RTX 3090", "RTX 4090", "RTX 5090", "RTX 6000 Ada", "RTX PRO 6000", "H100 PCIe"),
    *("H100 SXM", "H200", "B200", "GH200"),
)
GPUS = pytest.mark.parametrize("gpu", load_gpus(), ids=lambda gpu: gpu.name)


def test_the_gpus_that_people_rent_are_there_once() -> None:
    names = [gpu.name for gpu in load_gpus()]
    assert set(ASKED) <= set(names)
    assert len(set(names)) == len(names)


@GPUS
def test_figures_have_the_units_that_their_names_say(gpu: GpuEntry) -> None:
    assert 15e9 < gpu.memory_bytes < 300e9
    assert 250e9 < gpu.hbm_bytes_per_s < 10e12
    assert 50e12 < gpu.bf16_flops_per_s < 3e15
    assert gpu.pcie_lanes == 16
    assert gpu.nvlink_bytes_per_s is None or 100e9 < gpu.nvlink_bytes_per_s < 2e12
    assert gpu.source


@GPUS
def test_arithmetic_is_dense(gpu: GpuEntry) -> None:
    """Tensor cores do twice as much in half the bits; a figure with sparsity in one type alone breaks that."""
    if gpu.fp8_flops_per_s is not None:
        assert gpu.fp8_flops_per_s / gpu.bf16_flops_per_s == pytest.approx(2, rel=0.1)
    if gpu.fp4_flops_per_s is not None:
        assert gpu.fp8_flops_per_s is not None
        # GeForce cards halve the arithmetic of FP8, and not of FP4, where sums have 32 bits.
        times = 4 if gpu.name == "RTX 5090" else 2
        assert gpu.fp4_flops_per_s / gpu.fp8_flops_per_s == pytest.approx(times, rel=0.1)
    # With sparsity in all types, a GPU would compute more for each byte that it reads than any does.
    most = 430 if gpu.fp8_flops_per_s else 215
    assert gpu.bf16_flops_per_s / gpu.hbm_bytes_per_s < most


@GPUS
def test_what_is_achieved_is_less_than_the_vendor_says(gpu: GpuEntry) -> None:
    spec, link = gpu.spec(), gpu.link(peer_bytes_per_s=1e9, peer_latency_s=0.0)
    assert 0.6 < spec.hbm_bytes_per_s / gpu.hbm_bytes_per_s < 1
    assert 0.6 < spec.flops_per_s / gpu.bf16_flops_per_s < 1
    assert (spec.fp8_flops_per_s is None) == (gpu.fp8_flops_per_s is None)
    assert (spec.fp4_flops_per_s is None) == (gpu.fp4_flops_per_s is None)
    lanes_rate = 16 * {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}[gpu.pcie_generation]
    if gpu.host_nvlink_bytes_per_s is None:
        assert 0.75 < link.host_to_gpu_bytes_per_s / lanes_rate < 0.95
    else:
        assert link.host_to_gpu_bytes_per_s > 5 * lanes_rate
    assert link.host_to_gpu_bytes_per_s < link.duplex_bytes_per_s < 2 * link.host_to_gpu_bytes_per_s
    if gpu.nvlink_bytes_per_s is not None:
        assert gpu.nvlink_bus_bytes_per_s is not None
        assert 0.5 < gpu.nvlink_bus_bytes_per_s / (gpu.nvlink_bytes_per_s / 2) < 1


def test_every_figure_has_its_basis() -> None:
    h100, server = find_gpu("H100"), find_gpu("RTX PRO 6000 Server")
    assert h100.basis("host_to_gpu_bytes_per_s") is Basis.MEASURED
    assert h100.basis("duplex_bytes_per_s") is Basis.GUESSED
    assert h100.basis("fp8_flops_per_s") is Basis.DATASHEET
    assert server.basis("fp8_flops_per_s") is Basis.GUESSED
    assert server.basis("hbm_bytes_per_s") is Basis.DATASHEET


def test_an_entry_without_a_figure_or_with_one_of_no_meaning_is_refused() -> None:
    values = read_yaml(None, "gpus.yaml")["gpus"][0]
    for name in GpuEntry.__dataclass_fields__.keys() - {"aliases", "achieved", "measured", "guessed"}:
        lacking = {key: value for key, value in values.items() if key != name}
        with pytest.raises(ValueError, match=rf"missing keys \['{name}'\]"):
            build_spec(GpuEntry, lacking, "own")
    with pytest.raises(ValueError, match=r"measured or guessed names \['speed'\], which are no figures"):
        build_spec(GpuEntry, values | {"measured": {"speed": "by hand"}}, "own")
    with pytest.raises(ValueError, match="PCIe generation 2 is not known"):
        build_spec(GpuEntry, values | {"pcie_generation": 2}, "own")
    with pytest.raises(ValueError, match="aliases must be a list of words, got 'T4'"):
        build_spec(GpuEntry, values | {"aliases": "T4"}, "own")
