"""Compare the layout that an engine chooses with every layout run in full, in simulation.

    python -m lab.bench.layouts [--rows 3000] [--only NODE,MODEL,WORKLOAD] [--json FILE]

For each node and model: every layout over ``--rows`` rows, under stock vLLM with every size of a step and under PipeMax
in phases and with mixed steps of the faster of two sizes, and the choice (``pipemax.policy.layout_choice``) from
rows of its own. PipeMax is run in the layouts with the highest bound first, until the others' bounds are below the
fastest run. It prints Markdown; ``--json`` keeps a list of objects. A run with a file that exists goes on where it
ended: only the choices are made again.

    chosen              the layout
    policy              of its two policies, the one that was chosen with it
    tokens_per_s        of the chosen layout with that policy, over all rows
    best                the best layout and policy over all rows, and its ``best_tokens_per_s``
    of_best             tokens_per_s / best_tokens_per_s (goal: 0.97)
    cpu_s               CPU seconds of the choice
    layouts             tokens/s of each layout over all rows: ``vllm``, ``pipemax`` (if it was run), and PipeMax's
                        ``bound``
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from lab.paper.lengths import open_workload
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.policy.layout_choice import SAMPLE_ROWS, FixedLayout, choose_layout
from pipemax.policy.layout_runs import engine_scenario, pipemax_bound, run_pipemax, run_stock
from pipemax.policy.layouts import Layout, layout_refusal, possible_layouts
from pipemax.presets import load_model, load_node
from pipemax.sim.workloads import Workload

NODES = ("l20x8", "rtx5090x8", "h100x8")
MODELS = ("qwen3-8b", "gpt-oss-120b", "qwen3-32b", "llama2-70b", "mixtral-8x7b", "qwen3-235b-a22b")
SETTINGS = [(node, model, "sharegpt") for model in MODELS for node in NODES]
COLUMNS = (
    "node",
    "model",
    "workload",
    "chosen",
    "policy",
    "tokens_per_s",
    "best",
    "best_tokens_per_s",
    "of_best",
    "cpu_s",
)
Rates = dict[str, dict[str, float]]


def stock_rates(node: NodeSpec, model: ModelSpec, sample: Workload) -> Rates:
    """Return stock vLLM's tokens/s of every possible layout, and PipeMax's bound."""
    rates: Rates = {}
    for layout in possible_layouts(node):
        if layout_refusal(node, model, layout) is not None:
            continue
        scenario = engine_scenario(node, model, layout, sample, stops_at_drain=True)
        rates[str(layout)] = {"vllm": round(run_stock(scenario, layout).tokens_per_s, 1)}
        if (bound := pipemax_bound(scenario, layout)) is not None:
            rates[str(layout)]["bound"] = round(bound, 1)
    return rates


def add_pipemax(node: NodeSpec, model: ModelSpec, sample: Workload, rates: Rates) -> bool:
    """Run PipeMax in the next layout in which it may be the fastest; return whether there was one."""
    best = max(max(own["vllm"], own.get("pipemax", 0.0)) for own in rates.values())
    bounds = {
        name: own["bound"]
        for name, own in rates.items()
        if "pipemax" not in own and own.get("bound", 0.0) >= best
    }
    if not bounds:
        return False
    name = max(bounds, key=bounds.__getitem__)
    layout = next(layout for layout in possible_layouts(node) if str(layout) == name)
    rates[name]["pipemax"] = _pipemax_rate(node, model, layout, sample)
    return True


def _pipemax_rate(node: NodeSpec, model: ModelSpec, layout: Layout, sample: Workload) -> float:
    runs = run_pipemax(engine_scenario(node, model, layout, sample, stops_at_drain=True), layout)
    return round(max(run.tokens_per_s for run in runs), 1)


def add_choice(node: NodeSpec, model: ModelSpec, entry: dict[str, Any]) -> None:
    """Choose a layout, and compare it with what was run in full."""
    sample = open_workload(entry["workload"], SAMPLE_ROWS)
    begin_s = time.process_time()
    choice = choose_layout(node, model, sample, fixed=FixedLayout())
    cpu_s = time.process_time() - begin_s
    rates: Rates = entry["layouts"]
    policy = str(choice.best.policy) if choice.best else "vllm"
    own = rates[str(choice.layout)]
    if policy == "pipemax" and policy not in own:  # its bound is below the fastest run
        own[policy] = _pipemax_rate(
            node, model, choice.layout, open_workload(entry["workload"], entry["rows"])
        )
    run = {
        (layout, policy): rate
        for layout, own in rates.items()
        for policy, rate in own.items()
        if policy != "bound"
    }
    best = max(run, key=run.__getitem__)
    rate = own[policy]
    entry |= {
        "chosen": str(choice.layout),
        "policy": policy,
        "tokens_per_s": rate,
        "best": ", ".join(best),
        "best_tokens_per_s": run[best],
        "of_best": round(rate / run[best], 3),
        "cpu_s": round(cpu_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--only", action="append", help="node,model,workload: this setting only; repeatable")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = SETTINGS
    if arguments.only:
        settings = [(node, model, load) for node, model, load in (one.split(",") for one in arguments.only)]
    entries: list[dict[str, Any]] = []
    if arguments.json and arguments.json.exists():
        entries = json.loads(arguments.json.read_text(encoding="utf-8"))

    def keep() -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")

    def entry_of(names: tuple[str, str, str]) -> dict[str, Any]:
        key = {**dict(zip(("node", "model", "workload"), names, strict=True)), "rows": arguments.rows}
        for entry in entries:
            if key.items() <= entry.items():
                return entry
        entries.append(key)
        return key

    # All of stock vLLM first, which takes little: PipeMax takes most of the time.
    for names in settings:
        node, model, entry = load_node(names[0]), load_model(names[1]), entry_of(names)
        if "layouts" not in entry:
            entry["layouts"] = stock_rates(node, model, open_workload(names[2], arguments.rows))
            keep()
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for names in settings:
        node, model, entry = load_node(names[0]), load_model(names[1]), entry_of(names)
        sample = open_workload(names[2], arguments.rows)
        if entry["layouts"]:
            while add_pipemax(node, model, sample, entry["layouts"]):
                keep()
            add_choice(node, model, entry)
            keep()
        cells = [entry.get(name, "does not fit" if name == "chosen" else "") for name in COLUMNS]
        print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
