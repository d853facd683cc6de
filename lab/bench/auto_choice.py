"""Compare what ``policy: auto`` chooses with the best of all candidates in long simulations.

    python lab/bench/auto_choice.py [--rows 12000] [--known FILE ...] [--json FILE]

For each node, model and workload of the paper, and for templated prompts: the engine as its calibration would describe
it on the simulated node, the choice with 1,000 sampled prompts (``pipemax.policy.row_sample``), once with the table's
mean output length and once with the guess that is made without it, and every candidate over ``--rows`` requests on the
simulated machine itself. ``--known`` takes those that ``lab/bench/simulation.py matrix --json`` has simulated with as
many rows. It prints Markdown; ``--json`` keeps a list of objects, two for each setting:

    chosen              policy and settings, as in the engine config
    tokens_per_s        of what was chosen, in the long simulation, steady
    best                the fastest candidate, and its ``best_tokens_per_s``
    of_best             tokens_per_s / best_tokens_per_s
    cpu_s               CPU seconds of the decision
    candidates          tokens/s of each, by name
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.paper.catalog import mixed_names, simulate, stock_chunk_names
from lab.paper.lengths import open_workload
from lab.paper.study import PAPER_SETTINGS
from pipemax.config import RowLengths
from pipemax.domain.specs import ModelSpec, NodeSpec, Parallelism, kv_capacity
from pipemax.policy.compare import ChosenPolicy, PolicyChoice
from pipemax.policy.row_sample import choose_policy
from pipemax.presets import load_model, load_node
from pipemax.sim.machine import BLOCK_TOKENS, prefill_step_tokens
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.stage_times import StageTimes
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching, stage_configs
from pipemax.sim.systems.scenario import Scenario
from pipemax.sim.workloads import Workload

SETTINGS = (*PAPER_SETTINGS, *((node, model, "templated") for node, model, _ in PAPER_SETTINGS[::2]))
CANDIDATES = ("pipemax", "vllm_032_pp", *mixed_names(), *stock_chunk_names())
SAMPLED_PROMPTS = 1_000
COLUMNS = (
    "node",
    "model",
    "workload",
    "outputs",
    "chosen",
    "tokens_per_s",
    "best",
    "best_tokens_per_s",
    "of_best",
    "cpu_s",
)


def measured_engine(
    node: NodeSpec, model: ModelSpec, layout: Parallelism, *, max_model_len: int = 4096
) -> MeasuredEngine:
    """Return the engine as its calibration describes it, with vLLM's defaults for offline batches on GPUs."""
    most_tokens = max(8192, prefill_step_tokens(node, model))
    times = StageTimes(node, model, layout)
    return MeasuredEngine(
        stages=stage_configs(node, times, PipeMaxOptions(tensor=layout.tensor), most_step_tokens=most_tokens),
        round_trip_s=0.0,
        capacity=kv_capacity(node, model, layout, block_tokens=BLOCK_TOKENS),
        windowed_capacity=kv_capacity(node, model, layout, block_tokens=BLOCK_TOKENS, frees_windows=True),
        num_batches=layout.pipeline,
        max_num_seqs=4096,
        max_batched_tokens=most_tokens,
        max_model_len=max_model_len,
    )


def name_of(choice: PolicyChoice) -> str:
    """Return the candidate that was chosen."""
    tokens = choice.settings.get("mixed_step_tokens")
    if choice.chosen is ChosenPolicy.PIPEMAX:
        return "pipemax" if tokens is None else f"pipemax_mixed_{tokens}"
    tokens = choice.settings.get("max_num_batched_tokens")
    return "vllm_032_pp" if tokens is None else f"vllm_032_pp_{tokens}"


class Candidates:
    """Long simulations of one setting, each once."""

    def __init__(self, node: NodeSpec, model: ModelSpec, workload: Workload, known: dict[str, float]) -> None:
        self._scenario = Scenario(node=node, model=model, workload=workload)
        self.tokens_per_s = {name: rate for name, rate in known.items() if name in CANDIDATES}

    def run(self, name: str) -> float:
        if name not in self.tokens_per_s:
            if name.startswith("pipemax_mixed_"):
                size = int(name.rpartition("_")[2])
                options = PipeMaxOptions(name=name, controller=mixed_batching(size))
                result = PipeMaxSystem(self._scenario, options).simulate()
            else:
                result = simulate(name, self._scenario)
            self.tokens_per_s[name] = round(result.steady_tokens_per_s, 1)
        return self.tokens_per_s[name]


def read_known(paths: Sequence[Path], names: tuple[str, str, str], rows: int) -> dict[str, float]:
    """Return the steady tokens/s of what was simulated of a setting with as many rows, by system."""
    entries = [entry for path in paths for entry in json.loads(path.read_text(encoding="utf-8"))]
    return {
        entry["system"]: entry["steady_tokens_per_s"]
        for entry in entries
        if (entry["node"], entry["model"], entry["workload"]) == names and entry["requests"] == rows
    }


def run_setting(names: tuple[str, str, str], rows: int, known: Sequence[Path]) -> list[dict[str, Any]]:
    node, model = load_node(names[0]), load_model(names[1])
    workload = open_workload(names[2], rows)
    engine = measured_engine(node, model, Parallelism(pipeline=node.num_gpus, tensor=1))
    prompts = np.random.default_rng(1).choice(workload.prompt_tokens, SAMPLED_PROMPTS).tolist()
    candidates = Candidates(node, model, workload, read_known(known, names, rows))
    for name in CANDIDATES:
        candidates.run(name)
    entries = []
    for outputs in ("told", "guessed"):
        mean = float(workload.output_tokens.mean()) if outputs == "told" else None
        lengths = RowLengths(
            prompt_tokens=tuple(prompts),
            shared_prefix_tokens=workload.shared_prefix_tokens,
            max_tokens=int(workload.output_tokens.max()),
            mean_output_tokens=mean,
            rows=10_000_000,
        )
        begin_s = time.process_time()
        choice = choose_policy(engine, lengths, chunk_is_free=True)
        cpu_s = time.process_time() - begin_s
        chosen = name_of(choice)
        rate = candidates.run(chosen)
        best = max(candidates.tokens_per_s, key=candidates.tokens_per_s.__getitem__)
        entry = {
            "node": names[0],
            "model": names[1],
            "workload": names[2],
            "rows": rows,
            "outputs": outputs,
            "chosen": chosen,
            "tokens_per_s": rate,
            "best": best,
            "best_tokens_per_s": candidates.tokens_per_s[best],
            "of_best": round(rate / candidates.tokens_per_s[best], 3),
            "cpu_s": round(cpu_s, 1),
            "reason": choice.reason,
            "candidates": dict(candidates.tokens_per_s),
        }
        print("| " + " | ".join(str(entry[name]) for name in COLUMNS) + " |", flush=True)
        entries.append(entry)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--only", help="node,model,workload: one setting")
    parser.add_argument(
        "--known",
        type=Path,
        nargs="+",
        default=[],
        help="figures of lab/bench/simulation.py matrix, and others like them",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = SETTINGS
    if arguments.only:
        node, model, workload = arguments.only.split(",")
        settings = ((node, model, workload),)
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    entries: list[dict[str, Any]] = []
    for names in settings:
        entries += run_setting(names, arguments.rows, arguments.known)
        if arguments.json:
            arguments.json.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
