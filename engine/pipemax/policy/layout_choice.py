"""Chooses how an engine's GPUs are divided: replicas × tensor parallelism × pipeline stages.

Every layout that the config leaves open and that the model's heads and the GPUs' memory allow is simulated with stock
vLLM, over a node's profile and a sample of the rows. PipeMax takes a hundred times as long to simulate: it is run only
in layouts in which an estimate says that it could be the fastest, the most promising first. Pure: it measures nothing
and starts nothing. ``policy: auto`` then compares policies in the layout that was chosen, by what the engine measures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from pipemax.domain.choices import Policy
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.domain.tuned import (
    ENOUGH_OUTPUTS,
    LAYOUT_ENOUGH_ROWS,
    LAYOUT_OVER_ESTIMATE,
    LAYOUT_OVER_LARGE_STEPS,
    LAYOUT_OVER_SHORT_RUN,
    LAYOUT_WHOLE_TOKENS,
    STOCK_ENOUGH_OUTPUTS,
    WORTHWHILE_GAIN,
)
from pipemax.domain.units import ceil_div
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

_GAIN = {ChosenPolicy.VLLM: 1.0, ChosenPolicy.PIPEMAX: WORTHWHILE_GAIN}
"""What a policy must make, in multiples of stock vLLM's best layout."""


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
            f"{self.second.layout} with {'at most ' if self.second.is_bound else ''}{self.second.tokens_per_s:,.0f} "
            f"({self.second}), "
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
    is_whole_table: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> LayoutChoice:
    """Return the fastest layout of the node's GPUs for a long table of rows like the sample, or for the sample itself.

    With ``is_whole_table`` there are no more rows: replicas share them, and the time to the end of the last counts,
    unless they have more than ``LAYOUT_WHOLE_TOKENS``.

    Where PipeMax gains less than ``WORTHWHILE_GAIN`` in its best layout, that is stock vLLM's fastest.

    Layouts without room for the KV of one request of ``max_model_len`` tokens are left out. ``frees_windows`` is the
    engine config's, and ``has_waves`` whether its waves are on. ``on_step`` is called after each simulated step with
    the rows that have ended in its run.
    Raise ``ValueError`` if no layout is possible, with the reason of each.
    """
    is_whole_table = is_whole_table and sample.total_tokens <= LAYOUT_WHOLE_TOKENS
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
    search = _Search(
        scenario_of=partial(_scenario_of, node, model, sample, is_whole_table, on_step),
        is_whole_table=is_whole_table,
        layouts=possible,
        policy=policy,
        frees_windows=frees_windows,
        has_waves=has_waves,
    )
    runs = search.runs()
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
    return run.tokens_per_s / _GAIN[run.policy]


def _scenario_of(
    node: NodeSpec,
    model: ModelSpec,
    sample: Workload,
    is_whole_table: bool,
    on_step: Callable[[int], None] | None,
    layout: Layout,
    enough_outputs: int,
    enough_rows: int = LAYOUT_ENOUGH_ROWS,
) -> Scenario:
    scenario = engine_scenario(
        node,
        model,
        layout,
        sample.first(ceil_div(len(sample), layout.replicas)) if is_whole_table else sample,
        stops_at_drain=not is_whole_table,
        enough_rows=enough_rows,
        all_rows=is_whole_table,
        grain=grain_of(sample, BLOCK_TOKENS, enough_outputs=enough_outputs),
    )
    return replace(scenario, on_progress=on_step)


