"""Run vLLM's real scheduler over virtual nodes in two layouts of a node, and compare them as the simulator does.

    python -m bench.layouts_virtual [--rows 600] [--json FILE]
    python -m bench.layouts_virtual --only h100x8,gpt-oss-120b,4x2x1,4x1x2

For each setting: the layout that ``bench.layouts`` finds best and the second best (replicas x tensor x pipeline), both
under stock vLLM with the step size that is fastest in simulation. One engine of each layout runs over its part of the
node, without the host's time, and its rate counts for all replicas. Prints a Markdown table.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipemax.cli.common import open_workload
from pipemax.config import Policy
from pipemax.domain.specs import Parallelism
from pipemax.policy.layout_runs import MAX_NUM_SEQS, engine_scenario, run_stock
from pipemax.policy.layouts import Layout
from pipemax.presets import load_model, load_node
from pipemax.vllm_ext.rehearsal.launch import RehearsedEngine
from pipemax.vllm_ext.rehearsal.run import rehearse
from pipemax.vllm_ext.rehearsal.settings import ClockSettings

SETTINGS = (
    "h100x8,gpt-oss-120b,4x2x1,4x1x2",
    "rtx5090x8,qwen3-8b,4x1x2,8x1x1",
    "h100x8,qwen3-8b,8x1x1,4x1x2",
)
COLUMNS = ("node", "model", "layout", "step_tokens", "rows", "tokens_per_s", "simulated_tokens_per_s")


def run_layout(node_name: str, model_name: str, layout: Layout, rows: int) -> dict[str, Any]:
    """Return the object for one layout."""
    node, model = load_node(node_name), load_model(model_name)
    scenario = replace(
        engine_scenario(node, model, layout, open_workload("sharegpt", rows)), stops_at_drain=True
    )
    simulated = run_stock(scenario, layout)
    workload = scenario.workload
    engine = RehearsedEngine(
        node=scenario.node,
        model=model,
        parallelism=Parallelism(pipeline=layout.pipeline_parallel, tensor=layout.tensor_parallel),
        policy=Policy.VLLM,
        chunk_tokens=simulated.chunk_tokens,
        max_num_seqs=min(MAX_NUM_SEQS, simulated.chunk_tokens),
        max_model_len=int((workload.prompt_tokens + workload.output_tokens).max()) + 1,
        clock=ClockSettings(host_factor=0.0),
        checks_kv=False,
    )
    result = rehearse(engine, workload)
    return {
        "node": node_name,
        "model": model_name,
        "layout": str(layout),
        "step_tokens": simulated.chunk_tokens,
        "rows": len(workload),
        "tokens_per_s": round(layout.replicas * result.steady_tokens_per_s, 1),
        "simulated_tokens_per_s": round(simulated.tokens_per_s, 1),
    }


def layout_of(text: str) -> Layout:
    replicas, tensor, pipeline = (int(part) for part in text.split("x"))
    return Layout(replicas=replicas, tensor_parallel=tensor, pipeline_parallel=pipeline)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=600, help="of one engine")
    parser.add_argument("--only", action="append", help="node,model,layout,layout…; repeatable")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    entries = []
    for setting in arguments.only or SETTINGS:
        node, model, *layouts = setting.split(",")
        for layout in layouts:
            entries.append(run_layout(node, model, layout_of(layout), arguments.rows))
            print("| " + " | ".join(str(entries[-1][name]) for name in COLUMNS) + " |", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
