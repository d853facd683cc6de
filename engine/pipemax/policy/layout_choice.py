"""Chooses how an engine's GPUs are divided: replicas × tensor parallelism × pipeline stages.

Every layout that the config leaves open and that the model's heads and the GPUs' memory allow is simulated with stock
vLLM, over a node's profile and a sample of the rows. PipeMax takes a hundred times as long to simulate: it is run only
in layouts in which an estimate says that it could be the fastest, the most promising first. Pure: it measures nothing
and starts nothing. ``policy: auto`` then compares policies in the layout that was chosen, by what the engine measures.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipemax.domain.choices import Policy
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.domain.tuned import (
    LAYOUT_ENOUGH_OUTPUTS,
    LAYOUT_ENOUGH_ROWS,
    LAYOUT_OVER_ESTIMATE,
    WORTHWHILE_GAIN,
)
from pipemax.policy.compare import ChosenPolicy
from pipemax.policy.layout_runs import (
    ALL_SIZES,
    LayoutRun,
    engine_scenario,
    pipemax_estimate,
    run_pipemax,
    run_stock,
)
from pipemax.policy.layouts import Layout, layout_refusal, possible_layouts
from pipemax.sim.machine import BLOCK_TOKENS
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload, grain_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLayout:
    """The parts of a layout that the engine config fixes; ``None`` leaves a part open."""

    replicas: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None

    def allows(self, layout: Layout) -> bool:
        pairs = (
            (self.replicas, layout.replicas),
            (self.tensor_parallel, layout.tensor_parallel),
            (self.pipeline_parallel, layout.pipeline_parallel),
        )
        return all(fixed is None or fixed == chosen for fixed, chosen in pairs)

    def __str__(self) -> str:
        parts = (
            ("replicas", self.replicas),
            ("tensor_parallel_size", self.tensor_parallel),
            ("pipeline_parallel_size", self.pipeline_parallel),
        )
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None) or "nothing fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """The layout to run, and how it compares."""

    layout: Layout
    best: LayoutRun | None
    """The chosen layout's best policy; None if there was only one layout, which was not simulated."""
    second: LayoutRun | None
    """The best run of another layout; None if there is none."""
    not_possible: tuple[str, ...]
    """The layouts that were left out, each with the reason."""

    @property
    def reason(self) -> str:
        """One clause."""
        if self.best is None:
            return f"{self.layout}: the only layout possible"
        if self.second is None:
            return f"{self.layout}: no other layout is possible, simulated {self.best.tokens_per_s:,.0f} tokens/s"
        return (
            f"{self.layout}: simulated {self.best.tokens_per_s:,.0f} tokens/s ({self.best}), second "
            f"{self.second.layout} with {self.second.tokens_per_s:,.0f} ({self.second}), "
            f"{self.best.tokens_per_s / self.second.tokens_per_s:.2f}×"
        )


def choose_layout(
    node: NodeSpec,
    model: ModelSpec,
    sample: Workload,
    *,
    fixed: FixedLayout,
    policy: Policy = Policy.AUTO,
    max_model_len: int = 1,
    frees_windows: bool | None = False,
    has_waves: bool = False,
) -> LayoutChoice:
    """Return the fastest layout of the node's GPUs for a table of rows like the sample.

    Where PipeMax gains less than ``WORTHWHILE_GAIN`` in its best layout, that is stock vLLM's fastest.

    Layouts without room for the KV of one request of ``max_model_len`` tokens are left out. ``frees_windows`` is the
    engine config's, and ``has_waves`` whether its waves are on.
    Raise ``ValueError`` if no layout is possible, with the reason of each.
    """
    allowed = [layout for layout in possible_layouts(node) if fixed.allows(layout)]
    longest = max(max_model_len, int((sample.prompt_tokens + sample.output_tokens).max()))
    keeps = policy is Policy.PIPEMAX and frees_windows is False
    refusals = {
        layout: layout_refusal(node, model, layout, longest_request=longest, keeps_windows=keeps)
        for layout in allowed
    }
    not_possible = tuple(f"{layout}: {why}" for layout, why in refusals.items() if why is not None)
    possible = [layout for layout, why in refusals.items() if why is None]
    if not possible:
        causes = "; ".join(not_possible) or f"none of {node.num_gpus} GPUs fits {fixed}"
        raise ValueError(f"no layout of {node.name} runs {model.name}: {causes}")
    if len(possible) == 1:
        return LayoutChoice(layout=possible[0], best=None, second=None, not_possible=not_possible)
    scenarios = {
        layout: engine_scenario(
            node,
            model,
            layout,
            sample,
            stops_at_drain=True,
            enough_rows=LAYOUT_ENOUGH_ROWS,
            grain=grain_of(sample, BLOCK_TOKENS, enough_outputs=LAYOUT_ENOUGH_OUTPUTS),
        )
        for layout in possible
    }
    runs: list[LayoutRun] = []
    if policy is not Policy.PIPEMAX:
        runs = [run_stock(scenario, layout) for layout, scenario in scenarios.items()]
    if policy is not Policy.VLLM:
        runs += _promising_pipemax(
            scenarios,
            max((run.tokens_per_s for run in runs), default=0.0),
            frees_windows=frees_windows,
            has_waves=has_waves,
        )
    if not runs:
        with_waves = " with waves: on" if has_waves else ""
        raise ValueError(f"policy {policy.value} runs in no possible layout of {node.name}{with_waves}")
    best = max(runs, key=_worth)
    others = [run for run in runs if run.layout != best.layout]
    return LayoutChoice(
        layout=best.layout,
        best=best,
        second=max(others, key=lambda run: run.tokens_per_s, default=None),
        not_possible=not_possible,
    )


def _worth(run: LayoutRun) -> float:
    """Return a run's tokens/s, for PipeMax less the gain that it must have over stock vLLM in any layout."""
    return run.tokens_per_s / (1.0 if run.policy is ChosenPolicy.VLLM else WORTHWHILE_GAIN)


def _promising_pipemax(
    scenarios: Mapping[Layout, Scenario],
    to_beat_tokens_per_s: float,
    *,
    frees_windows: bool | None,
    has_waves: bool,
) -> list[LayoutRun]:
    """Return the runs of PipeMax in the layouts in which it may be faster than this."""
    estimates = {
        layout: estimate
        for layout, scenario in scenarios.items()
        if (estimate := pipemax_estimate(scenario, layout, has_waves=has_waves)) is not None
    }
    runs: list[LayoutRun] = []
    for layout in sorted(estimates, key=lambda layout: -estimates[layout]):
        best = max([to_beat_tokens_per_s, *(run.tokens_per_s for run in runs)])
        if LAYOUT_OVER_ESTIMATE * estimates[layout] < best:
            break
        runs += run_pipemax(
            scenarios[layout],
            layout,
            ALL_SIZES.mixed[-1:],
            always_in_phases=False,
            frees_windows=frees_windows,
            has_waves=has_waves,
        )
    return runs
