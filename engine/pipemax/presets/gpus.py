"""The table of GPUs, ``gpus.yaml``: what their vendor says of them, and what programs reach.

A figure of a GPU stands there and nowhere else. Each figure has its source: the entry's data sheet, unless ``measured``
or ``guessed`` names the figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from typing import Self

from pipemax.domain.hardware import GpuSpec, LinkSpec
from pipemax.presets.yaml_specs import build_spec, read_yaml

_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of one PCIe lane and direction, by generation."""


class Basis(StrEnum):
    """Where a figure comes from."""

    MEASURED = "measured"
    DATASHEET = "datasheet"
    GUESSED = "guessed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What counts for all GPUs that have no figure of their own."""

    hbm_share: float
    """Share of the memory bandwidth that reading weights and KV reaches."""
    flops_share: float
    """Share of the arithmetic that large matrix products reach."""
    pcie_share: float
    """Share of the lanes' rate that copies reach."""
    duplex: float
    """Both directions of the host's link together, relative to one."""
    nvlink_share: float
    """NCCL's bus bandwidth of an all-reduce, as a share of NVLink's rate in one direction."""
    per_copy_s: float
    step_overhead_s: float
    product_tokens: tuple[tuple[int, int], ...]
    smoothing: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """Rates that programs reach on one kind of GPU; ``None``: the share of ``Common`` counts."""

    hbm_bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    host_to_gpu_bytes_per_s: float | None = None
    gpu_to_host_bytes_per_s: float | None = None
    duplex_bytes_per_s: float | None = None
    nvlink_bus_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEntry:
    """One kind of GPU. Rates are the vendor's, dense (without sparsity), unless they are ``achieved``."""

    name: str
    driver_name: str
    """Words of the name that NVIDIA's driver gives it."""
    memory_bytes: float
    """As the driver reports it."""
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    """Of tensor cores that sum in 32 bits; FP16 where the GPU has no BF16."""
    fp8_flops_per_s: float | None
    """``None`` where the GPU has no FP8."""
    fp4_flops_per_s: float | None
    """``None`` where the GPU has no FP4."""
    pcie_generation: int
    pcie_lanes: int
    nvlink_bytes_per_s: float | None
    """Of all links and both directions together, as data sheets have it; ``None`` without NVLink."""
    nvlink_is_bridge: bool
    """NVLink joins two cards by a bridge that is bought apart, so that a node need not have it."""
    host_nvlink_bytes_per_s: float | None
    """Of a link to the host that is not PCIe (NVLink-C2C), both directions together."""
    source: str
    aliases: tuple[str, ...] = ()
    achieved: Achieved = field(default_factory=Achieved)
    measured: Mapping[str, str] = field(default_factory=dict)
    """Figures that were measured, and on what."""
    guessed: Mapping[str, str] = field(default_factory=dict)
    """Figures that are guesses, and how; ``achieved`` is all of these that were not measured."""

    def __post_init__(self) -> None:
        figures = {one.name for kind in (GpuEntry, Achieved) for one in fields(kind)}
        if unknown := (self.measured.keys() | self.guessed.keys()) - figures:
            raise ValueError(f"measured or guessed names {sorted(unknown)}, which are no figures")
        if self.pcie_generation not in _LANE_BYTES_PER_S:
            raise ValueError(f"the rate of PCIe generation {self.pcie_generation} is not known")

    def basis(self, figure: str) -> Basis:
        """Return where a figure comes from. A rate among ``achieved`` that was not measured is a guess."""
        if figure in self.measured:
            return Basis.MEASURED
        is_own = figure in {one.name for one in fields(GpuEntry)}
        return Basis.DATASHEET if is_own and figure not in self.guessed else Basis.GUESSED

    @property
    def nvlink_bus_bytes_per_s(self) -> float | None:
        """The bus bandwidth of an all-reduce over NVLink, as NCCL's tests report it; ``None`` without NVLink."""
        if self.nvlink_bytes_per_s is None:
            return None
        return self.achieved.nvlink_bus_bytes_per_s or _common().nvlink_share * self.nvlink_bytes_per_s / 2

    def spec(self) -> GpuSpec:
        """Return the GPU with the rates that it achieves; FP8 and FP4 reach the same share as BF16."""
        common = _common()
        flops = self.achieved.bf16_flops_per_s or common.flops_share * self.bf16_flops_per_s
        share = flops / self.bf16_flops_per_s
        return GpuSpec(
            name=self.name,
            memory_bytes=int(self.memory_bytes),
            hbm_bytes_per_s=self.achieved.hbm_bytes_per_s or common.hbm_share * self.hbm_bytes_per_s,
            flops_per_s=flops,
            fp8_flops_per_s=None if self.fp8_flops_per_s is None else share * self.fp8_flops_per_s,
            fp4_flops_per_s=None if self.fp4_flops_per_s is None else share * self.fp4_flops_per_s,
            step_overhead_s=common.step_overhead_s,
            product_tokens=common.product_tokens,
            smoothing=common.smoothing,
        )

    def in_slot(self, pcie_generation: int, pcie_lanes: int) -> Self:
        """Return the GPU in a slot of so many lanes; what it achieves in the usual one no longer counts in another."""
        usual = (self.pcie_generation, self.pcie_lanes)
        if usual == (pcie_generation, pcie_lanes) or pcie_generation not in _LANE_BYTES_PER_S:
            return self
        achieved = replace(
            self.achieved, host_to_gpu_bytes_per_s=None, gpu_to_host_bytes_per_s=None, duplex_bytes_per_s=None
        )
        return replace(
            self, pcie_generation=pcie_generation, pcie_lanes=pcie_lanes, achieved=achieved, measured={}
        )

    def link(self, *, peer_bytes_per_s: float, peer_latency_s: float) -> LinkSpec:
        """Return the link to the host, and to other GPUs of these rates."""
        usual = _common().pcie_share * self.pcie_lanes * _LANE_BYTES_PER_S[self.pcie_generation]
        if self.host_nvlink_bytes_per_s is not None:
            usual = _common().pcie_share * self.host_nvlink_bytes_per_s / 2
        achieved = self.achieved
        inward = achieved.host_to_gpu_bytes_per_s or usual
        return LinkSpec(
            host_to_gpu_bytes_per_s=inward,
            gpu_to_host_bytes_per_s=achieved.gpu_to_host_bytes_per_s or usual,
            duplex_bytes_per_s=achieved.duplex_bytes_per_s or _common().duplex * inward,
            per_copy_s=_common().per_copy_s,
            peer_bytes_per_s=peer_bytes_per_s,
            peer_latency_s=peer_latency_s,
        )


@cache
def load_gpus() -> tuple[GpuEntry, ...]:
    """Return the table of GPUs. Raise ``ValueError`` as ``build_spec`` does."""
    listed = read_yaml(None, "gpus.yaml")["gpus"]
    return tuple(build_spec(GpuEntry, values, f"gpus.yaml: {values.get('name')}") for values in listed)


@cache
def _common() -> Common:
    return build_spec(Common, read_yaml(None, "gpus.yaml")["common"], "gpus.yaml: common")


def driver_gpu(driver_name: str) -> GpuEntry | None:
    """Return the GPU that NVIDIA's driver calls so, ``None`` for one that ``gpus.yaml`` does not list."""
    return next((gpu for gpu in load_gpus() if _is_part(gpu.driver_name, driver_name)), None)


def _is_part(words: str, driver_name: str) -> bool:
    """Tell whether the name holds these words whole: L4 is no part of L40S."""
    return f" {words} " in f" {driver_name} "