class _Way(StrEnum):
    """What a candidate is simulated with, in its layout."""

    STOCK = "stock vLLM"
    LARGE_STEPS = "PipeMax, with mixed steps of the largest size"
    OTHER_STEPS = "PipeMax, with smaller mixed steps and in phases"
    """Only over a whole table: over a long one mixed steps become smaller by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """Finds the fastest run by bounds: what cannot be faster than a run that was made is not simulated.

    Stock vLLM's bound follows from a short run, of few rows in coarse grains, and PipeMax's from an estimate; that of
    its other steps follows from its run with large ones.
    """

    scenario_of: Callable[..., Scenario]
    """Of a layout, with grains that leave so many tokens of a mean output, and rows that fill the GPUs and as many more
    for the host's memory as the third argument allows."""
    is_whole_table: bool
    layouts: Sequence[Layout]
    policy: Policy
    frees_windows: bool | None
    has_waves: bool

    def runs(self) -> list[LayoutRun]:
        """Return the runs among which the fastest is, and the short runs of the layouts that cannot be it."""
        short_runs = self._short_runs()
        bounds = {
            (_Way.STOCK, layout): LAYOUT_OVER_SHORT_RUN * run.tokens_per_s
            for layout, run in short_runs.items()
        }
        runs: list[LayoutRun] = []
        if bounds:  # a rate that slow runs of PipeMax need not reach
            runs += self._run(max(bounds, key=bounds.__getitem__), bounds, short_runs, 0.0)
        bounds |= self._pipemax_bounds()
        while bounds:
            fastest = max(bounds, key=bounds.__getitem__)
            best = max(map(_worth, runs), default=0.0)
            if bounds[fastest] <= best:
                break
            runs += self._run(fastest, bounds, short_runs, best)
        return [*runs, *(replace(short_run, is_bound=True) for short_run in short_runs.values())]

    def _run(
        self,
        candidate: tuple[_Way, Layout],
        bounds: dict[tuple[_Way, Layout], float],
        short_runs: dict[Layout, LayoutRun],
        to_beat_tokens_per_s: float,
    ) -> list[LayoutRun]:
        """Simulate a candidate in place of its bound."""
        del bounds[candidate]
        way, layout = candidate
        policy = ChosenPolicy.VLLM if way is _Way.STOCK else ChosenPolicy.PIPEMAX
        to_beat = to_beat_tokens_per_s * _GAIN[policy] / layout.replicas
        if way is _Way.STOCK:
            short_run = short_runs.pop(layout)
            sizes = [size for size in ALL_SIZES.stock if size <= short_run.chunk_tokens][-2:]
            fine = replace(self.scenario_of(layout, STOCK_ENOUGH_OUTPUTS), stops_below=to_beat)
            return [run_stock(fine, layout, sizes, is_whole_table=self.is_whole_table)]
        runs = run_pipemax(
            replace(self.scenario_of(layout, ENOUGH_OUTPUTS), stops_below=to_beat),
            layout,
            ALL_SIZES.mixed_of_short_tables[:-1] if way is _Way.OTHER_STEPS else ALL_SIZES.mixed[-1:],
            always_in_phases=way is _Way.OTHER_STEPS,
            frees_windows=self.frees_windows,
            has_waves=self.has_waves,
            is_whole_table=self.is_whole_table,
        )
        if self.is_whole_table and way is _Way.LARGE_STEPS and runs:
            bounds[_Way.OTHER_STEPS, layout] = LAYOUT_OVER_LARGE_STEPS * max(map(_worth, runs))
        return runs

    def _short_runs(self) -> dict[Layout, LayoutRun]:
        """Return stock vLLM's run in each layout, of as few rows as fill the GPUs."""
        if self.policy is Policy.PIPEMAX:
            return {}
        return {
            layout: run_stock(
                self.scenario_of(layout, ENOUGH_OUTPUTS, 0), layout, is_whole_table=self.is_whole_table
            )
            for layout in self.layouts
        }

    def _pipemax_bounds(self) -> dict[tuple[_Way, Layout], float]:
        if self.policy is Policy.VLLM:
            return {}
        estimates = {
            layout: pipemax_estimate(
                self.scenario_of(layout, ENOUGH_OUTPUTS),
                layout,
                has_waves=self.has_waves,
                is_whole_table=self.is_whole_table,
            )
            for layout in self.layouts
        }
        return {
            (_Way.LARGE_STEPS, layout): LAYOUT_OVER_ESTIMATE * estimate / WORTHWHILE_GAIN
            for layout, estimate in estimates.items()
            if estimate is not None
        }
