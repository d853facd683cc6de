"""What freeing the KV that has left sliding windows gains under PipeMax, in simulation.

    python -m lab.bench.windows [--rows 4000] [--only NODE,MODEL,WORKLOAD,STAGES] [--json FILE]

A run with a file that exists goes on where it ended.

For each node, model, workload and number of stages (with as many replicas as fit): steady tokens/s of the node.

    stock               vLLM 0.32 with its fastest step, and its hybrid KV cache manager
    stock_whole         the same step without the hybrid manager: the whole KV of all layers
    separated, mixed    PipeMax with whole KV, in phases and with mixed steps of the faster of two sizes
    kept                what the hybrid manager's blocks take of the GPUs' memory over what whole KV takes, for the
                        workload's rows in the midst of their outputs; above 1 the gaps in its groups cost more than the
                        windows free
    freed_separated,    PipeMax with the KV freed that has left windows
    freed_mixed
    bound               PipeMax with all KV on the GPUs

It prints Markdown; ``--json`` keeps a list of objects.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench.bound import pipemax_bound
from lab.paper.lengths import open_workload
from pipemax.domain.plan import Batching
from pipemax.domain.specs import KvCapacity
from pipemax.policy.layout_runs import (
    MAX_NUM_SEQS,
    capacity_of,
    engine_scenario,
    run_pipemax,
    run_stock,
)
from pipemax.policy.layouts import Layout
from pipemax.presets import load_model, load_node
from pipemax.sim.systems.continuous import ContinuousBatching, stock_vllm
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload

SETTINGS = [
    (node, model, workload, stages)
    for node in ("rtx5090x8", "l20x8", "h100x8")
    for model in ("gpt-oss-120b", "gemma-3-27b")
    for workload in ("sharegpt", "longbench")
    for stages in (4, 8)
]
COLUMNS = (
    "node",
    "model",
    "workload",
    "stages",
    "stock",
    "stock_whole",
    "separated",
    "mixed",
    "kept",
    "freed_separated",
    "freed_mixed",
    "bound",
)
_ENOUGH_ROWS = 3000


def kept_share(whole: KvCapacity, freed: KvCapacity, rows: Workload) -> float:
    """Return the memory that the rows take with freed windows, over what they take with whole KV."""

    def share(capacity: KvCapacity) -> float:
        size, groups = capacity.block_tokens, capacity.groups
        middles = (rows.prompt_tokens + rows.output_tokens // 2).tolist()
        return sum(groups.running_blocks(tokens, size) for tokens in middles) / capacity.gpu_blocks

    return share(freed) / share(whole)


def run_setting(node_name: str, model_name: str, workload: str, stages: int, rows: int) -> dict[str, Any]:
    """Simulate one setting. Raise ``ValueError`` if the model or a row does not fit."""
    node, model = load_node(node_name), load_model(model_name)
    layout = Layout(replicas=node.num_gpus // stages, tensor_parallel=1, pipeline_parallel=stages)
    sample = open_workload(workload, rows)
    scenario = engine_scenario(node, model, layout, sample, stops_at_drain=True, enough_rows=_ENOUGH_ROWS)
    stock = run_stock(scenario, layout)
    policy = stock_vllm(stock.chunk_tokens, max_num_seqs=MAX_NUM_SEQS, keeps_preempted=True)
    whole_stock = ContinuousBatching(scenario, replace(policy, frees_windows=False)).simulate()
    runs = {run.batching: run for run in run_pipemax(scenario, layout)}
    kept = kept_share(
        capacity_of(scenario.node, model, layout),
        capacity_of(scenario.node, model, layout, frees_windows=True),
        sample,
    )
    mixed_tokens = runs[Batching.MIXED].chunk_tokens
    rates = {
        "stock": stock.tokens_per_s,
        "stock_whole": whole_stock.steady_tokens_per_s * layout.replicas,
        "separated": runs[Batching.SEPARATED].tokens_per_s,
        "mixed": runs[Batching.MIXED].tokens_per_s,
        "freed_separated": _freed(scenario, layout, {}),
        "freed_mixed": _freed(scenario, layout, mixed_batching(mixed_tokens)),
        "bound": pipemax_bound(scenario, layout),
    }
    return {
        "node": node_name,
        "model": model_name,
        "workload": workload,
        "stages": stages,
        "rows": len(scenario.workload),
        "stock_step_tokens": stock.chunk_tokens,
        "mixed_step_tokens": mixed_tokens,
        "kept": round(kept, 2),
        **{name: round(rate) for name, rate in rates.items() if rate is not None},
    }


def _freed(scenario: Scenario, layout: Layout, controller: dict[str, Any]) -> float:
    options = PipeMaxOptions(frees_windows=True, controller=controller)
    return PipeMaxSystem(scenario, options).simulate().steady_tokens_per_s * layout.replicas


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--only", action="append", help="node,model,workload,stages; repeatable")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = SETTINGS
    if arguments.only:
        parts = [one.split(",") for one in arguments.only]
        settings = [(node, model, workload, int(stages)) for node, model, workload, stages in parts]
    entries: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        entries = json.loads(arguments.json.read_text(encoding="utf-8"))
    known = {(one["node"], one["model"], one["workload"], one["stages"]) for one in entries}
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    for node, model, workload, stages in settings:
        if (node, model, workload, stages) in known:
            continue
        try:
            entry = run_setting(node, model, workload, stages, arguments.rows)
        except ValueError as error:
            print(f"| {node} | {model} | {workload} | {stages} | {error} |", flush=True)
            continue
        print("| " + " | ".join(str(entry[name]) for name in COLUMNS) + " |", flush=True)
        entries.append(entry)
        if arguments.json:
            arguments.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
