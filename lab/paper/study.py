"""Runs several systems on one scenario, for ``python -m lab.paper``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.paper.catalog import baseline_names, check_name, simulate, system_names
from lab.paper.compute_bound import compute_bound_tokens_per_s
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload

REFERENCE = "vllm_tp"
"""The system to which ``fig:overall`` normalises."""
PAPER_SETTINGS = tuple(
    (node, model, workload)
    for node, model in (
        ("rtx5090x8", "llama2-70b"),
        ("rtx5090x8", "mixtral-8x7b"),
        ("l20x8", "llama2-70b"),
        ("l20x8", "mixtral-8x7b"),
        ("h100x8", "qwen3-235b-a22b"),
    )
    for workload in ("sharegpt", "longbench")
)
"""The presets of node, model and workload in ``fig:overall``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Results in the order asked for, and the reference, which may be one of them."""

    node: str
    model: str
    kv_bytes_per_value: int
    workload: str
    results: list[SimulationResult]
    reference: SimulationResult
    compute_bound_tokens_per_s: float

    def ratio(self, result: SimulationResult) -> float:
        return result.total_tokens_per_s / self.reference.total_tokens_per_s


def named_systems(names: str, node: NodeSpec) -> list[str]:
    """Return the systems named by ``all``, ``baselines`` (PipeMax and other systems), or names separated by commas."""
    match names:
        case "all":
            return system_names(node)
        case "baselines":
            return ["pipemax", *baseline_names(node)]
        case _:
            return [name.strip() for name in names.split(",") if name.strip()]


def run_study(
    node: NodeSpec,
    model: ModelSpec,
    workload: Workload,
    systems: Sequence[str],
    *,
    detailed: str | None = None,
    decisions_path: Path | None = None,
    on_progress: Callable[[str, int], None] | None = None,
) -> Study:
    """Simulate each system, and the reference. ``on_progress`` gets a system's name and how many requests finished.

    For the ``detailed`` system, every span is kept for a Chrome trace, and its decisions go to ``decisions_path``.
    """
    if not systems:
        raise ValueError(f"name at least one system of {', '.join(system_names(node))}")
    for name in systems:
        check_name(name, node)

    def run(name: str) -> SimulationResult:
        def report(num_finished: int) -> None:
            if on_progress is not None:
                on_progress(name, num_finished)

        scenario = Scenario(
            node=node,
            model=model,
            workload=workload,
            keep_spans=name == detailed,
            decisions_path=decisions_path if name == detailed else None,
            on_progress=report,
        )
        return simulate(name, scenario)

    results = {name: run(name) for name in systems}
    reference = results.get(REFERENCE) or run(REFERENCE)
    return Study(
        node=node.name,
        model=model.name,
        kv_bytes_per_value=model.kv_value_bytes,
        workload=workload.name,
        results=[results[name] for name in systems],
        reference=reference,
        compute_bound_tokens_per_s=compute_bound_tokens_per_s(node, model, workload),
    )
