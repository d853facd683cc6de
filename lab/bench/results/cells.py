"""One cell: a system with its best step size in one layout of a setting, on one drawing of its table; by simulation.

A table is divided among the replicas of a layout, so that every cell of a setting does as many rows and tokens.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from lab.bench.bound import pipemax_bound
from lab.bench.results.settings import Setting
from pipemax.domain.tuned import LAYOUT_SAMPLE_ROWS, LAYOUT_WHOLE_TOKENS
from pipemax.policy.compare import ChosenPolicy, verdict
from pipemax.policy.layout_choice import FixedLayout, choose_layout
from pipemax.policy.layout_runs import ALL_SIZES, MAX_NUM_SEQS, run_pipemax, run_stock
from pipemax.policy.layouts import Layout, layout_refusal, possible_layouts
from pipemax.policy.measured_choice import fastest
from pipemax.presets import load_workload
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario

if TYPE_CHECKING:
    from lab.bench.results.store import Store

STOCK_STEPS = (128, 256, 512, 1024, 2048, 4096)
MIXED_STEPS = (128, 256, 512, 2048)
CHOICE_SEED = 100
"""The rows from which a layout is chosen are not those over which it is judged."""


class System(StrEnum):
    """What a cell runs."""

    STOCK = "stock"
    """vLLM 0.32."""
    BALANCED = "balanced"
    """vLLM 0.32 with balanced decode batches, in layouts of several stages."""
    PIPEMAX = "pipemax"
    """PipeMax, in phases and with mixed steps, in layouts of several stages that may be the fastest."""
    CHOICE = "choice"
    """What ``auto`` chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One line of the results."""

    setting: Setting
    seed: int
    system: System
    layout: Layout | None = None
    """``None`` for the choice."""

    @property
    def name(self) -> str:
        """The name of the cell's line in the file of results."""
        where = "" if self.layout is None else f"--{str(self.layout).replace(' × ', '-').replace(' ', '')}"
        return f"{self.setting.name}--seed{self.seed}--{self.system}{where}"

    def run(self) -> dict[str, Any]:
        """Simulate the cell; return its figures: rates are of the whole node, in tokens/s."""
        begin_s = time.process_time()
        figures = _choose(self.setting) if self.layout is None else self._simulate(self.layout)
        return figures | {"cpu_s": round(time.process_time() - begin_s, 1)}

    def _simulate(self, layout: Layout) -> dict[str, Any]:
        scenario = scenario_of(self.setting, self.seed, layout)
        if self.system is System.PIPEMAX:
            runs = {"phases": pipemax(scenario, layout, None)}
            runs |= {f"mixed {size}": pipemax(scenario, layout, size) for size in MIXED_STEPS}
        else:
            runs = stock_runs(scenario, layout, balances_decodes=self.system is System.BALANCED)
        rates = {name: _rates(result, layout) for name, result in runs.items()}
        figures: dict[str, Any] = {"runs": rates}
        figures |= {kind: max(rates, key=lambda name: rates[name][kind]) for kind in ("whole", "steady")}
        if self.system is System.STOCK and layout.pipeline_parallel > 1:
            figures["bound"] = pipemax_bound(scenario, layout)
        return figures


def scenario_of(setting: Setting, seed: int, layout: Layout) -> Scenario:
    """Return one engine's part of the node and of the rows."""
    return Scenario(
        node=setting.node_spec().part(layout.gpus_per_engine),
        model=setting.model_spec(),
        workload=setting.part_of_table(seed, layout.replicas),
    )


def stock_runs(scenario: Scenario, layout: Layout, *, balances_decodes: bool) -> dict[str, SimulationResult]:
    """Simulate stock vLLM with the step sizes among which the fastest is, by either rate."""

    @cache
    def run(size: int) -> SimulationResult:
        policy = stock_vllm(
            size,
            tensor=layout.tensor_parallel,
            max_num_seqs=MAX_NUM_SEQS,
            keeps_preempted=True,
            balances_decodes=balances_decodes,
        )
        return ContinuousBatching(scenario, policy).simulate()

    rates: Sequence[Callable[[int], float]] = (
        lambda size: run(size).total_tokens_per_s,
        lambda size: run(size).steady_tokens_per_s,
    )
    best = {fastest(STOCK_STEPS, rate) for rate in rates}
    return {f"steps {size}": run(size) for size in sorted(best)}


