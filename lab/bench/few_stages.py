"""Simulate PipeMax over two to eight pipeline stages against stock vLLM at its best step size, and print a table.

    python -m lab.bench.few_stages [--rows N] [--seed N] [--settings NAME ...] [--steps TOKENS ...]

Each step size is simulated without waves and with waves of four groups of layers. Ratios are of tokens/s, over whole
runs and over their steady part; the last but one column is the share of GPU time in which a step waits for its copies.
A copied piece costs what batch copies on an H100 cost at most, instead of the presets' cost of a copy on its own. One
process, no threads.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lab.paper.lengths import open_workload
from pipemax.domain.specs import NodeSpec
from pipemax.domain.tuned import WAVE_GROUPS
from pipemax.presets import load_model, load_node
from pipemax.sim.result import SimulationResult
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario

STOCK_STEP_TOKENS = (128, 256, 512, 1024)
MIXED_STEP_TOKENS = (128, 256, 512, 2048)
PIECE_S = 0.5e-6
"""Of one piece of a batch copy, next to its bytes. One H100, 2026-11-26, ``lab/bench/transfer.py``: batch copies kept
97 % of the link at pieces of 64 KiB, which are 0.04 µs for each; this is more, so that waves are not flattered."""
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

    def scenario(self, num_rows: int, seed: int) -> Scenario:
        node = part_of(load_node(self.node), self.num_stages)
        return Scenario(
            node=replace(node, link=replace(node.link, per_copy_s=PIECE_S)),
            model=load_model(self.model),
            workload=open_workload(self.workload, num_rows, seed),
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


def pipemax(scenario: Scenario, step_tokens: int | None, wave_groups: int | None) -> SimulationResult:
    controller = {} if step_tokens is None else mixed_batching(step_tokens)
    options = PipeMaxOptions(controller={**controller, "wave_groups": wave_groups})
    return PipeMaxSystem(scenario, options).simulate()


def print_setting(setting: Setting, num_rows: int, seed: int, steps: Sequence[int | None]) -> None:
    scenario = setting.scenario(num_rows, seed)
    stock = [ContinuousBatching(scenario, stock_vllm(step)).simulate() for step in STOCK_STEP_TOKENS]
    best = max(stock, key=lambda result: result.total_tokens_per_s)
    line = (
        f"| {setting.name} | stock, best of {len(stock)} | {best.total_tokens_per_s:,.0f} | 1.00 / 1.00 | | |"
    )
    print(line, flush=True)
    for step in steps:
        for wave_groups in (None, WAVE_GROUPS):
            begin_s = time.monotonic()
            result = pipemax(scenario, step, wave_groups)
            took_s = time.monotonic() - begin_s
            how = "phases" if step is None else f"mixed, {step}"
            print(
                f"| {setting.name} | {how}{', waves' if wave_groups else ''} | {result.total_tokens_per_s:,.0f} | "
                f"{ratio(result, best)} | {result.stall_fraction:.1%} | {took_s:.0f} s |",
                flush=True,
            )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps",
        type=lambda text: int(text) or None,
        nargs="+",
        default=(None, *MIXED_STEP_TOKENS),
        help="Maximum tokens of mixed steps; 0 is phases of prefill and decode.",
    )
    parser.add_argument("--settings", nargs="+", choices=[setting.name for setting in SETTINGS])
    options = parser.parse_args(arguments)
    for setting in SETTINGS:
        if options.settings is None or setting.name in options.settings:
            print_setting(setting, options.rows, options.seed, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
