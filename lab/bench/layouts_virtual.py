"""Run vLLM's real schedulers, stock and PipeMax, over virtual nodes in the layouts of ``lab/results/layouts.json``.

    python -m lab.bench.layouts_virtual [--rows 12000] [--only NODE,MODEL] [--json FILE]

For each setting of ``lab/results/layouts.json``: the layout that was chosen, and the fastest of the others, each under
the faster of its two policies, with the size of steps that is fastest in simulation. One engine of each layout runs
over its part of the node, without the host's time, and its steady rate counts for all replicas. An engine has as many
rows as fill its GPUs three times, or the host once and a half, but ``--rows`` at most. A run with a file that exists
goes on where it ended. Prints a Markdown table; ``--json`` keeps a list of objects:

    layout, policy            what ran, with ``step_tokens`` over ``rows``
    chosen                    whether it is the layout that was chosen
    tokens_per_s              steady, of the whole node
    simulated_tokens_per_s    by the simulator, for the same rows
"""

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.paper.lengths import open_workload
from lab.virtual_node.launch import RehearsedEngine
from lab.virtual_node.run import rehearse
from lab.virtual_node.settings import ClockSettings
from pipemax.config import Policy
from pipemax.domain.plan import Batching
from pipemax.policy.compare import ChosenPolicy
from pipemax.policy.layout_runs import MAX_NUM_SEQS, LayoutRun, engine_scenario, run_pipemax, run_stock
from pipemax.policy.layouts import Layout, possible_layouts
from pipemax.presets import load_model, load_node
from pipemax.sim.systems.scenario import Scenario

COMPARED = Path(__file__).parents[1] / "results" / "layouts.json"
COLUMNS = (
    "node",
    "model",
    "layout",
    "policy",
    "step_tokens",
    "rows",
    "chosen",
    "tokens_per_s",
    "simulated_tokens_per_s",
)


def fastest_layouts(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the layout that was chosen and the fastest of the others, each with its faster policy."""
    rates = {
        (layout, policy): rate
        for layout, own in entry["layouts"].items()
        for policy, rate in own.items()
        if policy != "bound"
    }
    others = [key for key in rates if key[0] != entry["chosen"]]
    return [(entry["chosen"], entry["policy"]), max(others, key=rates.__getitem__)]


def fastest_run(scenario: Scenario, layout: Layout, policy: str) -> LayoutRun:
    if policy == "vllm":
        return run_stock(scenario, layout)
    return max(run_pipemax(scenario, layout), key=lambda run: run.tokens_per_s)


def engine_of(run: LayoutRun, scenario: Scenario) -> RehearsedEngine:
    """Return the engine that was simulated."""
    workload, layout = scenario.workload, run.layout
    is_stock = run.policy is ChosenPolicy.VLLM
    engine = RehearsedEngine(
        node=scenario.node,
        model=scenario.model,
        parallelism=layout.parallelism,
        policy=Policy.VLLM if is_stock else Policy.PIPEMAX,
        chunk_tokens=run.chunk_tokens,
        max_model_len=int((workload.prompt_tokens + workload.output_tokens).max()) + 1,
        batching=run.batching or Batching.SEPARATED,
        controller={} if is_stock else {"initial_output_tokens": workload.typical_output_tokens},
        clock=ClockSettings(host_factor=0.0),
        checks_kv=False,
    )
    return replace(engine, max_num_seqs=MAX_NUM_SEQS) if is_stock else engine


def run_layout(entry: dict[str, Any], layout_name: str, policy: str, most_rows: int) -> dict[str, Any]:
    """Return the object for one layout."""
    node, model = load_node(entry["node"]), load_model(entry["model"])
    layout = next(layout for layout in possible_layouts(node) if str(layout) == layout_name)
    sample = open_workload(entry["workload"], most_rows)
    scenario = engine_scenario(node, model, layout, sample, stops_at_drain=True)
    run = fastest_run(scenario, layout, policy)
    result = rehearse(engine_of(run, scenario), scenario.workload)
    return {
        "node": entry["node"],
        "model": entry["model"],
        "layout": layout_name,
        "policy": "stock" if run.batching is None else f"PipeMax, {run.batching.value}",
        "step_tokens": run.chunk_tokens,
        "rows": len(scenario.workload),
        "chosen": layout_name == entry["chosen"],
        "tokens_per_s": round(layout.replicas * result.steady_tokens_per_s, 1),
        "simulated_tokens_per_s": round(run.tokens_per_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=12_000, help="of one engine, at most")
    parser.add_argument("--only", action="append", help="node,model: this setting only; repeatable")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        found = json.loads(arguments.json.read_text(encoding="utf-8"))
    known = {(one["node"], one["model"], one["layout"]) for one in found}
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    for entry in json.loads(COMPARED.read_text(encoding="utf-8")):
        setting = entry["node"], entry["model"]
        if "chosen" not in entry or (arguments.only and ",".join(setting) not in arguments.only):
            continue
        for layout, policy in fastest_layouts(entry):
            if (*setting, layout) in known:
                continue
            found.append(run_layout(entry, layout, policy, arguments.rows))
            print("| " + " | ".join(str(found[-1][name]) for name in COLUMNS) + " |", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # vLLM's engines tell their whole configs
    main()