def pipemax(scenario: Scenario, layout: Layout, step_tokens: int | None) -> SimulationResult:
    """Simulate PipeMax in phases, or with mixed steps of up to ``step_tokens``."""
    controller = {} if step_tokens is None else mixed_batching(step_tokens)
    options = PipeMaxOptions(tensor=layout.tensor_parallel, controller=controller)
    return PipeMaxSystem(scenario, options).simulate()


def _rates(result: SimulationResult, layout: Layout) -> dict[str, float]:
    return {
        "whole": round(layout.replicas * result.total_tokens_per_s, 1),
        "steady": round(layout.replicas * result.steady_tokens_per_s, 1),
        "decode_batch": round(result.mean_decode_batch, 1),
        "idle": round(result.bubble_fraction, 4),
        "tokens": layout.replicas * (result.prompt_tokens + result.output_tokens),
    }


def is_short(setting: Setting) -> bool:
    """Return whether the choice simulates the whole table, so that its rate is that of the whole run."""
    if setting.rows > LAYOUT_SAMPLE_ROWS:
        return False
    return setting.part_of_table(CHOICE_SEED, 1).total_tokens <= LAYOUT_WHOLE_TOKENS


def _choose(setting: Setting) -> dict[str, Any]:
    sample = setting.part_of_table(CHOICE_SEED, 1).first(LAYOUT_SAMPLE_ROWS)
    choice = choose_layout(
        setting.node_spec(),
        setting.model_spec(),
        sample,
        fixed=FixedLayout(),
        is_whole_table=is_short(setting),
    )
    policy = _policy_in(setting, choice.layout) if choice.best is None else choice.best.policy
    return {"layout": str(choice.layout), "policy": str(policy), "reason": choice.reason}


def _policy_in(setting: Setting, layout: Layout) -> ChosenPolicy:
    """Return the policy that is chosen in the only layout there is."""
    scenario, is_whole = scenario_of(setting, CHOICE_SEED, layout), is_short(setting)
    stock = run_stock(scenario, layout, is_whole_table=is_whole).tokens_per_s
    runs = run_pipemax(scenario, layout, ALL_SIZES.mixed_of_short_tables, is_whole_table=is_whole)
    chosen, _ = verdict(max(run.tokens_per_s for run in runs) / stock)
    return chosen


def layouts_of(setting: Setting) -> list[Layout]:
    """Return the layouts in which the model runs on the node, the largest engines first."""
    node, model = setting.node_spec(), setting.model_spec()
    profile = load_workload(setting.workload)
    longest = min(profile.context_tokens, profile.prompt.most + profile.output.most)
    return [
        layout
        for layout in possible_layouts(node)
        if layout_refusal(node, model, layout, longest_request=longest) is None
    ]


def stock_cells(settings: Iterable[Setting]) -> list[Cell]:
    """Return the cells that do not depend on others: of stock vLLM, and of the choice."""
    cells: list[Cell] = []
    for setting in settings:
        layouts = layouts_of(setting)
        for seed in setting.seeds:
            for layout in layouts:
                cells.append(Cell(setting=setting, seed=seed, system=System.STOCK, layout=layout))
                if layout.pipeline_parallel > 1:
                    cells.append(Cell(setting=setting, seed=seed, system=System.BALANCED, layout=layout))
        cells.append(Cell(setting=setting, seed=0, system=System.CHOICE))
    return cells


def pipemax_cells(settings: Iterable[Setting], done: "Store") -> list[Cell]:
    """Return PipeMax's cells as far as they are known: those done, and of each table the next that may be the fastest.

    Layouts come in the order of their bounds. The first is run whatever its bound, so that each table has PipeMax's
    figure, another one if its bound is above the fastest run so far.
    """
    return [cell for setting in settings for seed in setting.seeds for cell in _of_table(setting, seed, done)]


def _of_table(setting: Setting, seed: int, done: "Store") -> Iterator[Cell]:
    best, bounds = 0.0, dict[Layout, float]()
    for layout in layouts_of(setting):
        figures = done[Cell(setting=setting, seed=seed, system=System.STOCK, layout=layout)]
        best = max(best, steady_rate(figures))
        if "bound" in figures:
            bounds[layout] = figures["bound"]
    by_bound = sorted(bounds, key=lambda layout: -bounds[layout])
    for layout in by_bound:
        if layout is not by_bound[0] and bounds[layout] < best:
            return
        cell = Cell(setting=setting, seed=seed, system=System.PIPEMAX, layout=layout)
        yield cell
        if cell not in done:
            return
        best = max(best, steady_rate(done[cell]))


def steady_rate(figures: dict[str, Any]) -> float:
    """Return the steady tokens/s of a cell's fastest run."""
    return float(figures["runs"][figures["steady"]]["steady"])
