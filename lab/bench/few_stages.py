"""Simulate PipeMax over two to eight pipeline stages against stock vLLM at its best step size, and print a table.

    python -m lab.bench.few_stages [--rows N] [--settings NAME ...]

Two stages are also simulated with three batches in rotation, as PipeMax took before it could park with two. Ratios are
of tokens/s, over whole runs and over their steady part. One process, no threads.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lab.paper.lengths import open_workload
from pipemax.domain.specs import NodeSpec
from pipemax.presets import load_model, load_node
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario

STOCK_STEP_TOKENS = (128, 256, 512, 1024)
MIXED_STEP_TOKENS = (128, 256, 512, 2048)
LIKELY_RATIOS = (0.3, 3.0)
"""A ratio outside of these is an error of the bench."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    num_stages: int
    node: str
    model: str
    workload: str = "sharegpt"

    @property
    def name(self) -> str:
        return f"{self.num_stages}x{self.node.removesuffix('x8')}-{self.model}-{self.workload}"

    def scenario(self, num_rows: int) -> Scenario:
        return Scenario(
            node=part_of(load_node(self.node), self.num_stages),
            model=load_model(self.model),
            workload=open_workload(self.workload, num_rows),
        )


SETTINGS = (
    Setting(num_stages=2, node="l20x8", model="qwen3-32b"),
    Setting(num_stages=2, node="h100x8", model="llama2-70b"),
    Setting(num_stages=3, node="rtx5090x8", model="qwen3-32b"),
    Setting(num_stages=4, node="l20x8", model="llama2-70b"),
    Setting(num_stages=8, node="rtx5090x8", model="llama2-70b"),
)


def part_of(node: NodeSpec, num_gpus: int) -> NodeSpec:
    """Return a node of the first GPUs, with their share of the host's memory and bandwidth."""
    share = num_gpus / node.num_gpus
    return replace(
        node,
        name=f"{node.name}:{num_gpus}",
        num_gpus=num_gpus,
        host_dram_bytes_per_s=share * node.host_dram_bytes_per_s,
        host_memory_bytes=int(share * node.host_memory_bytes),
    )


def ratio(result: SimulationResult, stock: SimulationResult) -> str:
    whole = result.total_tokens_per_s / stock.total_tokens_per_s
    steady = result.steady_tokens_per_s / stock.steady_tokens_per_s
    for figure in (whole, steady):
        if not LIKELY_RATIOS[0] < figure < LIKELY_RATIOS[1]:
            raise ValueError(f"{result.system}: a ratio of {figure:.2f} cannot be")
    return f"{whole:.2f} / {steady:.2f}"


def pipemax(scenario: Scenario, num_batches: int | None, step_tokens: int | None) -> SimulationResult:
    controller = {} if step_tokens is None else mixed_batching(step_tokens)
    return PipeMaxSystem(scenario, PipeMaxOptions(num_batches=num_batches, controller=controller)).simulate()


def print_setting(setting: Setting, num_rows: int) -> None:
    scenario = setting.scenario(num_rows)
    stock = [ContinuousBatching(scenario, stock_vllm(step)).simulate() for step in STOCK_STEP_TOKENS]
    best = max(stock, key=lambda result: result.total_tokens_per_s)
    line = (
        f"| {setting.name} | stock, best of {len(stock)} | {best.total_tokens_per_s:,.0f} | 1.00 / 1.00 | |"
    )
    print(line, flush=True)
    for num_batches in (3, 2) if setting.num_stages == 2 else (setting.num_stages,):
        for step in (None, *MIXED_STEP_TOKENS):
            begin_s = time.monotonic()
            result = pipemax(scenario, num_batches, step)
            how = "phases" if step is None else f"mixed, {step}"
            took_s = time.monotonic() - begin_s
            print(
                f"| {setting.name} | {num_batches} batches, {how} | {result.total_tokens_per_s:,.0f} | "
                f"{ratio(result, best)} | {took_s:.0f} s |",
                flush=True,
            )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--settings", nargs="+", choices=[setting.name for setting in SETTINGS])
    options = parser.parse_args(arguments)
    for setting in SETTINGS:
        if options.settings is None or setting.name in options.settings:
            print_setting(setting, options.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
