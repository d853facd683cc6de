"""One GPU in numbers, its link to the host, and the collective of several. Rates are achieved ones.

``pipemax/presets/gpus.yaml`` has them next to the vendor's figures, and the source of each.
"""

from dataclasses import dataclass, fields
from enum import StrEnum


def check_positive(spec: object, *, zero_allowed: frozenset[str] = frozenset()) -> None:
    """Raise ``ValueError`` for a number that is not above zero."""
    for field in fields(spec):  # type: ignore[arg-type]  # a spec is a dataclass
        value = getattr(spec, field.name)
        if not isinstance(value, int | float):
            continue
        if not (value > 0 or (value == 0 and field.name in zero_allowed)):
            raise ValueError(f"{type(spec).__name__}.{field.name} is {value}, must be above zero")


class WeightDtype(StrEnum):
    """The type of a layer's weights, in which their products are computed if the GPU can."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU."""

    name: str
    memory_bytes: int
    hbm_bytes_per_s: float
    """Achieved in reading weights and KV."""
    flops_per_s: float
    """Achieved by large dense bf16 matrix products."""
    fp8_flops_per_s: float | None = None
    """Achieved by those in FP8; ``None`` where the GPU has no FP8."""
    fp4_flops_per_s: float | None = None
    """Achieved by those in FP4; ``None`` where the GPU has no FP4."""
    step_overhead_s: float
    """Launches, metadata and sampling that no roofline counts, for each step on each stage."""
    product_tokens: tuple[tuple[int, int], ...]
    """Rows of (tokens, tokens whose arithmetic their matrix products cost): tiles make a staircase. Values between the
    rows are interpolated linearly; beyond the last row, the number of tokens itself counts."""
    smoothing: float
    """The p of ``(weights_s**p + compute_s**p)**(1/p)``: how far reading weights and computing overlap."""
    mixed_cost: float = 1.0
    """What prompt tokens add to a step that also decodes, as a multiple of what they add by this model."""

    def __post_init__(self) -> None:
        check_positive(self, zero_allowed=frozenset({"step_overhead_s"}))
        tokens = [row[0] for row in self.product_tokens]
        if not tokens or tokens[0] != 1 or tokens != sorted(set(tokens)):
            raise ValueError(f"GpuSpec.product_tokens must begin at 1 token and ascend: {tokens}")

    def product_flops_per_s(self, dtype: WeightDtype) -> float:
        """Return the rate of matrix products with weights of this type.

        A GPU that has no products in it unpacks the weights and computes in BF16, as vLLM's kernels do.
        """
        match dtype:
            case WeightDtype.FP8:
                return self.fp8_flops_per_s or self.flops_per_s
            case WeightDtype.FP4:
                return self.fp4_flops_per_s or self.flops_per_s
            case WeightDtype.BF16:
                return self.flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One GPU's PCIe link. Each direction has one copy engine, which works first in, first out."""

    host_to_gpu_bytes_per_s: float
    gpu_to_host_bytes_per_s: float
    duplex_bytes_per_s: float
    """Limit of both directions together."""
    per_copy_s: float
    """Added by every contiguous piece."""
    peer_bytes_per_s: float
    """GPU to GPU: the rate at which activations move."""
    peer_latency_s: float

    def __post_init__(self) -> None:
        check_positive(self, zero_allowed=frozenset({"per_copy_s", "peer_latency_s"}))

    def effective_host_to_gpu_bytes_per_s(self, piece_bytes: float) -> float:
        """Return the rate that pieces of this size reach: the paper's B in the paged format (``eq:budget``)."""
        return piece_bytes / (self.per_copy_s + piece_bytes / self.host_to_gpu_bytes_per_s)

    def send_s(self, activation_bytes: float) -> float:
        """Return the seconds in which a GPU hands activations to another."""
        return self.peer_latency_s + activation_bytes / self.peer_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceSpec:
    """The collective that tensor parallelism needs twice per layer."""

    bus_bytes_per_s: float
    """The bus bandwidth as NCCL's tests report it: bytes · 2(n−1)/n divided by the time."""
    latency_s: float

    def __post_init__(self) -> None:
        check_positive(self, zero_allowed=frozenset({"latency_s"}))

    def time_s(self, payload_bytes: float, num_gpus: int) -> float:
        if num_gpus == 1:
            return 0.0
        return self.latency_s + payload_bytes * 2 * (num_gpus - 1) / num_gpus / self.bus_bytes_per_s
